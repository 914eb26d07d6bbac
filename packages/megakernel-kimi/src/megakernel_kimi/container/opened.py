"""A converted folder: what it was made for, and whether that is what a caller wants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.checkpoint.folder import read_json
from kda_mla_kernels.errors import CheckpointError, ConfigError
from kda_mla_kernels.moe.kernel import ExpertForm
from vmem_pool import ContainerError
from vmem_pool.container import Container, Spec, read_manifest

from megakernel_kimi.config import KimiConfig
from megakernel_kimi.container.origin import origin_of
from megakernel_kimi.container.target import Target, config_hash

__all__ = ["Choices", "Converted", "ConvertedFolder"]

NUMERICS = {"bfloat16": "bf16", "float32": "f32"}
"""Policies by the dtype that they hold weights in."""


class ConvertedFolder:
    """Configuration, tokenizer and defaults of a converted checkpoint, which travel with it.

    Stands where a :class:`~kda_mla_kernels.checkpoint.Checkpoint` does, and has no tensors.

    Args:
        folder: with a ``config.json``.

    Raises:
        CheckpointError: it has none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.resolve().name
        config = self.json("config.json")
        if not isinstance(config, dict):
            raise CheckpointError(f"{folder} holds converted weights, but no config.json")
        self.config: dict[str, Any] = config

    def json(self, name: str) -> Any | None:
        """See :meth:`kda_mla_kernels.checkpoint.Checkpoint.json`."""
        file = self.folder / name
        return read_json(file) if file.is_file() else None

    def origin(self) -> str:
        """Which checkpoint was converted; see :func:`origin_of`.

        Raises:
            CheckpointError: the manifest is damaged.
        """
        try:
            metadata = read_manifest(self.folder).spec.metadata
        except ContainerError as error:
            raise CheckpointError(str(error)) from None
        if "origin" not in metadata:
            raise CheckpointError(f"{self.folder / 'manifest.json'} names no checkpoint")
        return metadata["origin"]


@dataclass(frozen=True)
class Choices:
    """How a model is to be loaded, as far as converted weights decide it; None and ``auto`` leave
    it to them."""

    backend: str
    numerics: str
    expert_tp: int | None
    expert_form: ExpertForm | None


@dataclass(frozen=True)
class Converted:
    """Weights that were converted for one layout."""

    container: Container
    place: str
    """what messages call it"""

    @property
    def spec(self) -> Spec:
        return self.container.spec

    @property
    def expert_tp(self) -> int:
        """Ranks that share an expert."""
        return int(self.spec.metadata["expert_tp"])

    @property
    def expert_form(self) -> ExpertForm:
        named = {form: form for form in get_args(ExpertForm)}
        return named[self.spec.metadata["expert_form"]]

    @property
    def numerics(self) -> str:
        """The policy whose weights these are."""
        return NUMERICS[self.spec.metadata["dtype"]]

    def decide(self, config: KimiConfig, ranks: int, asked: Choices) -> Choices:
        """What is asked for, completed by what the weights are.

        Raises:
            CheckpointError: their manifest does not say what they are.
            ConfigError: they are of another model, for other ranks, or of another form.
        """
        try:
            own = Choices("megakernel", self.numerics, self.expert_tp, self.expert_form)
            _ = self.spec.mesh["lanes"], self.spec.metadata["origin"]  # which check() reads
        except (KeyError, ValueError) as error:
            why = f"{error} is missing or unknown" if isinstance(error, KeyError) else error
            raise CheckpointError(
                f"the manifest of the weights in {self.place} is damaged ({why}); delete it and"
                " convert the checkpoint again"
            ) from None
        if self.spec.config_hash != config_hash(config):
            self._refuse("are those of a model with another configuration", "convert this one")
        if self.spec.num_ranks != ranks:
            self._refuse(
                f"are cut for {self.spec.num_ranks} ranks, not for {ranks}",
                f"take {self.spec.num_ranks} devices, or convert the checkpoint for {ranks}",
            )
        if asked.backend == "xla":
            self._refuse(
                "are in the form of the kernel, which backend xla does not read",
                "take backend megakernel, or the checkpoint",
            )
        for name in ("numerics", "expert_tp", "expert_form"):
            wanted, found = getattr(asked, name), getattr(own, name)
            if wanted not in (None, "auto", found):
                self._refuse(
                    f"have {name} {found}, not {wanted}",
                    f"leave {name} open, or convert the checkpoint for {wanted}",
                )
        backend = own.backend if asked.backend == "auto" else asked.backend
        return Choices(backend, own.numerics, own.expert_tp, own.expert_form)

    def check(self, target: Target, source: Checkpoint | ConvertedFolder) -> None:
        """Makes sure that the kernel can read the bytes as they are.

        Args:
            source: the checkpoint that must be the one that was converted, or another conversion
                of it.

        Raises:
            ConfigError: hosts of other sizes, or another arrangement of the same weights.
            CheckpointError: another checkpoint of the same configuration was converted.
        """
        wanted, found = target.spec(self.spec.metadata["origin"]), self.spec
        if dict(found.mesh) != dict(wanted.mesh):
            lanes, asked = found.mesh["lanes"], wanted.mesh["lanes"]
            self._refuse(f"are cut for hosts of {lanes} ranks, not of {asked}")
        if found != wanted:
            self._refuse("were arranged by another version of megakernel-kimi")
        if isinstance(source, ConvertedFolder):
            origin = source.origin()
        else:
            origin = origin_of(source, target.layout.config)
        if origin != found.metadata["origin"]:
            raise CheckpointError(
                f"the weights in {self.place} were not converted from {source.name!r}, but from"
                " another checkpoint of the same configuration"
            )

    def _refuse(self, what: str, remedy: str = "convert the checkpoint again") -> NoReturn:
        raise ConfigError(f"the weights in {self.place} {what}; {remedy}")
