"""Numerics policies: which dtype activations have and how exact a product is.

Rounding points go through :meth:`Numerics.round` and products of activations through
:meth:`Numerics.dot` and :meth:`Numerics.einsum`, so a whole model (or kernel) changes policy by one
argument. ``BF16`` is what a TPU runs. ``F32`` exists for proof: compared at float32 tolerances, a
wrong structure cannot pass for rounding. Recurrent states are f32 with exact products under both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["BF16", "F32", "Numerics", "numerics_of"]


@dataclass(frozen=True)
class Numerics:
    """A policy. Instances are hashable, so they can be static arguments."""

    name: Literal["f32", "bf16"]
    activation: jnp.dtype
    precision: lax.Precision

    def round(self, x: jax.Array) -> jax.Array:
        """Rounds to the activation dtype."""
        return x.astype(self.activation)

    def dot(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """``x [..., K] · weights [K, N] -> f32 [..., N]``: rounded inputs, f32 accumulation.

        Weights may be held wider than they are exact (bf16 values in f32, where a processor has
        no fast bf16 product): products of rounded values are exact in f32, so nothing changes.
        """
        return self._contract(x, weights, 0)

    def dot_rows(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """``x [..., K] · table [N, K]ᵀ -> f32 [..., N]``, for embedding-shaped heads."""
        return self._contract(x, table, 1)

    def dot_each(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """``x [B, M, K] · weights [B, K, N] -> f32 [B, M, N]``, as :meth:`dot` for each of B."""
        return self._contract(x, weights, 1, batch=True)

    def dot_rows_each(self, x: jax.Array, tables: jax.Array) -> jax.Array:
        """``x [B, M, K] · tables [B, N, K]ᵀ -> f32 [B, M, N]``, likewise for :meth:`dot_rows`."""
        return self._contract(x, tables, 2, batch=True)

    def einsum(self, formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """A product of two rounded activations, f32.

        The operands are widened first: a matrix unit at default precision takes the same bf16
        values back out of them, and a processor without a fast bf16 product runs its f32 one.
        """
        wide = (self.round(a).astype(jnp.float32), self.round(b).astype(jnp.float32))
        return jnp.einsum(formula, *wide, precision=self.precision)

    def _contract(
        self, x: jax.Array, weights: jax.Array, axis: int, batch: bool = False
    ) -> jax.Array:
        wide = weights.dtype == jnp.float32
        batched = ((0,), (0,)) if batch else ((), ())
        return lax.dot_general(
            self.round(x).astype(weights.dtype),
            weights,
            (((x.ndim - 1,), (axis,)), batched),
            precision=lax.Precision.HIGHEST if wide else self.precision,
            preferred_element_type=jnp.float32,
        )


BF16 = Numerics("bf16", jnp.dtype(jnp.bfloat16), lax.Precision.DEFAULT)
F32 = Numerics("f32", jnp.dtype(jnp.float32), lax.Precision.HIGHEST)


def numerics_of(name: str) -> Numerics:
    """The policy called ``bf16`` or ``f32``.

    Raises:
        ValueError: any other name.
    """
    policies = {policy.name: policy for policy in (BF16, F32)}
    if name not in policies:
        raise ValueError(f"unknown numerics policy {name!r}; it must be one of {sorted(policies)}")
    return policies[name]
