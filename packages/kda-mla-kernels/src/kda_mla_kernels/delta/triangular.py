"""Inverses of unit lower triangular matrices, which chunked delta rules solve with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["unit_lower_inverse"]

_EXACT = lax.Precision.HIGHEST


def unit_lower_inverse(matrix: jax.Array) -> jax.Array:
    """Inverse of unit lower triangular matrices by doubling blocks.

    From the inverses of the diagonal blocks of size n follow those of size 2n::

        [A 0]^-1   [   A^-1      0  ]
        [C B]    = [-B^-1 C A^-1 B^-1]

    Only products of exact inverses occur, so equal keys in a row, which make powers of the strictly
    lower part huge, do no harm (a Neumann product would lose everything there).

    Args:
        matrix: f32 [..., C, C], C a power of two; only the strictly lower part is read.

    Returns:
        f32 [..., C, C].
    """
    size = matrix.shape[-1]
    inverse = jnp.ones((*matrix.shape[:-2], size, 1, 1), matrix.dtype)
    block = 1
    while block < size:
        pairs = size // (2 * block)
        tiles = matrix.reshape(*matrix.shape[:-2], pairs, 2, block, pairs, 2, block)
        own = jnp.diagonal(tiles, axis1=-6, axis2=-3)  # [..., 2, block, 2, block, pairs]
        corner = jnp.moveaxis(own[..., 1, :, 0, :, :], -1, -3)
        halves = inverse.reshape(*matrix.shape[:-2], pairs, 2, block, block)
        upper, lower = halves[..., 0, :, :], halves[..., 1, :, :]
        corner = -jnp.matmul(jnp.matmul(lower, corner, precision=_EXACT), upper, precision=_EXACT)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]
