"""What the plans of all step kernels have: the first and last stages, the sum, the row limit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from tpu_collectives import AllReduce, ArgMax, Barrier, Topology

from kda_mla_kernels.backend.ranks import RANKS
from kda_mla_kernels.block import Block
from kda_mla_kernels.embedding import EmbeddingRows, table_rows
from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.head import Candidates, best_of_shard, candidate_shapes, candidates_of_shard

__all__ = ["CANDIDATES", "MAX_ROWS", "KernelModel", "StepPlan"]

MAX_ROWS = 16
"""Rows of a step: those of one 16-bit tile."""
CANDIDATES = 64
"""Largest logits that a sampled step lists: the top-k of requests seldom goes beyond."""


class KernelModel(Protocol):
    """What all kernels of a loaded model share."""

    @property
    def layout(self) -> Any:
        """Of one rank: ``ranks``, ``vocab_rows``, and ``config`` with ``hidden_size`` and
        ``vocab_size``."""
        ...

    @property
    def topology(self) -> Topology: ...

    @property
    def held(self) -> jnp.dtype:
        """Dtype of weights and of the wire."""
        ...


class HeadOutputs(Protocol):
    """What the head of a step leaves."""

    @property
    def tokens(self) -> Any:
        """i32 [P, 1]"""
        ...

    @property
    def logits(self) -> Any:
        """f32 [P, columns of the rank's head]"""
        ...

    @property
    def candidates(self) -> Candidates | None: ...


@dataclass(frozen=True)
class StepPlan:
    """A step over one block of tokens.

    Attributes:
        model: what all steps share.
        block: rows of the step.
        candidates: how many of each row's largest logits every rank lists, 0 to 128.

    Raises:
        ConfigError: more than 16 rows.
    """

    model: KernelModel
    block: Block
    candidates: int = 0

    def __post_init__(self) -> None:
        if self.block.rows > MAX_ROWS:
            raise ConfigError(
                f"the megakernel backend takes at most {MAX_ROWS} rows, not {self.block.rows};"
                " take fewer, or backend xla"
            )

    @cached_property
    def embedding(self) -> EmbeddingRows:
        layout = self.model.layout
        width, rows = layout.config.hidden_size, table_rows(layout.vocab_rows)
        return EmbeddingRows(self.block, rows, width, self.model.held)

    @cached_property
    def barrier(self) -> Barrier:
        return Barrier(self.model.topology, RANKS)

    @cached_property
    def reduce(self) -> AllReduce:
        """The sum of hidden rows. Each rank's part is rounded to the activation dtype to travel,
        one rounding more than the sums of the XLA backend have."""
        model, width = self.model, self.model.layout.config.hidden_size
        return AllReduce(model.topology, self.block.rows, width, model.held, axis=RANKS)

    @cached_property
    def arg_max(self) -> ArgMax:
        layout = self.model.layout
        ids = layout.ranks * layout.vocab_rows
        return ArgMax(self.model.topology, self.block.padded, ids, axis=RANKS)

    @property
    def candidate_shapes(self) -> Candidates | None:
        """What a rank returns of them."""
        return candidate_shapes(self.block.padded) if self.candidates else None

    def first_id(self) -> jax.Array:
        """Of this rank's vocabulary, in the kernel."""
        return lax.axis_index(RANKS) * self.model.layout.vocab_rows

    def choose(self, arg_max: Any, out: HeadOutputs) -> None:
        """From this rank's logits to the best token of all ranks; candidates in its shadow.

        Args:
            arg_max: its scratch.
        """
        layout, first = self.model.layout, self.first_id()
        count = jnp.clip(layout.config.vocab_size - first, 0, layout.vocab_rows)
        handle = self.arg_max.start(arg_max, *best_of_shard(out.logits, first, count), 0)
        if out.candidates is not None:
            found = candidates_of_shard(out.logits, first, count, self.candidates)
            out.candidates.values[...] = found.values
            out.candidates.ids[...] = found.ids
        out.tokens[...] = self.arg_max.finish(handle)[1]
