"""Typed views of one ``uint8 [rows, 128]`` pool, by value: load bytes, then bitcast.

Bitcasting the loaded **value** instead of the reference uses public API only, means the same on a
TPU and in both interpreters, and compiles to the same loads. Every access moves whole tiles, at
offsets that are multiples of 32 byte rows, as the compiler demands; padding is written as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vmem_pool.errors import PlanError
from vmem_pool.packing import panel_from_bytes, panel_to_bytes
from vmem_pool.planner import Declared, Plan
from vmem_pool.tiling import LANES, TILE_BYTE_ROWS, padded_bytes, padded_shape

__all__ = ["View", "view"]


def view(storage: Any, plan: Plan, name: str, phase: int | None = None) -> View:
    """A buffer of the plan inside its storage.

    Args:
        storage: the reference that :meth:`Plan.scratch` became inside a kernel, or its bytes as a
            NumPy array on the host.
        phase: where the view is used, if the plan shall check it while tracing.

    Raises:
        PlanError: a name that is not planned, storage of another size, or a phase in which the
            buffer does not live.
    """
    if name not in plan.by_name:
        known = ", ".join(sorted(plan.by_name))
        raise PlanError(f"no buffer {name!r} in the plan (planned: {known})")
    expected = (plan.byte_rows, LANES)
    if tuple(storage.shape) != expected or storage.dtype != np.uint8:
        raise PlanError(
            f"the plan's storage is uint8 {expected}, not {storage.dtype} {tuple(storage.shape)}"
        )
    buffer = plan.by_name[name]
    if phase is not None and not buffer.lives_in(phase):
        raise PlanError(f"buffer {name} does not live in phase {phase} ({plan.phases[phase]})")
    return View(storage, buffer, plan.offsets[name] // LANES)


@dataclass(frozen=True)
class View:
    """One buffer of a pool. ``index`` picks a matrix by the leading dimensions, if there are any;
    its entries may be traced values.

    Attributes:
        storage: ``uint8 [rows, 128]`` reference or NumPy array.
        buffer: as declared.
        start: first byte row.
    """

    storage: Any
    buffer: Declared
    start: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one matrix, as declared."""
        return self.buffer.shape[-2:]

    def load(self, *index: Any) -> jax.Array:
        """One matrix [K, N] as a value."""
        panels = [self._panel(index, p) for p in range(self._panels)]
        wide = panels[0] if len(panels) == 1 else self._numpy.concatenate(panels, axis=1)
        rows, lanes = self.shape
        return wide[:rows, :lanes]

    def store(self, value: Any, *index: Any) -> None:
        """Writes one matrix [K, N]; the padding of its tiles becomes zero.

        Raises:
            PlanError: a value of another shape or dtype.
        """
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise PlanError(
                f"buffer {self.buffer.name} holds {self.dtype} {self.shape}, not"
                f" {value.dtype} {tuple(value.shape)}"
            )
        rows, lanes = padded_shape(self.shape, self.dtype)
        padding = [(0, rows - self.shape[0]), (0, lanes - self.shape[1])]
        wide = value if not any(n for _, n in padding) else self._numpy.pad(value, padding)
        for panel in range(self._panels):
            columns = wide[:, panel * LANES : (panel + 1) * LANES]
            at = self._row(index) + panel * self._panel_rows
            self.storage[self._slice(at, self._panel_rows), :] = self._bytes(columns)

    def window(self, *index: Any) -> Any:
        """The byte rows of one matrix, for a DMA from or to bytes as :func:`pack` lays them out."""
        rows = self._slice(self._row(index), self._matrix_rows)
        return self.storage[rows] if self._on_host else self.storage.at[rows]

    @property
    def dtype(self) -> np.dtype:
        """Element type."""
        return np.dtype(self.buffer.dtype)

    @property
    def _on_host(self) -> bool:
        return isinstance(self.storage, np.ndarray)

    @property
    def _numpy(self) -> Any:
        return np if self._on_host else jnp

    @property
    def _matrix_rows(self) -> int:
        return padded_bytes(self.shape, self.dtype) // LANES

    @property
    def _panels(self) -> int:
        return padded_shape(self.shape, self.dtype)[1] // LANES

    @property
    def _panel_rows(self) -> int:
        return self._matrix_rows // self._panels

    def _row(self, index: tuple[Any, ...]) -> Any:
        """First byte row of a matrix."""
        leading = self.buffer.shape[:-2]
        if len(index) != len(leading):
            raise PlanError(
                f"buffer {self.buffer.name} has {len(leading)} leading dimensions, so an index of"
                f" {len(index)} entries picks no matrix"
            )
        matrix: Any = 0
        for at, size in zip(index, leading):
            if isinstance(at, int) and not 0 <= at < size:
                raise PlanError(f"index {at} is outside 0..{size - 1} of {self.buffer.name}")
            matrix = matrix * size + at
        row = self.start + matrix * self._matrix_rows
        return row if isinstance(row, int | np.integer) else pl.multiple_of(row, TILE_BYTE_ROWS)

    def _slice(self, at: Any, rows: int) -> Any:
        return slice(at, at + rows) if self._on_host else pl.ds(at, rows)

    def _panel(self, index: tuple[Any, ...], panel: int) -> Any:
        at = self._row(index) + panel * self._panel_rows
        stored = self.storage[self._slice(at, self._panel_rows), :]
        if self._on_host:
            return panel_from_bytes(stored, self.dtype)
        if self.dtype == np.uint8:
            return stored
        return pltpu.bitcast(stored, self.dtype)

    def _bytes(self, columns: Any) -> Any:
        if self._on_host:
            return panel_to_bytes(columns)
        if self.dtype == np.uint8:
            return columns
        return pltpu.bitcast(columns, jnp.uint8)
