"""Runs a program against HBM and the links: the only place where work and transfers overlap.

The core does its work in order and stops at a wait until the transfer's last byte or the exchange
is there. Transfers run beside it from their start. Nothing else is modelled: no latency of a local
transfer, no launch, no skew between ranks, no sharing of HBM with exchanges.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from vmem_pool.aot import Event

from benchmarks.accounting.channel import Channel, Transfer
from benchmarks.accounting.machine import CYCLES_PER_US, HBM_BYTES_PER_US
from benchmarks.accounting.phases import Exchange, Exchanges
from benchmarks.accounting.program import Program, Step

__all__ = ["Simulated", "Span", "simulate"]


class Span(NamedTuple):
    """A stretch of time, in us."""

    start: float
    end: float
    what: str


@dataclass
class Simulated:
    """A simulated kernel; times in us.

    Attributes:
        us: from entry to exit.
        work: what the core did.
        waits: where it stood still, by what it waited for.
        exchanges: those that were waited for, and when.
        transfers: of HBM.
        taken: when each transfer of the ring was waited for.
        began: when the first step did.
        ended: when each step was over, its wait included.
        bytes: moved by HBM, by kind.
    """

    program: Program
    us: float = 0.0
    work: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    exchanges: list[tuple[Exchange, float]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    bytes: Counter[str] = field(default_factory=Counter)
    began: float = 0.0
    ended: list[float] = field(default_factory=list)

    @property
    def hbm_us(self) -> float:
        """The floor: all bytes at the sustained bandwidth."""
        return sum(self.bytes.values()) / HBM_BYTES_PER_US

    @property
    def work_us(self) -> float:
        """Of the core, waits excluded."""
        return sum(step.cycles for step in self.program.steps) / CYCLES_PER_US

    @property
    def waited_us(self) -> Counter[str]:
        """By what was waited for."""
        total: Counter[str] = Counter()
        for span in self.waits:
            total[span.what] += span.end - span.start  # type: ignore[assignment]
        return total

    @property
    def cycles(self) -> Counter[str]:
        """Of the core, by stage."""
        total: Counter[str] = Counter()
        for step in self.program.steps:
            total.update(step.stages)
        return total


def simulate(program: Program, fair: bool = False) -> Simulated:
    """Runs a program from an idle machine to its exit.

    Args:
        program: see :class:`Program`.
        fair: how HBM serves transfers, see :class:`Channel`.

    Raises:
        ValueError: a wait for bytes that were never started.
    """
    run = _Run(program, Channel(HBM_BYTES_PER_US, fair), Exchanges(program.sibling))
    run.copy(program.copied_in)
    run.found.began = run.now
    for step in program.steps:
        run.step(step)
        run.found.ended.append(run.now)
    run.copy(program.copied_out)
    return run.result()


class _Run:
    """The state of a simulation."""

    def __init__(self, program: Program, hbm: Channel, exchanges: Exchanges) -> None:
        self.now, self.hbm, self.exchanges = 0.0, hbm, exchanges
        self.found = Simulated(program)
        self.loads: dict[object, deque[Transfer]] = defaultdict(deque)

    def copy(self, bytes_: int) -> None:
        """The compiler's copies of operands; nothing runs beside them."""
        if bytes_:
            self._load(bytes_, "operands")
            self._until(self.hbm.drain(), "operands")

    def step(self, step: Step) -> None:
        """Work, then the event."""
        end = self.now + step.cycles / CYCLES_PER_US
        if step.cycles:
            what = max(step.stages, key=step.stages.__getitem__, default="")
            self.found.work.append(Span(self.now, end, what))
        self.now = end
        if step.event is None:
            return
        if step.event.op.endswith("wait"):
            self._wait(step.event, step.kind)
        elif step.event.device is not None:
            self.exchanges.start(step.event, self.now)
        elif "hbm" in step.event.route:
            transfer = self._load(step.event.amount, step.kind)
            self.loads[step.event.semaphore].append(transfer)

    def result(self) -> Simulated:
        """What was found, once all is over."""
        self._until(self.hbm.drain(), "operands")
        self.found.us = self.now
        self.found.transfers = self.hbm.transfers
        self.found.exchanges = self.exchanges.done
        return self.found

    def _load(self, bytes_: int, kind: str) -> Transfer:
        self.found.bytes[kind] += bytes_
        return self.hbm.start(self.now, bytes_, kind)

    def _wait(self, event: Event, kind: str) -> None:
        arrival = self.exchanges.wait(event, self.now)
        if arrival is not None:
            self._until(arrival, "exchange")
        elif "hbm" in event.route:
            self._until(self._arrival(event), kind)
            if kind == self.found.program.ring[0]:
                self.found.taken.append(self.now)

    def _arrival(self, event: Event) -> float:
        """When the bytes that an event takes have all arrived."""
        pending, left, arrival = self.loads[event.semaphore], event.amount, 0.0
        while left > 0:
            if not pending:
                raise ValueError(
                    f"{event.source} waits for {left} bytes on {event.semaphore} that nobody loads"
                )
            transfer = pending.popleft()
            left -= transfer.bytes
            arrival = max(arrival, self.hbm.finish(transfer))
        return arrival

    def _until(self, then: float, what: str) -> None:
        if then > self.now:
            self.found.waits.append(Span(self.now, then, what))
            self.now = then
