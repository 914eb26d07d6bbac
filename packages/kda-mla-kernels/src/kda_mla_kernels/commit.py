"""A kernel that applies records to a state in place, and exchanges nothing with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import Where

__all__ = ["Accepted", "check_arrays", "commit_in_place"]

Memory = TypeVar("Memory")


class Accepted(NamedTuple):
    """What a commit applies: arrays outside a kernel, references inside."""

    where: Where
    counts: Any
    """i32 [S], tokens of each sequence"""
    records: Any


def commit_in_place(
    name: str,
    body: Callable[[Any, Any, Any, Where, Any], None],
    scratch: Any,
    memory: Memory,
    accepted: Accepted,
    **options: Any,
) -> Memory:
    """Runs ``body(scratch, memory, records, where, counts)`` on the memory where it stands.

    Args:
        name: of the kernel.
        scratch: an entry of ``scratch_shapes``.
        memory: arrays in HBM; donate them, and they are changed in place.
        options: further arguments of ``pallas_call``.

    Returns:
        the memory after the accepted tokens.
    """

    def kernel(told: Accepted, _: Any, *moved_and_scratch: Any) -> None:
        # The parts of a tuple of results arrive one by one.
        *moved, buffers = moved_and_scratch
        state = tuple(moved) if isinstance(memory, tuple) else moved[0]
        body(buffers, state, told.records, told.where, told.counts)

    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.HBM)
    specs, told = (jax.tree.map(lambda _: hbm, tree) for tree in (memory, accepted.records))
    first = len(jax.tree.leaves(accepted))
    return pl.pallas_call(
        kernel,
        name=name,
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), memory),
        in_specs=[Accepted(Where(smem, smem), smem, told), specs],
        out_specs=specs,
        scratch_shapes=[scratch],
        input_output_aliases={first + part: part for part in range(len(jax.tree.leaves(memory)))},
        **options,
    )(accepted, memory)


def check_arrays(expected: Mapping[str, tuple[jax.Array, tuple[int, ...], Any]]) -> None:
    """Compares arrays with the shape and dtype that each must have, by name.

    Raises:
        ValueError: the first that differs.
    """
    for name, (array, size, dtype) in expected.items():
        if array.shape != size or array.dtype != dtype:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}, but must be {dtype}{list(size)}"
            )
