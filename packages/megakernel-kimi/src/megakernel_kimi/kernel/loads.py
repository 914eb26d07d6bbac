"""Loads of a layer's small weights, one layer ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.experimental.pallas import tpu as pltpu

__all__ = ["Turns"]


@dataclass(frozen=True)
class Turns:
    """Entries of an array in HBM that pass through two buffers in turns.

    Attributes:
        source: HBM [N, ...].
        buffers: VMEM [2, ...].
        sems: DMA semaphores [2].
    """

    source: Any
    buffers: Any
    sems: Any

    def start(self, entry: Any) -> None:
        """Starts a load; its buffer is free once the entry two before is done with."""
        self._copy(entry).start()

    def take(self, entry: Any) -> Any:
        """Waits for an entry that was started, and gives its buffer."""
        self._copy(entry).wait()
        return self.taken(entry)

    def taken(self, entry: Any) -> Any:
        """The buffer of an entry that was taken."""
        return self.buffers.at[lax.rem(entry, 2)]

    def _copy(self, entry: Any) -> Any:
        slot = lax.rem(entry, 2)
        return pltpu.make_async_copy(
            self.source.at[entry], self.buffers.at[slot], self.sems.at[slot]
        )
