"""A compiled schedule as a machine that runs through known events: cycles from one to the next.

The waits and starts of transfers stand in the schedule at their bundles. Between two events that
follow one another in the program, the core runs from bundle to bundle along branches and through
loops without events; the longest such way is what the schedule says the core needs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from vmem_pool.aot.events import Event
from vmem_pool.aot.kernels import Dumps, find_dumps, split_bundles
from vmem_pool.aot.loops import Branches, Loop, count_cycles, loop_tree, source_of
from vmem_pool.aot.machine import BRANCH_DELAY

__all__ = ["Mark", "Schedule", "ScheduleError", "Segment", "read_schedule"]

EVENTS = re.compile(
    r"(?:\{ |;;  )(?:%\w+ = )?"
    r"(?P<op>dma\.done\.wait|dma\.(?!done)\w+|vwait\.\w+|vsync\w+\.remote)(?P<rest>[^;]*)"
)
REORDERED = 64
"""Bundles by which the compiler may move a start before another one."""
PREDICATED = re.compile(r"^\s*(?:\[thread:\S+\]\s*)?\(!?%p")


class ScheduleError(ValueError):
    """A trace and a compiled schedule that are not of the same program."""


@dataclass(frozen=True)
class Mark:
    """An event in the text of a schedule.

    Attributes:
        at: its bundle.
        op: as in :class:`~vmem_pool.aot.Event`.
        source: "file.py:line"; empty for what the compiler adds by itself.
        predicated: it may be passed without being executed.
    """

    at: int
    op: str
    source: str
    predicated: bool


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
class Schedule:
    """One kernel. Made by :func:`read_schedule`.

    Attributes:
        name: as in the compiled program.
        marks: events in the order of the text.
        forward, back: see :class:`~vmem_pool.aot.loops.Branches`.
        root: the kernel as a loop of one trip.
        files: the source file of each bundle, "" where unknown.
    """

    name: str
    marks: tuple[Mark, ...]
    forward: Mapping[int, tuple[int, bool]]
    root: Loop
    files: tuple[str, ...]

    def follow(self, events: Sequence[Event]) -> list[Segment]:
        """Finds each event in the schedule.

        Where the next event may be one of several of equal source, all are tried, and what comes
        later decides; loops of known length run exactly so often.

        Returns:
            what the core does before each event, and after the last.

        Raises:
            ScheduleError: the next event cannot be reached from the last one.
        """
        steps: list[dict[_State, tuple[_State, Segment]]] = []
        states: list[_State] = [_State(-1, ())]
        for number, event in enumerate(events):
            found = self._after(states, event, events[number - 1] if number else None)
            if not found:
                at = states[0].mark
                before = f"{self.marks[at].op} at {self.marks[at].source}" if at >= 0 else "entry"
                raise ScheduleError(
                    f"event {number}, {event.op} at {event.source}, cannot follow the {before} in"
                    f" the schedule of {self.name}"
                )
            steps.append(found)
            states = list(found)
        return self._way_to(states, steps)

    def _way_to(
        self, states: Sequence[_State], steps: Sequence[Mapping[_State, tuple[_State, Segment]]]
    ) -> list[Segment]:
        """The segments of a way that reaches the end of the schedule."""
        end = self.root.end + 1
        for state in states:
            reach = self._reach(state.mark)
            if end not in reach.cycles:
                continue
            way = [Segment(reach.cycles[end], self._files_on(reach, end))]
            for found in reversed(steps):
                state, segment = found[state]
                way.append(segment)
            return way[::-1]
        raise ScheduleError(f"the schedule of {self.name} has events after the last of the trace")

    def _after(
        self, states: Sequence[_State], event: Event, previous: Event | None
    ) -> dict[_State, tuple[_State, Segment]]:
        """Where the event may be after one of the states, and from which.

        The compiler makes one wait of adjacent ones for a semaphore, and changes the order of
        adjacent starts; jax may give equal code in one file one line.
        """
        if found := self._reached(states, event.op, event.source):
            return found
        merged = previous is not None and previous[:3] == event[:3] and event.op.endswith("wait")
        if merged or (event.op == "dma_start" and self._just_passed(states, event)):
            return {state: (state, Segment(0, {})) for state in states}
        return self._reached(states, event.op, event.source.partition(":")[0] + ":")

    def _just_passed(self, states: Sequence[_State], event: Event) -> bool:
        """A start like this one stands a little before one of the states."""
        alike = [n for n, mark in enumerate(self.marks) if (mark.op, mark.source) == event[:2]]
        return any(
            0 <= self._position(state.mark) - self.marks[n].at <= REORDERED
            for state in states
            for n in alike
            if n < state.mark
        )

    def _reached(
        self, states: Sequence[_State], op: str, source: str
    ) -> dict[_State, tuple[_State, Segment]]:
        """``source`` may be the beginning of one."""
        found: dict[_State, tuple[_State, Segment]] = {}
        for state in states:
            for after, segment in self._next(state, op, source):
                found.setdefault(after, (state, segment))
        return found

    def _next(self, state: _State, op: str, source: str) -> Iterable[tuple[_State, Segment]]:
        around = self._around(self._position(state.mark))
        for there, segment, repeated in self._ways(state.mark, op, source):
            target = self._around(self.marks[there].at)
            counts = dict(zip((loop.start for loop in around), state.turns))
            left = [loop for loop in around if loop not in target]
            if repeated is not None:
                left = [loop for loop in around if _inside(loop, repeated)]
                if counts[repeated.start] == repeated.trips:
                    continue
            rest = {loop.start: (loop.trips or 1) - counts[loop.start] for loop in left}
            known = {loop.start for loop in left if loop.trips is not None}
            if any(rest[at] and at not in self._quiet for at in known):
                continue
            for at in known:
                more = rest[at] * self._quiet[at].cycles[1] if at in self._quiet else 0
                segment += Segment(more, {self.files[at]: more})
            gone = {loop.start for loop in left}
            turns = tuple(
                counts[loop.start] + (loop is repeated)
                if loop.start in counts and loop.start not in gone
                else 1
                for loop in target
            )
            yield _State(there, self._bounded(target, turns)), segment

    @staticmethod
    def _bounded(loops: Sequence[Loop], turns: tuple[int, ...]) -> tuple[int, ...]:
        """Turns of loops of unknown length need not be told apart."""
        return tuple(1 if loop.trips is None else turn for loop, turn in zip(loops, turns))

    def _ways(self, here: int, op: str, source: str) -> Sequence[tuple[int, Segment, Loop | None]]:
        """Marks of this kind that can follow one, directly or by repeating a loop."""
        key = here, op, source
        if key not in self._known_ways:
            self._known_ways[key] = list(self._find_ways(here, op, source))
        return self._known_ways[key]

    def _find_ways(
        self, here: int, op: str, source: str
    ) -> Iterable[tuple[int, Segment, Loop | None]]:
        wanted = [
            number
            for number, mark in enumerate(self.marks)
            if mark.op == op
            and (mark.source == source or (source[-1:] == ":" and mark.source.startswith(source)))
        ]
        reach, start = self._reach(here), self._position(here)
        for there in wanted:
            at = self.marks[there].at
            if self._hidden(here, there):
                continue
            if at == start and there > here >= 0:
                yield there, Segment(0, {}), None
            elif at in reach.cycles and (at > start or here < 0):
                yield there, Segment(reach.cycles[at], self._files_on(reach, at)), None
        if here < 0 or self._stuck(here):
            return
        for loop in self._around(start):
            if loop.end + 1 not in reach.cycles:
                continue
            again = self._reach_from(loop.start)
            first = Segment(reach.cycles[loop.end + 1], self._files_on(reach, loop.end + 1))
            for there in wanted:
                at = self.marks[there].at
                if loop.start <= at <= loop.end and at in again.cycles:
                    if self._hidden(-1, there):
                        continue
                    second = Segment(again.cycles[at], self._files_on(again, at))
                    yield there, first + second, loop

    def _hidden(self, here: int, there: int) -> bool:
        """Another event of the same bundle must come before."""
        at = self.marks[there].at
        first = here + 1 if here >= 0 and self.marks[here].at == at and there > here else 0
        return any(mark.at == at and self._must_run(mark) for mark in self.marks[first:there])

    def _stuck(self, here: int) -> bool:
        """Another event of the same bundle must come after."""
        at = self.marks[here].at
        return any(mark.at == at and self._must_run(mark) for mark in self.marks[here + 1 :])

    @staticmethod
    def _must_run(mark: Mark) -> bool:
        return bool(mark.source) and not mark.predicated and mark.op.endswith("wait")

    def _reach(self, here: int) -> _Reach:
        if here not in self._known_reaches:
            if here >= 0 and self._stuck(here):
                self._known_reaches[here] = _Reach(self._position(here), {}, {})
            else:
                self._known_reaches[here] = self._reach_from(self._position(here), here >= 0)
        return self._known_reaches[here]

    def _reach_from(self, start: int, passed: bool = False) -> _Reach:
        """The longest ways forwards from a bundle, up to events that must run.

        ``passed``: events in the first bundle have run.
        """
        reach = _Reach(start, {start: 0}, {})
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
        child = self._quiet.get(at)
        if child and at != start:
            trips = 1 if child.trips is None else child.trips
            ways.append((trips * child.cycles[1], child.end + 1))
        target, falls_through = self.forward.get(at, (at, True))
        if falls_through:
            ways.append((1, at + 1))
        if target > at:
            ways.append((1 + BRANCH_DELAY, target))
        return ways

    def _files_on(self, reach: _Reach, end: int) -> Mapping[str, int]:
        files: Counter[str] = Counter()
        at = end
        while at != reach.start:
            before = reach.before[at]
            files[self.files[before]] += reach.cycles[at] - reach.cycles[before]
            at = before
        return files

    def _around(self, bundle: int) -> tuple[Loop, ...]:
        """Loops around a bundle, outermost first, without the kernel itself."""
        if bundle not in self._known_around:
            self._known_around[bundle] = tuple(
                loop for loop in self.root.walk()[1:] if loop.start <= bundle <= loop.end
            )
        return self._known_around[bundle]

    def _position(self, mark: int) -> int:
        return self.marks[mark].at if mark >= 0 else 0

    @cached_property
    def _blocking(self) -> frozenset[int]:
        """Bundles with a wait of the program, which cannot be passed."""
        return frozenset(mark.at for mark in self.marks if self._must_run(mark))

    @cached_property
    def _quiet(self) -> Mapping[int, Loop]:
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
    def _known_reaches(self) -> dict[int, _Reach]:
        return {}

    @cached_property
    def _known_around(self) -> dict[int, tuple[Loop, ...]]:
        return {}


@dataclass(frozen=True)
class _Reach:
    """Longest ways from a bundle: cycles to each bundle, and the bundle before it."""

    start: int
    cycles: dict[int, int]
    before: dict[int, int]


class _State(NamedTuple):
    """A mark, and how often each loop around it has begun."""

    mark: int
    turns: tuple[int, ...]


def _inside(loop: Loop, other: Loop) -> bool:
    return loop is not other and other.start <= loop.start and loop.end <= other.end


def read_schedule(
    folder: str | Path, name: str, trips: Mapping[str, float] | None = None
) -> Schedule:
    """The schedule of the kernel whose name begins so, from the dumps of a report.

    ``trips``: lengths of loops that the compiler does not know, by source; else they count once.

    Raises:
        ScheduleError: no such kernel.
    """
    found = [dumps for dumps in find_dumps(Path(folder)) if dumps.name.startswith(name)]
    if not found:
        raise ScheduleError(f"the dumps in {folder} have no kernel {name}...")
    return _read(found[0], trips or {})


def _read(dumps: Dumps, trips: Mapping[str, float]) -> Schedule:
    bundles = split_bundles(dumps.schedule)
    branches = Branches.of(bundles)
    unknown = [loop for loop in loop_tree(bundles, branches, {})[1] if loop.trips is None]
    given = {loop.name: round(trips[loop.source]) for loop in unknown if loop.source in trips}
    root, _ = loop_tree(bundles, branches, given)
    count_cycles(root, branches.forward)
    marks = tuple(mark for at, bundle in enumerate(bundles) for mark in _marks(at, bundle))
    return Schedule(dumps.name, marks, branches.forward, root, tuple(_files(bundles)))


def _marks(at: int, bundle: str) -> Iterable[Mark]:
    for found in EVENTS.finditer(bundle):
        op, rest = found["op"], found["rest"]
        if op == "dma.done.wait":
            kind = "dma_wait"
        elif op.startswith("dma"):
            kind = "dma_start"
        else:
            kind = "semaphore_wait" if op.startswith("vwait") else "semaphore_signal"
        yield Mark(at, kind, source_of(rest), bool(PREDICATED.search(rest)))


def _files(bundles: Sequence[str]) -> Iterable[str]:
    """The file that most operations of each bundle come from; gaps belong to what is before."""
    last = ""
    for bundle in bundles:
        names = re.findall(r'loc\((?:[^"]*\()?"([^"]*)":\d+', bundle)
        if names:
            last = Counter(names).most_common(1)[0][0]
        yield last
