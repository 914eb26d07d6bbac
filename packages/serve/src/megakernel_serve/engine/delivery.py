"""The hand-over of one request's tokens from the device thread to whoever waits for them.

The device thread must never wait for a slow reader. So deltas that were not read yet are merged
into one: memory is bounded by the request's own ``max_tokens``, and putting never blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

__all__ = ["Delivery", "Delta", "Finish", "FinishReason", "Timing"]

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Timing:
    """Where a request's time went, in seconds; 0 for a phase that it did not reach."""

    queue: float = 0.0
    """From submit to the first prefill chunk."""
    prefill: float = 0.0
    """From the first prefill chunk to the first token."""
    decode: float = 0.0
    """From the first token to the last."""


@dataclass(frozen=True)
class Finish:
    """How a request ended."""

    reason: FinishReason
    timing: Timing
    stop_id: int | None = None
    """The end id that was generated, if one ended the request; it is in no delta."""


@dataclass(frozen=True)
class Delta:
    """What happened since the last delta."""

    token_ids: tuple[int, ...] = ()
    prefilled: int = 0
    """Prompt tokens fed so far."""
    finish: Finish | None = None
    """Set in the last delta only."""


class Delivery:
    """Many puts from one thread, one reader in another thread or in an event loop."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._tokens: list[int] = []
        self._prefilled = 0
        self._fresh = False
        self._finish: Finish | None = None
        self._error: Exception | None = None
        self._wake: Callable[[], object] | None = None
        self._drained = False

    @property
    def ended(self) -> bool:
        """True once the producer has put a finish or an error."""
        return self._finish is not None or self._error is not None

    def put_progress(self, prefilled: int) -> None:
        """Tells how many prompt tokens were fed."""
        with self._condition:
            self._prefilled = prefilled
            self._notify()

    def put_token(self, token: int) -> None:
        """Adds one generated token."""
        with self._condition:
            self._tokens.append(token)
            self._notify()

    def finish(self, finish: Finish) -> None:
        """Ends the request; later ends are ignored."""
        with self._condition:
            if not self.ended:
                self._finish = finish
                self._notify()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, raised to the reader after the pending tokens."""
        with self._condition:
            if not self.ended:
                self._error = error
                self._notify()

    def take(self) -> Delta | None:
        """The next delta, waiting for it; None after the last one.

        Raises:
            EngineError: what the producer failed with.
        """
        with self._condition:
            while not self._ready():
                self._condition.wait()
            return self._pop()

    async def take_async(self) -> Delta | None:
        """As :meth:`take`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            with self._condition:
                if self._ready():
                    return self._pop()
                arrived = asyncio.Event()
                self._wake = partial(loop.call_soon_threadsafe, arrived.set)
            await arrived.wait()

    def _ready(self) -> bool:
        return self._fresh or self.ended or self._drained

    def _pop(self) -> Delta | None:
        if self._drained:
            return None
        if self._error is not None and not self._tokens:
            self._drained = True
            raise self._error
        delta = Delta(tuple(self._tokens), self._prefilled, self._finish)
        self._tokens.clear()
        self._fresh = False
        self._drained = self._finish is not None
        return delta

    def _notify(self) -> None:
        self._fresh = True
        self._condition.notify_all()
        if self._wake is not None:
            wake, self._wake = self._wake, None
            with contextlib.suppress(RuntimeError):  # the reader's event loop is gone
                wake()
