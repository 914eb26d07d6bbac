"""SIGINT and SIGTERM as notes instead of interruptions, from before the server listens."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopSignals"]

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Notes stop signals while it is entered, so that none is lost however early it comes."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.first_at: float | None = None
        """Of the monotonic clock, when the first one came."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows no other
            self._before = {one: signal.signal(one, self.note) for one in STOPPING}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """The handler."""
        if self.first_at is None:
            self.first_at = time.monotonic()
        self.received.append(number)

    def raise_interrupt(self) -> None:
        """Raises ``KeyboardInterrupt`` if the first signal was SIGINT; SIGTERM is no error."""
        if self.received[:1] == [signal.SIGINT]:
            raise KeyboardInterrupt
