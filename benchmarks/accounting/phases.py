"""Exchanges between ranks: groups of messages that a kernel sends, then waits for.

All ranks run the same program, so what this rank sends on a semaphore is what it will receive on
its own; an exchange is a wait on a semaphore on which remote starts have come since its last wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tpu_collectives.cost import Phase, phase_us
from vmem_pool.aot import Event

__all__ = ["Exchange", "Exchanges", "exchanges_of"]


@dataclass
class Exchange:
    """Messages of one phase.

    Attributes:
        messages: how many this rank sends.
        message_bytes: of the largest.
        sibling: the only peer is the other core of the chip.
        first, last: when the first and the last message were started, in us.
    """

    messages: int = 0
    message_bytes: int = 0
    sibling: bool = True
    first: float = 0.0
    last: float = 0.0

    def add(self, event: Event, now: float, sibling: object) -> None:
        """Counts one message."""
        if not self.messages:
            self.first = now
        self.last = now
        self.messages += 1
        moved = event.amount if event.op == "dma_start" else 0
        self.message_bytes = max(self.message_bytes, moved)
        self.sibling &= sibling is not None and event.device == sibling

    @property
    def arrival(self) -> float:
        """When all messages of all peers have arrived: ranks are assumed to run in step."""
        single = Phase(1, self.message_bytes, self.sibling)
        whole = Phase(self.messages, self.message_bytes, self.sibling)
        return max(self.first + phase_us(whole), self.last + phase_us(single))


@dataclass
class Exchanges:
    """Exchanges in flight, by the semaphore on which they arrive."""

    sibling: object
    open: dict[object, Exchange] = field(default_factory=dict)
    done: list[tuple[Exchange, float]] = field(default_factory=list)
    """ended exchanges, and when they were waited for"""
    _sent: dict[object, float] = field(default_factory=dict)

    def start(self, event: Event, now: float) -> None:
        """A remote start or signal."""
        exchange = self.open.setdefault(event.semaphore, Exchange())
        exchange.add(event, now, self.sibling)
        if event.sent is not None:
            self._sent[event.sent] = exchange.arrival

    def wait(self, event: Event, now: float) -> float | None:
        """When what an event waits for has arrived or left; None if it is not of an exchange."""
        if exchange := self.open.pop(event.semaphore, None):
            self.done.append((exchange, now))
            return exchange.arrival
        # What has arrived at the peers has left; the cost of a phase does not tell them apart.
        return self._sent.get(event.semaphore)


def exchanges_of(events: Iterable[Event], sibling: object) -> list[Exchange]:
    """The exchanges that a kernel waits for, in order, with no times."""
    tracked = Exchanges(sibling)
    for event in events:
        if event.op.endswith("wait"):
            tracked.wait(event, 0.0)
        elif event.device is not None:
            tracked.start(event, 0.0)
    return [exchange for exchange, _ in tracked.done]
