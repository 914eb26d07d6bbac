"""HBM as a server of transfers with a fixed bandwidth."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Channel", "Transfer"]


@dataclass(eq=False)
class Transfer:
    """A transfer: when it was started, when its last byte arrives."""

    kind: str
    bytes: int
    start: float
    end: float = float("inf")
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = float(self.bytes)


class Channel:
    """Transfers in the order of their starts, or all in flight at equal shares.

    Which of the two a TPU does is not known. Starts come in the order of time.

    Args:
        bytes_per_us: bandwidth.
        fair: equal shares instead of first come, first served.
    """

    def __init__(self, bytes_per_us: float, fair: bool = False) -> None:
        self.bytes_per_us, self.fair = bytes_per_us, fair
        self.transfers: list[Transfer] = []
        self._active: list[Transfer] = []
        self._now = 0.0

    def start(self, now: float, bytes_: int, kind: str) -> Transfer:
        """Starts a transfer."""
        transfer = Transfer(kind, bytes_, now)
        if self.fair:
            self._advance(now)
            self._active.append(transfer)
        else:
            free = self.transfers[-1].end if self.transfers else 0.0
            transfer.end = max(now, free) + bytes_ / self.bytes_per_us
        self.transfers.append(transfer)
        return transfer

    def finish(self, transfer: Transfer) -> float:
        """When a transfer ends, if nothing is started until then."""
        while transfer.end == float("inf"):
            self._advance(self._next_end())
        return transfer.end

    def drain(self) -> float:
        """When all transfers have ended."""
        return max(map(self.finish, self.transfers), default=0.0)

    def _next_end(self) -> float:
        smallest = min(transfer.left for transfer in self._active)
        return self._now + smallest * len(self._active) / self.bytes_per_us

    def _advance(self, now: float) -> None:
        """Moves equal shares of all active transfers until a point in time."""
        while self._active and (end := self._next_end()) <= now:
            moved = min(transfer.left for transfer in self._active)
            for transfer in self._active:
                transfer.left -= moved
                if transfer.left <= 0:
                    transfer.end = end
            self._active = [transfer for transfer in self._active if transfer.left > 0]
            self._now = end
        if now > self._now:
            moved = (now - self._now) * self.bytes_per_us / max(1, len(self._active))
            for transfer in self._active:
                transfer.left -= moved
            self._now = now
