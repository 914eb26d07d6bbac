"""What a step costs by the kind of its sublayers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, groupby

from vmem_pool.aot import Event
from vmem_pool.stream import StreamPlan

from benchmarks.accounting.phases import exchanges_of
from benchmarks.accounting.program import Step, Sublayer
from benchmarks.accounting.simulation import Simulated

__all__ = ["Part", "SublayerNames", "parts_of"]


class SublayerNames:
    """Follows a kernel's events from one segment of its stream to the next.

    Args:
        plan: the stream.
        boundary: as in ``Family``.
        first: kind of what comes before the first segment.
    """

    def __init__(self, plan: StreamPlan, boundary: str, first: str) -> None:
        self.now = Sublayer(0, first)
        self._boundary, self._order, self._taken = boundary, plan.order, 0
        sizes = [plan.segments[name].num_slots for name in plan.order]
        self._starts = frozenset(accumulate(sizes[:-1], initial=0))

    def follow(self, event: Event, kind: str, name: str) -> None:
        """Notes an event on the semaphore of that name."""
        if event.op != "dma_wait":
            return
        begins = bool(self._boundary) and self._boundary in name
        if not self._boundary and kind == "weights":
            begins = self._taken in self._starts
            self._taken += 1
        if begins:
            number = self.now.number
            self.now = Sublayer(number + 1, self._order[number])


@dataclass(frozen=True)
class Part:
    """All sublayers of a kind.

    Attributes:
        count: of them.
        cycles: of the core, waits excluded.
        phases: off-chip exchanges that they wait for.
        us: simulated.
    """

    count: int
    cycles: int
    phases: int
    us: float

    def __add__(self, other: Part) -> Part:
        return Part(*(a + b for a, b in zip(astuple(self), astuple(other))))


def parts_of(run: Simulated) -> dict[str, Part]:
    """The parts of a simulated kernel, by the kind of their sublayers."""
    found: dict[str, Part] = {}
    began, timed = run.began, zip(run.program.steps, run.ended)
    for sublayer, members in groupby(timed, key=lambda member: member[0].sublayer):
        steps, ends = zip(*members)
        cycles = sum(step.cycles for step in steps)
        part = Part(1, cycles, _phases(steps, run.program.sibling), ends[-1] - began)
        kind = sublayer.kind
        found[kind] = found[kind] + part if kind in found else part
        began = ends[-1]
    return found


def _phases(steps: Sequence[Step], sibling: object) -> int:
    events = [step.event for step in steps if step.event is not None]
    return sum(not exchange.sibling for exchange in exchanges_of(events, sibling))
