"""Reading once what all ranks cut their columns out of."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.checkpoint.reading import Index

__all__ = ["SharedReads"]

KEPT = 2
"""Tensors that are kept: codes and scales of one expert's matrix."""
KEPT_BYTES = 32 << 20
"""Larger tensors are cut from the file, since no expert's are."""


class SharedReads(Checkpoint):
    """A checkpoint that keeps the last tensors of which columns were asked for.

    Columns lie in nearly all pages of a file, so that each rank's would cost as much as all of
    them. Not for threads.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.__dict__.update(vars(checkpoint))
        self._read = checkpoint.read
        self._whole = lru_cache(KEPT)(checkpoint.read)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """See the base class; may be a view of what is kept."""
        if isinstance(index, tuple) and self._cuts_columns(index, name):
            return self._whole(name)[index]
        return self._read(name, index)

    def _cuts_columns(self, index: tuple[slice, ...], name: str) -> bool:
        info = self.info(name)
        cut = (part.indices(size)[:2] != (0, size) for part, size in zip(index, info.shape))
        return info.bytes <= KEPT_BYTES and any(list(cut)[1:])
