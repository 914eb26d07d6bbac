"""Packs a checkpoint into what the decode kernel reads, one rank in host memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh
from kda_mla_kernels.backend import Track, place, untracked
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.moe.kernel import ExpertShape

from megakernel_kimi.checkpoint import check_tensors
from megakernel_kimi.kernel.source import RankRows, join_rows, row_shapes
from megakernel_kimi.kernel.weights import KernelWeights
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.loading import RankReader

__all__ = ["load_kernel_weights"]


def load_kernel_weights(
    checkpoint: Checkpoint,
    layout: KimiLayout,
    shape: ExpertShape,
    mesh: Mesh,
    dtype: np.dtype[Any],
    track: Track = untracked,
) -> KernelWeights:
    """Checks every tensor of the model, then reads and packs it, rank by rank.

    Args and errors as for :func:`~megakernel_kimi.loading.load_weights`; ``track`` counts slots of
    the stream, experts and layers of all ranks.

    Args:
        shape: form and widths of routed experts.
    """
    check_tensors(checkpoint, layout.config)
    rows = sum(planned.shape[0] for planned in row_shapes(layout, shape, dtype).values())
    done = iter(track(range(layout.ranks * rows), "weights"))

    def read(rank: int) -> KernelWeights:
        source = RankRows(RankReader(checkpoint, dtype, layout, rank), shape)
        found = {name: _filled(source, name, done) for name in source.shapes}
        return join_rows(layout, shape, found)

    loaded = place(mesh, read)
    next(done, None)
    return loaded


def _filled(source: RankRows, name: str, done: Iterator[int]) -> np.ndarray:
    planned = source.shapes[name]
    whole, at = np.empty(planned.shape, planned.dtype), 0
    for rows in source.rows(name):
        whole[at : at + len(rows)] = rows
        at += len(rows)
        for _ in rows:
            next(done, None)
    assert at == len(whole), f"{name} has {at} rows instead of {len(whole)}"
    return whole
