"""Every transfer and semaphore operation of one Pallas TPU kernel, in the order of execution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Event", "Semaphore", "Trace", "TraceError", "trace_events"]


class TraceError(ValueError):
    """The order of events depends on data that nobody gave."""


class Semaphore(NamedTuple):
    """A semaphore of a kernel.

    Attributes:
        argument: number among the kernel's flattened arguments (inputs, outputs, scratch), or None
            for one that the kernel has not got as an argument, such as the barrier's.
        at: position in an array of semaphores.
    """

    argument: int | None
    at: tuple[int, ...]


class Event(NamedTuple):
    """One executed operation.

    Attributes:
        op: dma_start, dma_wait, semaphore_signal or semaphore_wait.
        source: "file.py:line".
        semaphore: what a wait waits for; of a start, what the arrival signals, on the receiving
            device.
        amount: bytes of a transfer, or what a semaphore is raised by or waited for.
        route: as in :class:`~vmem_pool.aot.Site`.
        device: of a remote operation, the other device's coordinates by mesh axis, None where they
            are not known; None for a local operation.
        sent: of a remote start, the semaphore on the sending device.
        ends: of a transfer, numbers of the arguments that it reads and writes.
    """

    op: str
    source: str
    semaphore: Semaphore
    amount: int
    route: str
    device: tuple[tuple[str, int | None], ...] | None = None
    sent: Semaphore | None = None
    ends: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class Trace:
    """One kernel on one device.

    Attributes:
        kernel: its name.
        arguments: how many it has, inputs, outputs and scratch.
        events: in order.
        copied_in, copied_out: bytes of the operands in VMEM, which are moved before and after.
        trips: mean length of loops, by source, of which the compiler may not know some.
    """

    kernel: str
    arguments: int
    events: tuple[Event, ...]
    copied_in: int
    copied_out: int
    trips: Mapping[str, float]


def trace_events(
    function: Callable[..., Any],
    *arguments: Any,
    kernel: str,
    axis_index: Mapping[str, int] | None = None,
    contents: Mapping[int, Any] | None = None,
) -> Trace:
    """Traces ``function`` and follows one of its kernels with its scalars evaluated.

    Args:
        function: whatever ``jax.make_jaxpr`` takes.
        arguments: arrays or ``ShapeDtypeStruct``.
        kernel: name of a kernel, or how it begins.
        axis_index: coordinates of the device by mesh axis.
        contents: arrays in the kernel's flattened inputs, by number, as far as the order of events
            depends on them: row numbers, positions, lengths.

    Raises:
        TraceError: no such kernel, a grid, or a condition or loop around events that depends on
            something which is not in ``contents``.
    """
    from vmem_pool.aot.follow import Follower
    from vmem_pool.aot.walker import jaxpr_of

    return Follower(kernel, axis_index or {}, contents or {}).trace(jaxpr_of(function, *arguments))
