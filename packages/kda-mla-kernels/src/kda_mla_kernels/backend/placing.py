"""Putting what is read from a checkpoint onto the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kda_mla_kernels.numerics import Numerics

__all__ = ["Track", "held_dtype", "place", "progress_bar", "untracked"]

Track: TypeAlias = Callable[[Sequence[int], str], Iterator[int]]
"""Wraps a loop, to show progress: ``(items, what)``."""


def untracked(items: Sequence[int], what: str) -> Iterator[int]:
    """Shows nothing."""
    return iter(items)


def progress_bar(shown: bool) -> Track:
    """A bar on standard error, if it is to be shown."""
    if not shown:
        return untracked

    def track(items: Sequence[int], what: str) -> Iterator[int]:
        from rich.console import Console
        from rich.progress import track as bar

        yield from bar(items, description=f"loading {what}", console=Console(stderr=True))

    return track


def place(mesh: Mesh, read: Callable[[int], Any]) -> Any:
    """Reads a pytree for each rank of this process and joins them along a new rank axis."""
    (axis,) = mesh.axis_names
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    parts = []
    for rank, device in enumerate(mesh.devices.flat):
        if device.process_index == jax.process_index():
            parts.append(jax.tree.map(lambda x, d=device: jax.device_put(x[None], d), read(rank)))

    def join(*shards: jax.Array) -> jax.Array:
        shape = (mesh.size, *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

    return jax.tree.map(join, *parts)


def held_dtype(numerics: Numerics, platform: str) -> np.dtype:
    """The dtype that matrices and caches are held in: the activations', but f32 on a CPU.

    There bf16 products are several times slower than f32 ones and no more exact, and XLA converts
    a whole bf16 cache to f32 and back in order to write one token.
    """
    return np.dtype(np.float32) if platform == "cpu" else numerics.activation
