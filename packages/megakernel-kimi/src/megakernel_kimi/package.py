"""The entry point of the family: names, defaults and loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import Mesh
from kda_mla_kernels.backend import (
    RANKS,
    BackendModel,
    LoadOptions,
    Track,
    choose_devices,
    chosen_kernel,
    held_dtype,
    progress_bar,
    whole_number,
)
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.errors import CheckpointError, ConfigError
from kda_mla_kernels.model import GenerationDefaults
from kda_mla_kernels.moe.kernel import ExpertForm
from tokenizers import Tokenizer
from tpu_collectives import Topology, TopologyError

from megakernel_kimi.chat import KimiChatFormat
from megakernel_kimi.checkpoint import check_tensors
from megakernel_kimi.config import KimiConfig
from megakernel_kimi.container import (
    VARIABLE,
    Converted,
    ConvertedFolder,
    Target,
    find_converted,
    load_converted,
    open_source,
)
from megakernel_kimi.container.opened import Choices
from megakernel_kimi.holders import holders_by_cost
from megakernel_kimi.kernel.fitting import fitting_model
from megakernel_kimi.kernel.loading import load_kernel_weights
from megakernel_kimi.kernel.plan import KernelModel
from megakernel_kimi.kernel.programs import KernelPrograms
from megakernel_kimi.layout import KimiLayout, legal_ranks
from megakernel_kimi.loading import load_weights
from megakernel_kimi.tensors import count_parameters
from megakernel_kimi.tokenizer import load_tokenizer
from megakernel_kimi.xla.caches import cache_shapes
from megakernel_kimi.xla.programs import Programs
from megakernel_kimi.xla.rank import Rank

__all__ = [
    "default_repo",
    "embedded_checkpoint",
    "family",
    "load",
    "model_types",
    "variable_prefix",
    "weights_variable",
]

family = "kimi"
model_types = frozenset({"kimi_k3", "kimi_linear"})
default_repo = "moonshotai/Kimi-K3"
variable_prefix = "KIMI"
weights_variable = VARIABLE


def embedded_checkpoint() -> Path:
    """This package ships no small checkpoint yet.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(
        "megakernel-kimi ships no small checkpoint; name a folder or repository instead"
    )


def load(
    checkpoint: str | Path,
    *,
    revision: str | None = None,
    devices: Sequence[jax.Device] | None = None,
    backend: Literal["auto", "xla", "megakernel"] = "auto",
    numerics: Literal["auto", "f32", "bf16"] = "auto",
    max_rows: int = 8,
    max_context: int | None = None,
    feature_layers: Sequence[int] = (),
    progress: bool = False,
    weights: str | Path = "auto",
    expert_tp: int | None = None,
    expert_form: ExpertForm | None = None,
    holders: int | None = None,
) -> BackendModel:
    """Loads a checkpoint of the family; arguments and errors as in the model protocol.

    Args:
        feature_layers: layers whose entering prefix is kept: the sum inside the current block of
            the attention residual before the layer stores or changes it. The number of layers
            stands for the prefix after the last one.
        weights: a folder that ``python -m megakernel_kimi.convert`` wrote for as many ranks. With
            ``auto``, ``checkpoint`` may itself be one; otherwise the environment variable
            ``KIMI_PRESHARDED_WEIGHTS`` may name one. Converted weights decide whatever is left
            open here: numerics, ``expert_tp``, ``expert_form``, and the kernel as backend.
        expert_tp: ranks that share one routed expert; default: as many as can.
        expert_form: what the kernel holds gate and up of routed experts as: ``mxfp4``, as they are
            stored (default), or lossless block FP8, ``fp8``, twice the bytes. Backend xla has the
            first only.
        holders: ranks among which the cached positions of a row are dealt out: 1, so that every
            rank holds them all, the ranks of a host, or all ranks. Long contexts take less memory
            and time if they are dealt out, short ones more time. Default: the cheapest that the
            kernel's VMEM has room for, if all rows have filled half of ``max_context``; backend xla
            takes the cheapest for the kernel. Results may differ in the last bits.

    Raises:
        CheckpointError, ConfigError: also where converted weights are damaged, or were converted
            from another checkpoint or for something else than what is asked for.
    """
    # First, since a repository may have terabytes to download.
    converted = find_converted(checkpoint, weights)
    opened = open_source(checkpoint, revision, progress=progress)
    config = KimiConfig.from_dict(opened.config)
    ranks = choose_devices(devices)
    choices = _asked(backend, numerics, expert_tp, expert_form)
    if converted is not None:
        choices = converted.decide(config, len(ranks), choices)
    elif isinstance(opened, Checkpoint):
        check_tensors(opened, config)  # before anything is planned for sizes that it does not have
    layout = KimiLayout.of(config, len(ranks), lanes=_lanes(ranks), expert_tp=choices.expert_tp)
    options = LoadOptions.of(
        ranks[0].platform,
        longest_context=config.max_position_embeddings,
        last_feature=config.num_hidden_layers,
        numerics=choices.numerics,
        max_rows=max_rows,
        max_context=max_context,
        feature_layers=feature_layers,
    )
    layouts = _with_holders(layout, options, holders)
    make = partial(fitting_model, layouts, options, choices.expert_form or "mxfp4")
    kernel = chosen_kernel(choices.backend, ranks, make)
    if kernel is None and choices.expert_form not in (None, "mxfp4"):
        raise ConfigError(
            f"expert_form {choices.expert_form!r} is for the kernel, but backend xla runs this"
            " model and holds experts as they are stored; leave it open, or take backend megakernel"
        )
    layout = layouts[0] if kernel is None else kernel.layout
    held = held_dtype(options.numerics, ranks[0].platform) if kernel is None else kernel.held
    shapes = cache_shapes(layout, options.max_rows, options.slots, held)
    options.check_memory(shapes, ranks)
    control, chat_format, generation = _text_side(opened, config)

    mesh = Mesh(np.array(ranks), (RANKS,))
    source = _Source(opened, converted, layout, mesh, held, options, progress_bar(progress))
    loaded, programs = source.xla() if kernel is None else source.kernel(kernel)
    info = options.describe(
        loaded,
        len(ranks),
        family=family,
        name=opened.name,
        backend="xla" if kernel is None else "megakernel",
        legal_ranks=legal_ranks(config) if converted is None else (len(ranks),),
        details=_details(layout, "mxfp4" if kernel is None else kernel.form),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        parameters=count_parameters(config).total,
    )
    return BackendModel(info, generation, chat_format, control, loaded, programs)


