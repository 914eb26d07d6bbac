"""Writes a schedule by hand as the events that a trace of it would have."""

from __future__ import annotations

from dataclasses import dataclass, field

from vmem_pool.aot import Event, Semaphore

from benchmarks.accounting.program import Program, Step

__all__ = ["ScheduleWriter", "product_cycles"]

CYCLES_PER_BYTE = 2.44e-4
"""Of a bf16 matrix-vector product, per byte of weights in VMEM, up to 16 rows (compiled)."""
FILL_AND_DRAIN = 240
"""Of the matrix unit, once for every wait (compiled)."""


def product_cycles(weight_bytes: float) -> int:
    """A product with one tile of weights that was waited for."""
    return round(weight_bytes * CYCLES_PER_BYTE) + FILL_AND_DRAIN


@dataclass
class ScheduleWriter:
    """Appends to a schedule; names of semaphores are free."""

    name: str
    slots: int = 0
    steps: list[Step] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)
    _cycles: int = 0
    _stage: str = ""

    def work(self, cycles: int, stage: str) -> None:
        """The core is busy."""
        if self._cycles and stage != self._stage:
            self._step(None, "")
        self._cycles, self._stage = self._cycles + cycles, stage

    def load(self, name: str, bytes_: float, kind: str, index: int = 0) -> None:
        """Starts a transfer from HBM."""
        self._step(self._event("dma_start", "hbm->vmem", name, index, bytes_), kind)

    def store(self, name: str, bytes_: float, kind: str, index: int = 0) -> None:
        """Starts a transfer to HBM."""
        self._step(self._event("dma_start", "vmem->hbm", name, index, bytes_), kind)

    def wait(self, name: str, bytes_: float, kind: str, index: int = 0) -> None:
        """Waits for transfers of so many bytes."""
        self._step(self._event("dma_wait", "hbm->vmem", name, index, bytes_), kind)

    def exchange(self, messages: int, message_bytes: float, sibling: bool = False) -> None:
        """Sends, then waits for what the peers have sent: one phase."""
        self.send("exchange", messages, message_bytes, sibling)
        self.receive("exchange")

    def send(self, name: str, messages: int, message_bytes: float, sibling: bool = False) -> None:
        """Starts a phase: one message to each of so many peers."""
        arrived = self._semaphore(name, 0)
        for peer in range(messages):
            device = (("ranks", 1 if sibling else peer + 2),)
            size = round(message_bytes)
            self._step(Event("dma_start", name, arrived, size, "vmem->remote vmem", device), "")

    def receive(self, name: str) -> None:
        """Ends the phase of that name."""
        self._step(Event("dma_wait", name, self._semaphore(name, 0), 0, "vmem->vmem"), "")

    def program(self) -> Program:
        """The finished schedule."""
        if self._cycles:
            self._step(None, "")
        return Program(
            self.name, tuple(self.steps), sibling=(("ranks", 1),), ring=("weights", self.slots)
        )

    def _semaphore(self, name: str, index: int) -> Semaphore:
        return Semaphore(self._numbers.setdefault(name, len(self._numbers)), (index,))

    def _event(self, op: str, route: str, name: str, index: int, bytes_: float) -> Event:
        return Event(op, name, self._semaphore(name, index), round(bytes_), route)

    def _step(self, event: Event | None, kind: str) -> None:
        stages = {self._stage: self._cycles} if self._cycles else {}
        self.steps.append(Step(self._cycles, stages, event, kind))
        self._cycles = 0
