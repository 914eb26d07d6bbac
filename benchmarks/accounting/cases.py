"""The steps that are accounted for, and what their order of events depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from kda_mla_kernels.backend import AbstractModel
from kda_mla_kernels.block import Block
from kda_mla_kernels.moe.kernel import ExpertForm

from benchmarks.accounting.families import FAMILIES, Family, KernelCase

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """A step of one size and its commit.

    Attributes:
        sequences, tokens: S and T; T above 1 is a verify step.
        position: of each sequence's first token, so many keys are read.
        accepted: tokens of each sequence that the commit keeps.
        context: positions that the cache holds.
        topology: of compile-only devices, one rank per device.
        config: as ``config.json``; empty for the family's published model.
        family: name of the family's published model.
        form: container of routed experts, if there are any.
        holders: ranks among which the cached positions of a row are dealt out, if they can be.
    """

    sequences: int
    tokens: int
    position: int
    accepted: int
    context: int
    topology: str
    config: dict[str, Any]
    family: str = "qwen-27b"
    form: ExpertForm = "mxfp4"
    holders: int = 1

    @property
    def title(self) -> str:
        """For people."""
        if self.tokens > 1:
            return f"verify {self.tokens} tokens"
        return "decode 1 row" if self.sequences == 1 else f"decode {self.sequences} rows"

    @property
    def block(self) -> Block:
        """Of the step."""
        return Block(self.sequences, self.tokens)

    @property
    def positions(self) -> np.ndarray:
        """i32 [S]"""
        return np.full(self.sequences, self.position, np.int32)

    @property
    def counts(self) -> np.ndarray:
        """Accepted tokens, i32 [S]."""
        return np.full(self.sequences, self.accepted, np.int32)

    @property
    def of_family(self) -> Family:
        """What is known of its family."""
        return FAMILIES[self.family]

    @property
    def model(self) -> AbstractModel:
        """The model on devices that are not there."""
        return self.of_family.model(self)

    def programs(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Jitted functions and arguments that together hold the step and its commit."""
        model = self.model
        if self.tokens == 1:
            decode = model.decode()
            return [(decode.function, decode.arguments)]
        verify = model.verify(self.tokens)
        sharding = jax.tree.leaves(model.caches)[0].sharding
        whole = jax.tree.leaves(verify.arguments[2])[0]
        records = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            verify.function.eval_shape(*verify.arguments)[2],  # type: ignore[attr-defined]
        )
        commit = model.programs.commit, (model.caches, records, whole, whole)
        return [(verify.function, verify.arguments), commit]

    def kernels(self, model: AbstractModel) -> list[KernelCase]:
        """The step, then its commit."""
        return self.of_family.kernels(self, model)
