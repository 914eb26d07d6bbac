"""What the accounting asks of a family of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
from kda_mla_kernels.backend import AbstractModel
from kda_mla_kernels.block import Block
from vmem_pool.stream import StreamPlan

if TYPE_CHECKING:
    from benchmarks.accounting.cases import Case

__all__ = ["Family", "KernelCase", "names_of", "numbered"]


@dataclass(frozen=True)
class KernelCase:
    """One kernel of a program.

    Attributes:
        name: how it begins.
        contents: what its arguments hold, by number, as far as events depend on them.
        scratch: names of its last arguments.
    """

    name: str
    contents: Mapping[int, Any]
    scratch: tuple[str, ...]


class Family(Protocol):
    """A family of models and its kernels."""

    name: str
    """of its published model, as the command takes it"""
    topology: str
    """of a slice that the published model is run on"""
    max_static_bytes: float
    """weights that one of its ranks may read in a step of one row"""
    stages: Sequence[tuple[str, str]]
    """parts of the paths of source files, and the stage they are; the first that fits counts"""
    kinds: Sequence[tuple[str, str]]
    """parts of the names of scratch, and what moves on their semaphores; the first that fits
    counts"""

    def model(self, case: Case) -> AbstractModel:
        """The model on devices that are not there."""
        ...

    def stream(self, model: AbstractModel, block: Block) -> StreamPlan:
        """The weight stream with the ring of a step."""
        ...

    def kernels(self, case: Case, model: AbstractModel) -> list[KernelCase]:
        """The step, then its commit."""
        ...

    def layers(self, model: AbstractModel) -> int:
        """How many there are."""
        ...

    def held(self, model: AbstractModel) -> tuple[Sequence[Any], Sequence[Any]]:
        """Shapes, with an axis of ranks, of the recurrent state and of the cache."""
        ...


def numbered(scalars: Any) -> dict[int, Any]:
    """The arrays of a pytree that is a kernel's first argument."""
    return dict(enumerate(jax.tree.leaves(scalars)))


def names_of(scratch: Any) -> tuple[str, ...]:
    """Names of the leaves of what a kernel has as scratch."""
    leaves = jax.tree_util.tree_leaves_with_path(scratch)
    return tuple(jax.tree_util.keystr(path) for path, _ in leaves)
