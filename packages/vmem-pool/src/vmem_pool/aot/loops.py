"""The loop tree of a register-allocated schedule, and the cycles of its paths.

The schedule has one bundle per cycle, gaps included, so cycles are numbers of bundles; branches
name their targets by bundle number. Waits for transfers and semaphores are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vmem_pool.aot.machine import BRANCH_DELAY

__all__ = ["OPERATIONS", "SLOTS", "Branches", "Loop", "count_cycles", "loop_tree", "source_of"]

SLOTS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
"""Columns of the utilisation dump. MXU counts products only, not the pushes of weights."""
OPERATIONS = {
    "matpush": r"vmatpush\d?\.",
    "matmul": r"vmatmul\.",
    "dma_start": r"= dma\.(?!done)",
    "dma_wait": r"dma\.done",
    "sem_wait": r"vwait\.",
    "remote_signal": r"vsync\w+\.remote",
}


@dataclass
class Loop:
    """A loop of the schedule; the kernel itself is one with a single trip.

    Attributes:
        name: ``L0``, ``L1``, ... in program order.
        start, end: first and last bundle, the branch delay included.
        trips: None if the compiler does not know them.
        source: "file.py:line".
        bundles: of one iteration, outside nested loops.
        own: slots used and operations in those bundles.
        cycles: shortest and longest path of one iteration with its nested loops.
        children: nested loops.
    """

    name: str
    start: int
    end: int
    trips: int | None
    source: str = ""
    bundles: int = 0
    own: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*SLOTS, *OPERATIONS), 0))
    cycles: tuple[int, int] = (0, 0)
    children: list[Loop] = field(default_factory=list)

    def walk(self) -> list[Loop]:
        """This loop and all nested ones, outermost first."""
        return [self, *(inner for child in self.children for inner in child.walk())]


@dataclass(frozen=True)
class Branches:
    """Branches of a schedule.

    Attributes:
        forward: from a bundle to (target, whether it may fall through).
        back: from the first bundle of a loop to (its last branch back, that branch's text).
    """

    forward: Mapping[int, tuple[int, bool]]
    back: Mapping[int, tuple[int, str]]

    @classmethod
    def of(cls, bundles: Sequence[str]) -> Branches:
        """Those of a schedule that is split into bundles."""
        forward: dict[int, tuple[int, bool]] = {}
        back: dict[int, tuple[int, str]] = {}
        pattern = re.compile(r"sbr\.rel (\([^)]*\))?.*?target bundleno = (\d+)", re.S)
        for at, bundle in enumerate(bundles):
            for branch in pattern.finditer(bundle):
                target = int(branch[2])
                if target > at:
                    forward[at] = target, bool(branch[1])
                else:
                    back[target] = at, branch[0]
        return cls(forward, back)


def loop_tree(
    bundles: Sequence[str], branches: Branches, trips: Mapping[str, int]
) -> tuple[Loop, list[Loop]]:
    """The kernel as a loop, and all loops with it; ``trips`` overrides counts by name."""
    text = "".join(bundles)
    root = Loop("kernel", 0, len(bundles) - 1, 1)
    loops = [root]
    for number, (start, (at, branch)) in enumerate(sorted(branches.back.items())):
        name = f"L{number}"
        count = trips[name] if name in trips else _trip_count(text, branch)
        counter = " ".join(re.findall(r"sphi [^;}]*", bundles[start]))
        source = source_of(branch) or source_of(counter) or source_of(bundles[start])
        loops.append(Loop(name, start, min(at + BRANCH_DELAY, root.end), count, source))
    for loop in loops[1:]:
        around = [
            other
            for other in loops
            if other is not loop and other.start <= loop.start and loop.end <= other.end
        ]
        min(around, key=lambda other: other.end - other.start).children.append(loop)
    return root, loops


def count_cycles(loop: Loop, forward: Mapping[int, tuple[int, bool]]) -> None:
    """Sets ``cycles`` of a loop and those inside it, from its last bundle to its first."""
    inner = {nested.start: nested for nested in loop.children}
    low, high = [0] * (loop.end + 2), [0] * (loop.end + 2)
    for nested in loop.children:
        count_cycles(nested, forward)
    for at in range(loop.end, loop.start - 1, -1):
        if child := inner.get(at):
            trips = 1 if child.trips is None else child.trips
            low[at] = trips * child.cycles[0] + low[child.end + 1]
            high[at] = trips * child.cycles[1] + high[child.end + 1]
            continue
        target, falls_through = forward.get(at, (at, True))
        ways = [(1, at + 1)] if falls_through else []
        if at < target <= loop.end:
            ways.append((1 + BRANCH_DELAY, target))
        low[at] = min((cost + low[to] for cost, to in ways), default=1)
        high[at] = max((cost + high[to] for cost, to in ways), default=1)
    loop.cycles = low[loop.start], high[loop.start]


def source_of(text: str) -> str:
    """The first source location of annotated text, as "file.py:line"."""
    found = re.search(r'loc\((?:[^"]*\()?"([^"]*)":(\d+)', text)
    return f"{Path(found[1]).name}:{found[2]}" if found else ""


def _trip_count(text: str, branch: str) -> int | None:
    """Trips of a loop whose exit test compares a counter with a constant, else None."""

    def operands(register: str, operation: str) -> list[str]:
        pattern = rf"{re.escape(register)} = {operation}[\w.]* (?:\([^)]*\), )?([^;/}}]+)"
        found = re.search(pattern, text)
        return [operand.strip() for operand in found[1].split(",")] if found else ["", ""]

    predicate = re.search(r"\(!(%p\w+)\)", branch)
    if not predicate:
        return None
    counter, limit = operands(predicate[1], "scmp.ge")[:2]
    step, carried = operands(counter, "sadd")[:2]
    start = operands(operands(carried, "sphi")[0], "smov")[-1]
    if not (limit.isdigit() and step.isdigit() and start.isdigit() and int(step)):
        return None
    return -(-(int(limit) - int(start)) // int(step))
