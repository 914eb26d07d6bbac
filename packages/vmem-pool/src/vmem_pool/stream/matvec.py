"""A product with a streamed matrix: the shortest use of a stream, and the base of most stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from vmem_pool.errors import StreamError
from vmem_pool.stream.ring import SegmentReader, TakenTile
from vmem_pool.stream.tiles import Cut, Matrix, Span

__all__ = ["matvec"]


def matvec(
    reader: SegmentReader,
    name: str,
    x: Any,
    out: Any,
    *,
    group: int = 2,
    precision: jax.lax.Precision | None = None,
) -> None:
    """Writes ``out = x @ W`` for the matrix W that is next in the segment.

    Args:
        reader: of the segment.
        name: of a matrix [K, N].
        x: reference [R, K] in VMEM, bf16 or f32.
        out: reference [R, N] in VMEM; its dtype is what the sums are rounded to.
        group: slots that are waited for together.
        precision: of each dot, e.g. ``HIGHEST`` for f32 activations.

    Numerics:
        Products are summed in f32. A matrix cut by columns has one dot per output; one cut by rows
        adds the dots of its tiles in f32, first rows first.

    Raises:
        StreamError: the matrix is not next in the plan, x or out has another shape, or they are
            the same.
    """
    first = reader.plan.of(name)[0]
    _check(first.matrix, x, out)

    def dot(tile: TakenTile) -> jax.Array:
        left, right = x[:, _at(tile.rows)], tile.load()
        if left.dtype == jnp.float32:
            right = right.astype(jnp.float32)
        return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)

    def write(carry: None, tiles: tuple[TakenTile, ...]) -> None:
        products = [dot(tile) for tile in tiles]
        for tile, product in zip(tiles, products):
            out[:, _at(tile.columns)] = product.astype(out.dtype)

    def add(total: jax.Array, tiles: tuple[TakenTile, ...]) -> jax.Array:
        for product in [dot(tile) for tile in tiles]:
            total = total + product
        return total

    if first.cut is Cut.COLUMNS:
        reader.each(name, write, None, group)
    else:
        zero = jnp.zeros(out.shape, jnp.float32)
        out[...] = reader.each(name, add, zero, group).astype(out.dtype)


def _check(matrix: Matrix, x: Any, out: Any) -> None:
    rows, (contracted, columns) = x.shape[0], matrix.shape
    if x.shape != (rows, contracted) or out.shape != (rows, columns):
        raise StreamError(
            f"matrix {matrix.name} {matrix.shape} takes x [R, {contracted}] to out [R, {columns}],"
            f" not {x.shape} to {out.shape}"
        )
    if x is out:
        raise StreamError(f"x of {matrix.name} is still read while out is written; use two buffers")


def _at(span: Span) -> Any:
    return pl.ds(span.start, span.size)
