"""A compiled schedule as a machine that runs through known events: cycles from one to the next.

Transfers and waits stand in the schedule at their bundles; a trace says in which order they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from vmem_pool.aot.events import Event
from vmem_pool.aot.kernels import Dumps, find_dumps, split_bundles
from vmem_pool.aot.loops import Branches, Loop, count_cycles, loop_tree
from vmem_pool.aot.marks import files_of, marks_of
from vmem_pool.aot.ways import Segment, Ways

__all__ = ["Schedule", "ScheduleError", "read_schedule"]

REORDERED = 64
"""Bundles by which the compiler may move a start before another one."""


class ScheduleError(ValueError):
    """A trace and a compiled schedule that are not of the same program."""


@dataclass(frozen=True)
class Schedule:
    """One kernel, by its name in the compiled program. Made by :func:`read_schedule`."""

    name: str
    ways: Ways

    def follow(self, events: Sequence[Event]) -> list[Segment]:
        """Finds each event in the schedule.

        Where the next event may be one of several of equal source, all are tried; of the ways that
        what comes later leaves over, the one with the fewest cycles counts. Loops of known length
        run exactly so often.

        Returns:
            what the core does before each event, and after the last.

        Raises:
            ScheduleError: the next event cannot be reached from the last one.
        """
        steps: list[_Found] = []
        costs = {_State(-1, ()): 0}
        for number, event in enumerate(events):
            found = self._after(costs, event, events[number - 1] if number else None)
            if not found:
                at = next(iter(costs)).mark
                before = (
                    f"{self.ways.marks[at].op} at {self.ways.marks[at].source}"
                    if at >= 0
                    else "entry"
                )
                raise ScheduleError(
                    f"event {number}, {event.op} at {event.source}, cannot follow the {before} in"
                    f" the schedule of {self.name}"
                )
            steps.append(found)
            costs = {
                after: costs[before] + segment.cycles for after, (before, segment) in found.items()
            }
        return self._way_to(costs, steps)

    def _way_to(self, costs: Mapping[_State, int], steps: Sequence[_Found]) -> list[Segment]:
        """The segments of the shortest way that reaches the end of the schedule."""
        end = self.ways.root.end + 1
        reaches = {state: self.ways.reach(state.mark) for state in costs}
        last = [state for state in costs if end in reaches[state].cycles]
        if not last:
            raise ScheduleError(
                f"the schedule of {self.name} has events after the last of the trace"
            )
        state = min(last, key=lambda state: costs[state] + reaches[state].cycles[end])
        way = [self.ways.segment(reaches[state], end)]
        for found in reversed(steps):
            state, segment = found[state]
            way.append(segment)
        return way[::-1]

    def _after(self, costs: Mapping[_State, int], event: Event, previous: Event | None) -> _Found:
        """Where the event may be after one of the states, and from which.

        The compiler makes one wait of adjacent ones for a semaphore, and changes the order of
        adjacent starts; jax may give equal code in one file one line.
        """
        stays = {state: (state, Segment(0, {})) for state in costs}
        merged = previous is not None and previous[:3] == event[:3] and event.op.endswith("wait")
        if merged and not any(self.ways.marks[state.mark].must_run for state in costs):
            return stays  # in a loop: the turns that are left count when it is left
        found = self._reached(costs, event.op, event.source)
        if merged:
            return {**found, **stays}
        if found:
            return found
        if event.op == "dma_start" and self._just_passed(costs, event):
            return stays
        return self._reached(costs, event.op, event.source.partition(":")[0] + ":")

    def _just_passed(self, states: Iterable[_State], event: Event) -> bool:
        """A start like this one stands a little before one of the states."""
        alike = [n for n, mark in enumerate(self.ways.marks) if (mark.op, mark.source) == event[:2]]
        return any(
            0 <= self.ways.position(state.mark) - self.ways.marks[n].at <= REORDERED
            for state in states
            for n in alike
            if n < state.mark
        )

    def _reached(self, costs: Mapping[_State, int], op: str, source: str) -> _Found:
        """``source`` may be the beginning of one.

        Of states that differ in turns of loops without waits, the cheapest is enough: the turns
        that are left count when such a loop is left.
        """
        best: dict[object, tuple[int, _State, _State, Segment]] = {}
        for state, cost in costs.items():
            for alike, after, segment in self._nexts(state, op, source):
                total = cost + segment.cycles
                if alike not in best or total < best[alike][0]:
                    best[alike] = total, after, state, segment
        return {after: (state, segment) for _, after, state, segment in best.values()}

    def _nexts(self, state: _State, op: str, source: str) -> list[tuple[object, _State, Segment]]:
        """Where to go from a state, with what tells it apart; layers repeat, so most are known."""
        key = state, op, source
        if key not in self._known_nexts:
            self._known_nexts[key] = [
                ((after.mark, self._told_apart(after)), after, segment)
                for after, segment in self._next(state, op, source)
            ]
        return self._known_nexts[key]

    @cached_property
    def _known_nexts(self) -> dict[Any, list[tuple[object, _State, Segment]]]:
        return {}

    def _told_apart(self, state: _State) -> tuple[int, ...]:
        """Turns of the loops with waits around a state."""
        around = self.ways.around(self.ways.position(state.mark))
        quiet = self.ways.quiet
        return tuple(n for loop, n in zip(around, state.turns) if loop.start not in quiet)

    def _next(self, state: _State, op: str, source: str) -> Iterable[tuple[_State, Segment]]:
        around = self.ways.around(self.ways.position(state.mark))
        counts = dict(zip((loop.start for loop in around), state.turns))
        for there, segment, repeated in self.ways.to(state.mark, op, source):
            target = self.ways.around(self.ways.marks[there].at)
            if repeated is None:
                left = [loop for loop in around if loop not in target]
            else:
                left = [loop for loop in around if _inside(loop, repeated)]
                if counts[repeated.start] == repeated.trips:
                    continue
            rest = self._rest(left, counts)
            if rest is None:
                continue
            kept = {start: n for start, n in counts.items() if start not in {x.start for x in left}}
            turns = (kept.get(loop.start, 0) + (loop is repeated) or 1 for loop in target)
            # Turns of loops of unknown length need not be told apart.
            told = tuple(1 if loop.trips is None else n for loop, n in zip(target, turns))
            yield _State(there, told), segment + rest

    def _rest(self, left: Iterable[Loop], counts: Mapping[int, int]) -> Segment | None:
        """The turns that are still to come of loops that are left; None if they have events."""
        rest = Segment(0, {})
        for loop in left:
            turns = 0 if loop.trips is None else loop.trips - counts[loop.start]
            if turns and loop.start not in self.ways.quiet:
                return None
            more = turns * loop.cycles[1]
            rest += Segment(more, {self.ways.files[loop.start]: more})
        return rest


class _State(NamedTuple):
    """A mark, and how often each loop around it has begun."""

    mark: int
    turns: tuple[int, ...]


_Found: TypeAlias = Mapping[_State, tuple[_State, Segment]]
"""Where an event may be, from where, and the work between."""


def _inside(loop: Loop, other: Loop) -> bool:
    return loop is not other and other.start <= loop.start and loop.end <= other.end


def read_schedule(
    folder: str | Path, name: str, trips: Mapping[str, float] | None = None
) -> Schedule:
    """The schedule of the kernel whose name begins so, from the dumps of a report.

    ``trips``: lengths of loops that the compiler does not know, by source, of which those without
    waits that must run are taken; others turn as often as the events say, or count once.

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
    root, loops = loop_tree(bundles, branches, {})
    ways = Ways(marks_of(bundles), branches.forward, root, files_of(bundles))
    given = {
        loop.name: round(trips[loop.source])
        for loop in loops
        if loop.trips is None and loop.source in trips and loop.start in ways.quiet
    }
    known, _ = loop_tree(bundles, branches, given)
    count_cycles(known, branches.forward)
    return Schedule(dumps.name, replace(ways, root=known))
