"""What to compile: a function that builds a jitted function and its abstract arguments."""

from __future__ import annotations

import importlib
import inspect
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Target", "load", "spell", "topology_of"]

Target: TypeAlias = str | Callable[..., Any]
"""``build(topology) -> (jitted function, arguments)``, or "FILE.py:build", or "module:build"."""


def spell(target: Target) -> str:
    """A target as text that another process can load.

    Raises:
        ValueError: a function that is not at the top of a file.
    """
    if isinstance(target, str):
        if ":" not in target:
            raise ValueError(f"target {target!r} names no function; write FILE.py:build")
        return target
    name = target.__qualname__
    if not name.isidentifier():
        raise ValueError(f"target {name} is not at the top of its file, so nobody else can load it")
    return f"{inspect.getsourcefile(target)}:{name}"


def load(target: str, topology: str) -> tuple[Any, tuple[Any, ...]]:
    """Imports a target and calls it with the topology's description."""
    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).resolve().parent))
        build = runpy.run_path(where)[name]
    else:
        build = getattr(importlib.import_module(where), name)
    return build(topology_of(topology))


def topology_of(name: str) -> Any:
    """The description of a compile-only topology such as "tpu7x:2x2x1"."""
    from jax.experimental import topologies

    chips = math.prod(map(int, name.rpartition(":")[2].split("x")))
    # A single chip is smaller than the default host, and jax 0.10 wants to be told.
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if chips == 1 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds)
