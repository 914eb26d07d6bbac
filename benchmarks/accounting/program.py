"""What the simulation runs: events with the work before each of them.

A kernel of this project gives them by its trace and its compiled schedule, a published kernel by a
description of its schedule; the simulation cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vmem_pool.aot import Event

__all__ = ["Program", "Step", "Sublayer"]


class Sublayer(NamedTuple):
    """Where in a step something happens: the number and kind of a part of it."""

    number: int
    kind: str


NOWHERE = Sublayer(0, "")


@dataclass(frozen=True)
class Step:
    """Work of the core, then an event.

    Attributes:
        cycles: of the core, waits excluded.
        stages: these cycles by stage.
        event: what follows the work, None at the end.
        kind: what the event moves or waits for, such as "weights" or "state".
        sublayer: that it belongs to.
    """

    cycles: int
    stages: Mapping[str, int]
    event: Event | None
    kind: str = ""
    sublayer: Sublayer = NOWHERE


@dataclass(frozen=True)
class Program:
    """One kernel on one rank.

    Attributes:
        name: of the kernel.
        steps: in order.
        copied_in, copied_out: bytes that are moved before the first step and after the last.
        sibling: coordinates, as in an event's ``device``, of the other core of the chip.
        ring: name of the kind that the ring holds, with the number of its slots.
    """

    name: str
    steps: tuple[Step, ...]
    copied_in: int = 0
    copied_out: int = 0
    sibling: object = None
    ring: tuple[str, int] = field(default=("weights", 0))
