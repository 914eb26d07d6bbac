"""What routed experts keep in VMEM and SMEM while a layer lasts, and the copies that fill it.

Letters as in :mod:`~kda_mla_kernels.moe.kernel.stage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.moe.kernel.scalars import ScalarTable
from kda_mla_kernels.moe.kernel.shape import ExpertImages

__all__ = [
    "EXPERT",
    "EXPERTS",
    "HELD",
    "HELD_OF",
    "LIST_ROWS",
    "ROW",
    "SEEN",
    "SLOT",
    "SLOT_OF",
    "LayerExperts",
    "RoutedExpertsScratch",
]

EXPERT, SLOT_OF, HELD_OF, EXPERTS = range(4)
"""Rows of the list of experts: those that have routes, the slots of each (of gate and up, and of
what is held for longer), and how many they are."""
ROW, SLOT, HELD, SEEN = range(4)
"""Rows of the list of entries: an entry's row, its expert's slots, and how many experts it and the
entries before it have."""
LIST_ROWS = 8
"""Of both lists: whole sublanes."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoutedExpertsScratch:
    """What the stage keeps while a layer lasts."""

    experts: ScalarTable
    """i32 [8, N]"""
    entries: ScalarTable
    """i32 [8, N]"""
    weights: ScalarTable
    """f32 [1, N], of the entries"""
    images: ExpertImages
    """u8 [slots, ...] of gate and up, [held slots, ...] of the others"""
    lefts: Any
    """[P, tiles, fold·B, d] left operands of gate and up"""
    gate_up: Any
    """f32 [fold, places, columns]"""
    inner: Any
    """f32 [places, K' of down]"""
    sums: Any
    """f32 [P + 1, B, N'] of down; the last takes what belongs to no row"""
    slot_sems: Any
    """[loads, slots]"""


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer in HBM."""

    images: ExpertImages
    index: Any

    def load(
        self, scratch: RoutedExpertsScratch, name: str, expert: Any, slot: Any, sem: Any
    ) -> None:
        """Starts the load of one image of an expert."""
        self._copy(scratch, name, expert, slot, sem).start()

    def wait(self, scratch: RoutedExpertsScratch, names: tuple[str, ...], sem: Any) -> None:
        """Waits for images of an expert: of any, since a wait knows sizes, not places."""
        for name in names:
            self._copy(scratch, name, 0, 0, sem).wait()

    def _copy(
        self, scratch: RoutedExpertsScratch, name: str, expert: Any, slot: Any, sem: Any
    ) -> Any:
        there = getattr(self.images, name).at[self.index, expert]
        return pltpu.make_async_copy(there, getattr(scratch.images, name).at[slot], sem)
