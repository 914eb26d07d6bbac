"""The short convolution of a block's rows, where the rows of all sequences stand in one matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.block import Block
from kda_mla_kernels.numerics import Numerics

__all__ = ["convolve_rows"]


def _seen(block: Block, tails: list[jax.Array], inputs: jax.Array, tap: int) -> jax.Array:
    """What tap ``tap`` of each row multiplies: [P, C], padding rows as they are."""
    before = tails[0].shape[0]
    pieces = []
    for s, tail in enumerate(tails):
        first = s * block.tokens
        old = max(0, min(before - tap, block.tokens))
        if old:
            pieces.append(tail[tap : tap + old])
        if old < block.tokens:
            new = first + old + tap - before
            pieces.append(inputs[new : first + block.tokens + tap - before])
    pieces.append(inputs[block.rows :])
    return jnp.concatenate([piece for piece in pieces if piece.shape[0]], axis=0)


def convolve_rows(
    block: Block, tails: list[jax.Array], inputs: jax.Array, taps: jax.Array, numerics: Numerics
) -> jax.Array:
    """Each token's window of W inputs, weighed and summed, then SiLU; one rounding at the end.

    ``y = silu(Σ_j taps[j] · window[j])``, oldest first, as ``gdn.convolve``.

    Args:
        tails: f32 [W-1, C] per sequence, the inputs before its first token, oldest first.
        inputs: f32 [P, C]. taps: f32 [W, C].

    Returns:
        [P, C] in the activation dtype; zero for padding rows of zeros.
    """
    last = taps.shape[0] - 1
    seen = [_seen(block, tails, inputs, tap) for tap in range(last)] + [inputs]
    total = taps[:1] * seen[0]
    for tap in range(1, last + 1):
        total += taps[tap : tap + 1] * seen[tap]
    return numerics.round(jax.nn.silu(total))
