"""From settings to a loaded model: which checkpoint, which package, which devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
from kda_mla_kernels.chat import ChatFormat
from kda_mla_kernels.checkpoint import fetch_json
from kda_mla_kernels.errors import CheckpointError, ConfigError
from kda_mla_kernels.model import (
    LoadsConverted,
    Model,
    ModelPackage,
    find_package,
    package_for_model_type,
    packages,
)
from tokenizers import Tokenizer

from megakernel_serve.program_cache import keep_programs
from megakernel_serve.settings import Layers, Settings, SettingsError

__all__ = ["Choice", "LoadedModel", "choose", "load", "load_model"]


MOST_VIRTUAL = 256
"""Virtual devices that a CPU is divided into at most; each costs threads and memory."""


@dataclass(frozen=True)
class Choice:
    """What to load with which package."""

    package: ModelPackage
    checkpoint: str | Path
    revision: str | None = None
    weights: str | None = None
    """A folder of converted weights; None leaves it to the package, which may know of one."""


@dataclass(frozen=True)
class LoadedModel:
    """A model, and how to talk to it."""

    model: Model
    tokenizer: Tokenizer
    chat_format: ChatFormat | None
    """None if neither the package nor the settings have one."""


class _Asked(Protocol):
    """The part of a command line that says what to load."""

    @property
    def family(self) -> str | None: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def layers(self) -> Layers: ...


def choose(asked: _Asked) -> Choice:
    """Decides what to load, without loading it.

    A family's own command takes ``--model``, else ``{PREFIX}_CHECKPOINT``, else the other places
    of ``model``, else the family's main repository. All other commands take ``model``, else the
    small checkpoint that ships with the installed package. A family's name as ``model`` is that
    family's small checkpoint, unless a folder has this name.

    Converted weights come from ``--weights``, else from the family's own variable, which its
    package reads, else from the other places of ``weights``.

    Raises:
        SettingsError: there are ``weights``, but the package takes none.
        LookupError: no package fits, or nothing says which of several is meant.
        CheckpointError: the checkpoint's ``config.json`` cannot be read.
    """
    choice = _choose(asked)
    return replace(choice, weights=_weights(choice.package, asked.settings, asked.layers))


def _choose(asked: _Asked) -> Choice:
    settings, layers = asked.settings, asked.layers
    if asked.family is not None:
        return _choose_of_family(find_package(asked.family), settings, layers)
    model = settings.model or _only_family()
    if _is_family(model):
        package = find_package(model)
        return Choice(package, package.embedded_checkpoint(), settings.revision)
    package = _package_of(model, settings.revision)
    return Choice(package, model, _revision(package, settings, layers))


def load(
    choice: Choice, settings: Settings, *, rows: int = 1, progress: bool = False
) -> LoadedModel:
    """Loads a model to talk to: with its tokenizer and chat format.

    Args:
        rows: sequences at the same time, unless the settings say otherwise.

    Raises:
        CheckpointError: there is no tokenizer, or see :func:`load_model`.
        ConfigError: see :func:`load_model`.
    """
    model = load_model(choice, settings, rows=rows, progress=progress)
    if model.tokenizer is None:
        raise CheckpointError(f"{model.info.name} has no tokenizer, so it cannot take text")
    chat_format = model.chat_format
    if settings.chat_template is not None:
        from megakernel_serve.chat_template import template_format

        chat_format = template_format(
            settings.chat_template,
            choice.checkpoint,
            choice.revision,
            model.tokenizer,
            model.generation.stop_ids,
        )
    return LoadedModel(model, model.tokenizer, chat_format)


def load_model(
    choice: Choice, settings: Settings, *, rows: int = 1, progress: bool = False
) -> Model:
    """Loads just the model.

    Raises:
        CheckpointError, ConfigError: see :meth:`kda_mla_kernels.model.ModelPackage.load`.
    """
    keep_programs()
    devices = _devices(settings.devices) if settings.devices is not None else None
    converted: dict[str, Any] = {} if choice.weights is None else {"weights": choice.weights}
    return choice.package.load(
        choice.checkpoint,
        revision=choice.revision,
        devices=devices,
        backend=settings.backend,  # type: ignore[arg-type]  # the settings table has checked it
        numerics=settings.numerics,  # type: ignore[arg-type]
        max_rows=settings.rows or rows,
        max_context=settings.context,
        progress=progress,
        **converted,
    )


def _choose_of_family(package: ModelPackage, settings: Settings, layers: Layers) -> Choice:
    checkpoint: str | None = settings.model
    own = layers.find_variable(f"{package.variable_prefix}_CHECKPOINT")
    if own is not None and "model" not in layers.flags:
        checkpoint = own[0]
    if checkpoint == package.family and not Path(checkpoint).is_dir():
        return Choice(package, package.embedded_checkpoint(), settings.revision)
    return Choice(package, checkpoint or package.default_repo, _revision(package, settings, layers))


def _revision(package: ModelPackage, settings: Settings, layers: Layers) -> str | None:
    own = layers.find_variable(f"{package.variable_prefix}_CHECKPOINT_REVISION")
    return own[0] if own is not None and "revision" not in layers.flags else settings.revision


def _weights(package: ModelPackage, settings: Settings, layers: Layers) -> str | None:
    if not isinstance(package, LoadsConverted):
        if (found := layers.find("weights")) is not None:
            raise SettingsError(
                f"{found[1]} does not go with the {package.family} family, which has no converted"
                " weights"
            )
        return None
    # An exported variable has kept that of .env out, even an empty one, which counts as unset.
    own = os.environ.get(package.weights_variable) or layers.dotenv.get(package.weights_variable)
    if not own or "weights" in layers.flags:
        return settings.weights
    os.environ[package.weights_variable] = own  # where the package looks
    return None


def _only_family() -> str:
    """The one installed family that ships a small checkpoint."""
    installed = sorted(packages())
    if not installed:
        raise LookupError(
            "no model package is installed; try: pip install 'megakernel-serve[qwen]'"
        )
    shipping = [family for family in installed if _ships_checkpoint(family)]
    if not shipping:
        raise LookupError(
            f"no installed model package ({', '.join(installed)}) ships a small checkpoint: name a"
            " folder or repository with --model"
        )
    if len(shipping) > 1:
        raise LookupError(
            f"several model packages are installed ({', '.join(shipping)}): choose one's small"
            f" checkpoint with --model, as in --model {shipping[0]}, or a folder or repository"
        )
    return shipping[0]


def _ships_checkpoint(family: str) -> bool:
    try:
        find_package(family).embedded_checkpoint()
    except CheckpointError:
        return False
    return True


def _is_family(model: str) -> bool:
    return model in packages() and not Path(model).is_dir()


def _package_of(checkpoint: str, revision: str | None) -> ModelPackage:
    config = fetch_json(checkpoint, "config.json", revision)
    if config is None:
        raise CheckpointError(f"{checkpoint} has no config.json")
    return package_for_model_type(str(config.get("model_type")))


def _devices(count: int) -> Sequence[jax.Device]:
    """The first ``count`` devices; a CPU is divided into virtual ones if jax has not started."""
    if count <= MOST_VIRTUAL:
        # Interpreted kernels hold a thread per rank while they wait for one another; with one
        # thread per core, jax 0.10 would wait for ever.
        os.environ.setdefault("NPROC", str(max(64, 2 * count)))
        with contextlib.suppress(RuntimeError):  # jax runs already; what it has is checked below
            jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices()
    if len(found) < count:
        divided = f" (a CPU is divided into at most {MOST_VIRTUAL})" if count > MOST_VIRTUAL else ""
        raise ConfigError(
            f"--devices {count} asks for more than the {len(found)} that exist{divided}"
        )
    return found[:count]
