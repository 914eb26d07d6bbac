"""Ways of the core through a schedule, from one event to those that can come next.

From a bundle the core goes on to the next one, along branches and through loops without waits. A
way ends at the first wait that it cannot pass. Of several to one bundle the longest counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from vmem_pool.aot.loops import Loop
from vmem_pool.aot.machine import BRANCH_DELAY
from vmem_pool.aot.marks import Mark

__all__ = ["Reach", "Segment", "Way", "Ways"]


@dataclass(frozen=True)
class Segment:
    """What the core does between two events.

    Attributes:
        cycles: on the longest way, waits excluded.
        sources: these cycles by the source file of the bundles.
    """

    cycles: int
    sources: Mapping[str, int]

    def __add__(self, other: Segment) -> Segment:
        return Segment(self.cycles + other.cycles, Counter(self.sources) + Counter(other.sources))


@dataclass(frozen=True)
class Reach:
    """Longest ways from a bundle: cycles to each bundle, and the bundle before it."""

    start: int
    cycles: dict[int, int]
    before: dict[int, int]


class Way(NamedTuple):
    """To a mark, with the loop that begins another turn on it, if one does."""

    there: int
    segment: Segment
    repeated: Loop | None


@dataclass(frozen=True)
class Ways:
    """All ways through one schedule.

    Attributes:
        marks: events in the order of the text.
        forward: see :class:`~vmem_pool.aot.loops.Branches`.
        root: the kernel as a loop of one trip.
        files: the source file of each bundle, "" where unknown.
    """

    marks: tuple[Mark, ...]
    forward: Mapping[int, tuple[int, bool]]
    root: Loop
    files: tuple[str, ...]

    def to(self, here: int, op: str, source: str) -> Sequence[Way]:
        """The ways to all marks of a kind that can follow one; -1 is the entry.

        ``source`` is as in :meth:`Mark.fits`.
        """
        key = here, op, source
        if key not in self._known_ways:
            self._known_ways[key] = list(self._find(here, op, source))
        return self._known_ways[key]

    def _find(self, here: int, op: str, source: str) -> Iterable[Way]:
        wanted = [n for n, mark in enumerate(self.marks) if mark.fits(op, source)]
        reach, start = self.reach(here), self.position(here)
        for there in wanted:
            at = self.marks[there].at
            if self._hidden(here, there):
                continue
            if at == start and there > here >= 0:
                yield Way(there, Segment(0, {}), None)
            elif at in reach.cycles and (at > start or here < 0):
                yield Way(there, self.segment(reach, at), None)
        if here >= 0 and not self._stuck(here):
            for loop in self.around(start):
                if loop.end + 1 in reach.cycles:
                    yield from self._around_again(loop, self.segment(reach, loop.end + 1), wanted)

    def _around_again(self, loop: Loop, first: Segment, wanted: Iterable[int]) -> Iterable[Way]:
        """Ways through the rest of a turn of a loop, which is ``first``, into the next turn."""
        again = self._reach_from(loop.start)
        for there in wanted:
            at = self.marks[there].at
            if loop.start <= at <= loop.end and at in again.cycles and not self._hidden(-1, there):
                yield Way(there, first + self.segment(again, at), loop)

    def _hidden(self, here: int, there: int) -> bool:
        """Another event of the same bundle must come before."""
        at = self.marks[there].at
        first = here + 1 if here >= 0 and self.marks[here].at == at and there > here else 0
        return any(mark.at == at and mark.must_run for mark in self.marks[first:there])

    def _stuck(self, here: int) -> bool:
        """Another event of the same bundle must come after."""
        at = self.marks[here].at
        return any(mark.at == at and mark.must_run for mark in self.marks[here + 1 :])

    def reach(self, here: int) -> Reach:
        if here not in self._known_reaches:
            if here >= 0 and self._stuck(here):
                self._known_reaches[here] = Reach(self.position(here), {}, {})
            else:
                self._known_reaches[here] = self._reach_from(self.position(here), here >= 0)
        return self._known_reaches[here]

    def _reach_from(self, start: int, passed: bool = False) -> Reach:
        """The longest ways forwards from a bundle, up to events that must run.

        ``passed``: events in the first bundle have run.
        """
        reach = Reach(start, {start: 0}, {})
        for at in range(start, self.root.end + 1):
            if at not in reach.cycles:
                continue
            if at in self._blocking and not (passed and at == start):
                continue
            for cost, to in self._steps(at, start):
                if reach.cycles[at] + cost > reach.cycles.get(to, -1):
                    reach.cycles[to] = reach.cycles[at] + cost
                    reach.before[to] = at
        return reach

    def _steps(self, at: int, start: int) -> list[tuple[int, int]]:
        ways = []
        child = self.quiet.get(at)
        if child and at != start:
            trips = 1 if child.trips is None else child.trips
            ways.append((trips * child.cycles[1], child.end + 1))
        target, falls_through = self.forward.get(at, (at, True))
        if falls_through:
            ways.append((1, at + 1))
        if target > at:
            ways.append((1 + BRANCH_DELAY, target))
        return ways

    def segment(self, reach: Reach, end: int) -> Segment:
        """The longest way to a bundle within reach."""
        files: Counter[str] = Counter()
        at = end
        while at != reach.start:
            before = reach.before[at]
            files[self.files[before]] += reach.cycles[at] - reach.cycles[before]
            at = before
        return Segment(reach.cycles[end], files)

    def around(self, bundle: int) -> tuple[Loop, ...]:
        """Loops around a bundle, outermost first, without the kernel itself."""
        if bundle not in self._known_around:
            self._known_around[bundle] = tuple(
                loop for loop in self.root.walk()[1:] if loop.start <= bundle <= loop.end
            )
        return self._known_around[bundle]

    def position(self, mark: int) -> int:
        return self.marks[mark].at if mark >= 0 else 0

    @cached_property
    def _blocking(self) -> frozenset[int]:
        """Bundles with a wait of the program, which cannot be passed."""
        return frozenset(mark.at for mark in self.marks if mark.must_run)

    @cached_property
    def quiet(self) -> Mapping[int, Loop]:
        """Loops that can turn without an event, by first bundle.

        The compiler may put what follows a loop into its last turn.
        """
        return {
            loop.start: loop
            for loop in self.root.walk()[1:]
            if not any(loop.start <= at <= loop.end for at in self._blocking)
        }

    @cached_property
    def _known_ways(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def _known_reaches(self) -> dict[int, Reach]:
        return {}

    @cached_property
    def _known_around(self) -> dict[int, tuple[Loop, ...]]:
        return {}
