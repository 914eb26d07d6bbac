"""How long a dependent exchange takes: a model in microseconds, for choosing among schedules.

Fitted to published measurements of exchanges inside kernels on eight TPU v7 cores (one host), which
it meets within 20 %. That a peer on another host costs what a peer on the same host costs is
assumed, not measured. Packing and local sums are left out; they show from about 256 KB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Phase", "phase_us", "schedule_us"]

OFF_CHIP_US = 2.2
"""One message to another chip, sent and waited for."""
EXTRA_MESSAGE_US = 0.18
"""Each further message of the same phase."""
SIBLING_US = 1.7
"""One message to the other core of the chip, sent and waited for."""
PEER_BYTES_PER_US = 45e3
"""To one core of another chip, per direction (45 GB/s)."""
EGRESS_BYTES_PER_US = 134e3
"""From one core to several chips together (134 GB/s)."""
SIBLING_BYTES_PER_US = 600e3
"""Over the die-to-die link (600 GB/s)."""


@dataclass(frozen=True)
class Phase:
    """One dependent exchange of a rank: all its sends start, then all receives are waited for.

    Args:
        messages: peers that this rank sends to.
        message_bytes: bytes of each message, as they travel.
        sibling: the only peer is the other core of the chip.

    Raises:
        ValueError: no message, negative bytes, or more than one sibling.
    """

    messages: int
    message_bytes: int
    sibling: bool = False

    def __post_init__(self) -> None:
        if self.messages < 1:
            raise ValueError(f"a phase has at least one message, not {self.messages}")
        if self.message_bytes < 0:
            raise ValueError(f"a message cannot have {self.message_bytes} bytes")
        if self.sibling and self.messages > 1:
            raise ValueError(f"a core has one sibling, so not {self.messages} messages to it")


def phase_us(phase: Phase) -> float:
    """Time of one phase: fixed cost, cost per message, and the slower of link and egress."""
    size, count = phase.message_bytes, phase.messages
    if phase.sibling:
        return SIBLING_US + size / SIBLING_BYTES_PER_US
    wire = max(size / PEER_BYTES_PER_US, count * size / EGRESS_BYTES_PER_US)
    return OFF_CHIP_US + EXTRA_MESSAGE_US * (count - 1) + wire


def schedule_us(phases: Iterable[Phase]) -> float:
    """Time of phases that wait for one another."""
    return sum(map(phase_us, phases))
