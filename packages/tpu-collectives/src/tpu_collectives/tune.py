"""Times schedules of the all-reduce on the devices at hand and writes down which is fastest."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

from tpu_collectives import _compat
from tpu_collectives.all_reduce import AllReduce
from tpu_collectives.barrier import Barrier
from tpu_collectives.errors import TuningError
from tpu_collectives.levels import Tree, default_tree, tree_levels
from tpu_collectives.program import RankProgram
from tpu_collectives.table import ScheduleTable, TableEntry, shape_of
from tpu_collectives.topology import Topology

__all__ = ["Timing", "tune"]


@dataclass(frozen=True)
class Timing:
    """How a schedule is timed.

    Args:
        uses: all-reduces in one call, one after another, so that the cost of a call is spread.
        calls: timed calls after one that warms up; the fastest counts.
        interpret: time the interpreter on CPU devices. This exercises the procedure and says
            nothing about a TPU: the entries are labelled ``interpreted`` and never looked up.
    """

    uses: int = 1000
    calls: int = 5
    interpret: bool = False


def tune(
    topology: Topology,
    sizes: Iterable[tuple[int, int]],
    wire_dtype: Any = jnp.bfloat16,
    tree: Tree | None = None,
    table: ScheduleTable | None = None,
    timing: Timing | None = None,
) -> ScheduleTable:
    """Time every schedule of the tree for every (rows, width) and note the fastest.

    With several processes, all call this with the same arguments; the times of process 0 decide,
    so that all ranks agree on every choice.

    Args:
        topology: the ranks, from real devices.
        sizes: rows and widths.
        wire_dtype: bfloat16 or float32.
        tree: as for :class:`AllReduce`.
        table: entries to keep; those of the same size are replaced.
        timing: how to time.

    Returns:
        A table for ``AllReduce(..., schedule=table)``.

    Raises:
        TuningError: the devices are not TPUs that this process can use, and ``timing`` does not
            ask for the interpreter; or it does, and they are no CPU devices.
        CollectiveError: as for :class:`AllReduce`.
    """
    timing = Timing() if timing is None else timing
    tree = default_tree(topology) if tree is None else tree
    device = _timed_device(topology, timing)
    schedules = range(len(tree_levels(topology, tree)) + 1)
    entries = []
    for rows, width in sizes:
        candidates = [AllReduce(topology, rows, width, wire_dtype, tree, s) for s in schedules]
        times = _agreed([_use_us(candidate, timing) for candidate in candidates])
        best = int(np.argmin(times))
        entries.append(
            TableEntry(
                topology=shape_of(topology),
                tree=tuple(tree),
                rows=rows,
                width=width,
                wire_dtype=jnp.dtype(wire_dtype).name,
                scatter=best,
                us=round(float(times[best]), 3),
                origin="interpreted" if timing.interpret else "measured",
                device=device,
            )
        )
    return (table or ScheduleTable()).updated(entries)


def _timed_device(topology: Topology, timing: Timing) -> str:
    """The device kind, if it can be timed as asked."""
    devices = topology.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    if timing.interpret:
        if platform != "cpu":
            raise TuningError(f"the interpreter runs on CPU devices, not on {kind}")
        return "interpreter on cpu"
    if platform != "tpu":
        raise TuningError(
            f"schedules are timed on TPUs, and {topology.name} has {platform} devices; to try the"
            " procedure without a TPU, pass Timing(uses=2, calls=1, interpret=True)"
        )
    if not set(devices) <= set(jax.devices()):
        raise TuningError(
            f"{topology.name} is compile-only; use Topology.from_devices(jax.devices()) on a slice"
        )
    return kind


def _use_us(comm: AllReduce, timing: Timing) -> float:
    """Microseconds of one all-reduce in a loop of many."""
    program = looped(comm, timing.uses)
    interpreter = _compat.interpret_params(detect_races=False, dma="on_wait")
    function = program.function(interpreter if timing.interpret else False)
    sharding = NamedSharding(comm.topology.mesh(), PartitionSpec("ranks"))
    shape = (comm.topology.ranks, comm.rows, comm.width)
    ones = jax.make_array_from_callback(
        shape, sharding, lambda part: np.ones(shape, np.float32)[part]
    )
    jax.block_until_ready(function(ones))
    fastest = float("inf")
    for _ in range(timing.calls):
        begun = time.perf_counter()
        jax.block_until_ready(function(ones))
        fastest = min(fastest, time.perf_counter() - begun)
    return fastest / timing.uses * 1e6


def looped(comm: AllReduce, uses: int) -> RankProgram:
    """A program that sums the same partials again and again."""
    barrier = Barrier(comm.topology)

    def kernel(x_ref: Any, out_ref: Any, refs: Any) -> None:
        barrier.signal()
        barrier.wait()

        @pl.loop(0, uses)
        def _(use: jax.Array) -> None:
            out_ref[...] = comm(refs, x_ref[...], use)

    options = {"compiler_params": barrier.compiler_params(0, checks=False)}
    return RankProgram(kernel, comm.topology, (comm.output,), (comm.scratch(),), options)


def _agreed(times: list[float]) -> np.ndarray:
    """The times of process 0, in every process."""
    if jax.process_count() == 1:
        return np.array(times)
    return np.asarray(multihost_utils.broadcast_one_to_all(np.array(times)))
