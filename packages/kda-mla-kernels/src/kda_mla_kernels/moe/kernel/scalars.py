"""Numbers that a kernel finds as vectors and reads one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.moe.kernel.packing import LANES

__all__ = ["ScalarTable"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScalarTable:
    """A table in VMEM and its copy in SMEM."""

    vectors: Any
    """VMEM"""
    numbers: Any
    """SMEM"""
    sem: Any

    @classmethod
    def of(cls, rows: int, columns: int, dtype: Any) -> ScalarTable:
        """An entry of ``scratch_shapes``."""
        shape = (rows, -(-columns // LANES) * LANES)
        return cls(pltpu.VMEM(shape, dtype), pltpu.SMEM(shape, dtype), pltpu.SemaphoreType.DMA)

    def write(self, rows: dict[int, jax.Array]) -> None:
        """Writes f32 [1, N] each; :meth:`ready` must follow."""
        for row, values in rows.items():
            self.vectors[row : row + 1, : values.shape[1]] = values.astype(self.vectors.dtype)
        self._copy.start()

    def ready(self) -> None:
        """Waits until the numbers can be read."""
        self._copy.wait()

    @property
    def _copy(self) -> Any:
        return pltpu.make_async_copy(self.vectors, self.numbers, self.sem)