def _asked(
    backend: str, numerics: str, expert_tp: int | None, expert_form: ExpertForm | None
) -> Choices:
    """What converted weights may complete."""
    if expert_tp is not None:
        expert_tp = whole_number("expert_tp", expert_tp)
    if expert_form not in (None, *get_args(ExpertForm)):
        raise ConfigError(f"expert_form {expert_form!r} must be one of {get_args(ExpertForm)}")
    return Choices(backend, numerics, expert_tp, expert_form)


def _details(layout: KimiLayout, form: ExpertForm) -> tuple[tuple[str, str], ...]:
    """What was chosen beside the ranks, for people."""
    over = f"dealt out to {layout.holders} ranks" if layout.split else "on every rank"
    return (
        ("experts", f"{form.upper()}, each on {layout.expert_tp} rank(s)"),
        ("cached positions", over),
    )


@dataclass(frozen=True)
class _Source:
    """A checked checkpoint or its converted weights, and where they go."""

    checkpoint: Checkpoint | ConvertedFolder
    converted: Converted | None
    layout: KimiLayout
    mesh: Mesh
    held: np.dtype
    options: LoadOptions
    track: Track

    def xla(self) -> tuple[Any, Programs]:
        assert isinstance(self.checkpoint, Checkpoint), "converted weights are the kernel's"
        weights = load_weights(self.checkpoint, self.layout, self.mesh, self.held, self.track)
        return weights, Programs.of(self.options, self.mesh, rank=self._rank)

    def kernel(self, model: KernelModel) -> tuple[Any, Programs]:
        if self.converted is not None:
            target = Target.of_model(model)
            self.converted.check(target, self.checkpoint)
            weights = load_converted(self.converted, target, self.mesh, self.track)
        else:
            assert isinstance(self.checkpoint, Checkpoint), "else there are converted weights"
            weights = load_kernel_weights(
                self.checkpoint, self.layout, model.expert_shape, self.mesh, self.held, self.track
            )
        return weights, KernelPrograms.of(self.options, self.mesh, rank=self._rank, model=model)

    @property
    def _rank(self) -> Rank:
        return Rank(self.layout, self.options.numerics, self.held)


def _with_holders(
    layout: KimiLayout, options: LoadOptions, holders: int | None
) -> list[KimiLayout]:
    """With so many holders of a row's positions, or all that can be chosen, the cheapest first."""
    if holders is not None:
        choices = [whole_number("holders", holders)]
    else:
        choices = holders_by_cost(
            layout.config,
            ranks=layout.ranks,
            lanes=layout.lanes,
            rows=options.max_rows,
            context=options.max_context,
        )
    return [replace(layout, holders=choice) for choice in choices]


def _lanes(devices: Sequence[jax.Device]) -> int | None:
    """Ranks of a host of a TPU slice; None where there are no hosts to respect."""
    if devices[0].platform != "tpu":
        return None
    try:
        return Topology.from_devices(devices).ranks_per_host
    except TopologyError as error:
        raise ConfigError(str(error)) from None


def _text_side(
    source: Checkpoint | ConvertedFolder, config: KimiConfig
) -> tuple[Tokenizer | None, KimiChatFormat | None, GenerationDefaults]:
    """Tokenizer, chat format and defaults; weights alone take token ids and give token ids."""
    has_tokenizer = (source.folder / "tiktoken.model").exists()
    stops = frozenset() if config.eos_token_id is None else frozenset({config.eos_token_id})
    control = chat_format = None
    if has_tokenizer:
        tokenizer = load_tokenizer(source.folder, vocab_size=config.vocab_size)
        control, chat_format = tokenizer.control, KimiChatFormat(tokenizer)
        stops |= chat_format.stop_ids
    generation = GenerationDefaults.from_json(source.json("generation_config.json"), stops)
    return control, chat_format, generation
