"""Sizes of a delta rule's heads on one rank, their state, and how a record is laid out.

Letters: S sequences, T tokens each, P rows padded to whole sublanes, R rows of the state, Nl
layers, C convolution channels (queries, keys, values), W taps, Hk key heads, Hv value heads, K key
dim, V value dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

__all__ = ["LANES", "DeltaMemory", "DeltaShape", "RecordLayout", "Span"]

LANES = 128
"""Lanes of a vector register; transfers and loads of whole lanes need no shuffling."""


@dataclass(frozen=True)
class Span:
    """Columns ``start .. start + size`` of a row, padded with zeros up to ``stop``."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + -(-self.size // LANES) * LANES

    @property
    def columns(self) -> slice:
        """The columns that hold something."""
        return slice(self.start, self.start + self.size)

    @property
    def whole(self) -> slice:
        """These and the padding."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of a token's record stand: ``S <- decay · S + key ⊗ update``."""

    inputs: Span
    """C convolution inputs"""
    key: Span
    """Hk·K, unit length"""
    update: Span
    """Hv·V"""
    decay: Span
    """the shape's ``decay_width``"""


@dataclass(frozen=True)
class DeltaShape(ABC):
    """Heads and widths of one rank's share, and how its decays multiply a state.

    Attributes:
        tail_padding: rows that a tail has in memory beyond its W-1; they hold anything. On a TPU
            make it a power of two: W-1 = 3 rows take the bytes of 4 anyway, but XLA lays an array
            of 3 rows out the other way round, and copies it all for every kernel that takes it.

    Raises:
        ValueError: a size below one, fewer than two taps, or value heads that key heads do not
            divide; negative padding.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tail_padding: int = 0

    kind: ClassVar[str]
    """Short name of the layer, for the names of kernels."""

    def __post_init__(self) -> None:
        if min(self.key_heads, self.value_heads, self.key_dim, self.value_dim) < 1:
            raise ValueError(f"heads and dims must be at least 1: {self}")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly;"
                " the first must be a multiple of the second"
            )
        if self.taps < 2:
            raise ValueError(f"a short convolution has at least 2 taps, not {self.taps}")
        if self.tail_padding < 0:
            raise ValueError(f"a tail cannot have {self.tail_padding} rows of padding; 0 is none")

    @property
    @abstractmethod
    def decay_width(self) -> int:
        """Decays of a token, as a record holds them."""

    @property
    @abstractmethod
    def spread_width(self) -> int:
        """Columns of :meth:`spread_decays`."""

    @abstractmethod
    def spread_decays(self, decays: jax.Array) -> jax.Array:
        """What can be done for all rows at once: [P, decay width] -> [P, spread width]."""

    @abstractmethod
    def decay_factors(self, row: jax.Array) -> list[jax.Array]:
        """What each value head's state [K, V] is multiplied by, up to broadcasting.

        Args:
            row: [1, spread width].
        """

    @property
    def group(self) -> int:
        """Value heads that read one key head."""
        return self.value_heads // self.key_heads

    @property
    def key_width(self) -> int:
        """Hk·K."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Hv·V."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def tail_rows(self) -> int:
        """Rows of a tail in memory: the W-1 inputs, then padding."""
        return self.taps - 1 + self.tail_padding

    def readers(self, key_head: int) -> tuple[slice, slice]:
        """The value heads that read a key head, and their columns among Hv·V."""
        first, stop = key_head * self.group, (key_head + 1) * self.group
        return slice(first, stop), slice(first * self.value_dim, stop * self.value_dim)

    @property
    def record(self) -> RecordLayout:
        """The parts of a record, each padded to whole lanes."""
        spans: list[Span] = []
        for size in (self.channels, self.key_width, self.value_width, self.decay_width):
            spans.append(Span(spans[-1].stop if spans else 0, size))
        return RecordLayout(*spans)

    @property
    def record_width(self) -> int:
        """Columns of a record."""
        return self.record.decay.stop


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaMemory:
    """What sequences leave behind: arrays outside a kernel, HBM references inside."""

    tail: Any
    """[Nl, R, tail rows, C] the last W-1 convolution inputs, oldest first, in the held dtype"""
    delta: Any
    """f32 [Nl, R, Hv, K, V]"""
