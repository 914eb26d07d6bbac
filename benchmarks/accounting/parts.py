"""What a step costs by the kind of its sublayers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, groupby

from vmem_pool.aot import Event
from vmem_pool.stream import StreamPlan

from benchmarks.accounting.phases import Exchanges
from benchmarks.accounting.program import Step, Sublayer
from benchmarks.accounting.simulation import Simulated

__all__ = ["Part", "SublayerNames", "parts_of"]


class SublayerNames:
    """Follows a kernel's events from the first slot of one segment to that of the next.

    Args:
        plan: the stream.
        first: kind of what comes before the first segment.
    """

    def __init__(self, plan: StreamPlan, first: str) -> None:
        self.now = Sublayer(0, first)
        self._order, self._taken = plan.order, 0
        sizes = [plan.segments[name].num_slots for name in plan.order]
        self._starts = frozenset(accumulate(sizes[:-1], initial=0))

    def follow(self, event: Event, kind: str) -> None:
        """Notes an event and what it moves."""
        if event.op != "dma_wait" or kind != "weights":
            return
        if self._taken in self._starts:
            number = self.now.number
            self.now = Sublayer(number + 1, self._order[number])
        self._taken += 1


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
    """The parts of a simulated kernel, by the kind of their sublayers.

    A sublayer lasts from its first product to that of the next, so that its sum over ranks and the
    norm behind it belong to it.
    """
    found: dict[str, Part] = {}
    exchanges, began = Exchanges(run.program.sibling), run.began
    timed = zip(run.program.steps, run.ended)
    for sublayer, members in groupby(timed, key=lambda member: member[0].sublayer):
        steps, ends = zip(*members)
        cycles = sum(step.cycles for step in steps)
        part = Part(1, cycles, _phases(exchanges, steps), ends[-1] - began)
        kind = sublayer.kind
        found[kind] = found[kind] + part if kind in found else part
        began = ends[-1]
    return found


def _phases(exchanges: Exchanges, steps: Sequence[Step]) -> int:
    """Off-chip exchanges that end in these steps; they may have begun before."""
    before = len(exchanges.done)
    for event in (step.event for step in steps if step.event is not None):
        if event.op.endswith("wait"):
            exchanges.wait(event, 0.0)
        elif event.device is not None:
            exchanges.start(event, 0.0)
    return sum(not exchange.sibling for exchange, _ in exchanges.done[before:])
