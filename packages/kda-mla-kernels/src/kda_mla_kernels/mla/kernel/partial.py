"""What a rank found in its share of the positions, as one array that can be sent.

A row is the weighted sum of latents, then 128 lanes: the largest score in the first half, the sum
of weights in the second. The rule that joins shares is that of ``mla.merge``.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.attention.softmax import UNSEEN, Running
from kda_mla_kernels.mla.merge import NOTHING_SEEN, Partial
from kda_mla_kernels.numerics import Numerics

__all__ = ["PARTIAL_LANES", "merge_packed", "pack", "unpack"]

PARTIAL_LANES = 128
"""Lanes behind the latent."""
_HALF = PARTIAL_LANES // 2


def pack(running: Running) -> jax.Array:
    """f32 [N, C + 128]; of a query that has seen nothing, sums are 0."""
    seen = running.top > UNSEEN
    top = jnp.where(seen, running.top, NOTHING_SEEN)
    total = jnp.where(seen, running.total, 0.0)
    lane = lax.broadcasted_iota(jnp.int32, (top.shape[0], PARTIAL_LANES), 1)
    latent = jnp.where(seen, running.out, 0.0)
    return jnp.concatenate([latent, jnp.where(lane < _HALF, top, total)], axis=-1)


def unpack(packed: jax.Array) -> Partial:
    """The parts of f32 [..., C + 128], for programs outside a kernel."""
    width = packed.shape[-1] - PARTIAL_LANES
    return Partial(packed[..., width], packed[..., width + _HALF], packed[..., :width])


def merge_packed(parts: Sequence[jax.Array], numerics: Numerics) -> jax.Array:
    """Joins shares into mixed latents, inside a kernel or outside.

    Ranks that take the same parts in the same order get the same bits.

    Args:
        parts: f32 [..., C + 128] of every rank, in rank order.

    Returns:
        [..., C] in the activation dtype; rows of no token are zero.
    """
    width = parts[0].shape[-1] - PARTIAL_LANES
    tops = [part[..., width : width + 1] for part in parts]
    top = tops[0]
    for other in tops[1:]:
        top = jnp.maximum(top, other)
    total = latent = jnp.float32(0.0)
    for part, own in zip(parts, tops):
        weight = jnp.exp(own - top)
        total = total + weight * part[..., width + _HALF : width + _HALF + 1]
        latent = latent + weight * part[..., :width]
    return numerics.round(latent / jnp.where(total == 0.0, 1.0, total))
