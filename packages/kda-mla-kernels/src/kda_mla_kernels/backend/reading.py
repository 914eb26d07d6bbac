"""Reading a rank's share of a checkpoint's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kda_mla_kernels.backend.share import Share
from kda_mla_kernels.checkpoint import Checkpoint

__all__ = ["ShareReader"]


@dataclass(frozen=True)
class ShareReader:
    """Reads parts of tensors as numpy arrays, with zeros for what a rank pads.

    A share counts along each axis of the stored tensor; None takes all of it.
    """

    checkpoint: Checkpoint
    dtype: np.dtype
    """of matrices and tables"""

    def read(self, name: str, *shares: Share | None) -> np.ndarray:
        """The shares along the leading axes, in the stored type."""
        parts = tuple(slice(None) if share is None else share.slice for share in shares)
        found = self.checkpoint.read(name, parts)
        padding = [(0, 0 if share is None else share.padding) for share in shares]
        return np.pad(found, padding + [(0, 0)] * (found.ndim - len(shares)))

    def matrix(self, name: str, *shares: Share | None) -> np.ndarray:
        """Part of a stored [out, in] matrix as [in, out]."""
        return self.read(name, *shares).astype(self.dtype).T

    def vector(self, name: str, part: Share | None = None) -> np.ndarray:
        """In f32."""
        return self.read(name, part).astype(np.float32)

    def table(self, name: str, rows: Share) -> np.ndarray:
        """Rows of an embedding-shaped table."""
        return self.read(name, rows).astype(self.dtype)
