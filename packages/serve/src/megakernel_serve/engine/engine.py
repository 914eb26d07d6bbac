"""The engine: a bounded queue in front of one thread that owns the model."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kda_mla_kernels.model import Model

from megakernel_serve.engine.delivery import Finish, Timing
from megakernel_serve.engine.errors import (
    ContextLengthError,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineStoppedError,
    RequestFailedError,
    TokenIdError,
)
from megakernel_serve.engine.request import Request, RequestHandle
from megakernel_serve.engine.rows import Rows

__all__ = ["Engine", "EngineStatus"]

_log = logging.getLogger(__name__)

ABORT_SECONDS = 2.0
"""How long a shutdown waits for the device call that is under way."""

Phase: TypeAlias = Literal["running", "recovering", "stopping", "failed", "stopped"]


@dataclass(frozen=True)
class EngineStatus:
    """A moment's view, for health checks and humans."""

    phase: Phase
    running: int
    waiting: int
    idle_seconds: float
    """Since the last finished chunk or step while requests are running, else 0: a device call
    that hangs raises nothing, so its age is the only sign."""

    @property
    def accepting(self) -> bool:
        """True if a request would be taken, room in the queue given."""
        return self.phase in ("running", "recovering")


class Engine:
    """Runs requests on a model, as many at a time as its state has rows.

    Waiting requests start in the order of their arrival. Between two decode steps at most one
    prefill chunk runs, so that a long prompt does not stop the others. All public methods may be
    called from any thread.

    Args:
        model: used by the engine's thread alone from now on.
        max_waiting: requests that may wait for a row before :class:`EngineBusyError` is raised.
    """

    def __init__(self, model: Model, *, max_waiting: int = 256) -> None:
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, not {max_waiting}")
        self.model = model
        self.max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[tuple[RequestHandle, float]] = deque()
        self._rows: Rows | None = None
        self._phase: Phase = "running"
        self._progress_at = time.monotonic()
        # A daemon: a device call that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="megakernel-device", daemon=True)
        self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def submit(self, request: Request) -> RequestHandle:
        """Queues a request and returns at once.

        Raises:
            ContextLengthError: prompt and ``max_tokens`` exceed the model's context.
            TokenIdError: a prompt or stop id is outside the vocabulary.
            EngineBusyError: the queue is full.
            EngineStoppedError: the engine is shutting down.
            EngineFailedError: the engine has lost its state for good.
        """
        self.check(request.prompt, request.max_tokens, request.stop_ids)
        handle = RequestHandle(request, self._leave)
        with self._changed:
            if self._phase == "failed":
                raise EngineFailedError("the engine has failed and must be restarted")
            if self._phase not in ("running", "recovering"):
                raise EngineStoppedError("the server is shutting down")
            if len(self._waiting) >= self.max_waiting + self._free_rows():
                raise EngineBusyError(
                    f"the queue is full ({self.max_waiting} requests are waiting)"
                )
            self._waiting.append((handle, time.monotonic()))
            self._changed.notify_all()
        return handle

    def check(self, prompt: Sequence[int], max_tokens: int, stop_ids: Collection[int] = ()) -> None:
        """Whether a request fits the model; also for one that shall generate nothing.

        Raises:
            ContextLengthError, TokenIdError: see :meth:`submit`.
        """
        info = self.model.info
        wanted = len(prompt) + max_tokens
        if wanted > info.max_context:
            raise ContextLengthError(
                f"this model's context is {info.max_context} tokens, but {wanted} were requested"
                f" ({len(prompt)} in the prompt and {max_tokens} to generate)"
            )
        for token in prompt:
            if not 0 <= token < info.vocab_size:
                raise TokenIdError("prompt", token, info.vocab_size)
        for token in stop_ids:
            if not 0 <= token < info.vocab_size:
                raise TokenIdError("stop", token, info.vocab_size)

    def warm_up(self) -> None:
        """Runs two tokens, so that what is compiled at first use does not cost a real request.

        In a context of two positions one token is all that fits.

        Raises:
            EngineError: the model failed.
        """
        tokens = min(2, self.model.info.max_context - 1)
        self.submit(Request((0,), tokens, ignore_eos=True)).result()

    def status(self) -> EngineStatus:
        """What the engine is doing now."""
        with self._changed:
            running = len(self._rows.sequences) if self._rows is not None else 0
            idle = time.monotonic() - self._progress_at if running else 0.0
            return EngineStatus(self._phase, running, len(self._waiting), idle)

    def shutdown(self, timeout: float = ABORT_SECONDS) -> bool:
        """Takes no more requests and ends the thread.

        Whoever wants requests to finish first waits for their handles. What still runs or waits
        fails with :class:`EngineStoppedError` at once, even if a device call hangs.

        Args:
            timeout: seconds to wait for the device call that is under way.

        Returns:
            True if the thread has ended; False if a device call still holds it.
        """
        with self._changed:
            if self._phase not in ("failed", "stopped"):
                self._phase = "stopping"
                self._changed.notify_all()
        self._give_up()
        self._thread.join(timeout)
        self._give_up()  # a request may have been on its way from the queue to its row
        return not self._thread.is_alive()

    def _give_up(self) -> None:
        error = EngineStoppedError("the server is shutting down")
        self._fail_running(error)
        with self._changed:
            waiting = list(self._waiting)
        for handle, _ in waiting:
            handle.delivery.fail(error)

    def _free_rows(self) -> int:
        """Rows that waiting requests will get at the next turn, and so do not really wait for."""
        used = len(self._rows.sequences) if self._rows is not None else 0
        return self.model.info.max_rows - used

    def _leave(self, handle: RequestHandle) -> None:
        """Takes a cancelled request out of the queue; a running one is seen by its row."""
        with self._changed:
            for entry in self._waiting:
                if entry[0] is handle:
                    self._waiting.remove(entry)
                    waited = Timing(queue=time.monotonic() - entry[1])
                    handle.delivery.finish(Finish("abort", waited))
                    break
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._rows = Rows(self.model)
            while self._wait_for_work():
                self._turn(self._rows)
                self._progress_at = time.monotonic()
        except BaseException as error:  # whatever it is, nobody may be left waiting
            _log.exception("the engine has failed")
            self._close("failed", EngineFailedError(f"the engine has failed: {error}"))
        else:
            self._close("stopped", EngineStoppedError("the server is shutting down"))

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False if the thread shall end."""
        assert self._rows is not None
        with self._changed:
            while self._phase != "stopping":
                if self._rows.sequences:
                    return True
                if self._waiting:
                    self._progress_at = time.monotonic()
                    return True
                self._changed.wait()
        return False

    def _turn(self, rows: Rows) -> None:
        """One chunk and one step; an exception costs the running requests, not the engine."""
        try:
            self._admit(rows)
            rows.drop_ended()
            rows.prefill()
            rows.drop_ended()
            rows.decode()
            rows.drop_ended()
        except Exception as error:
            _log.exception("a device call failed; the state is made anew")
            self._fail_running(RequestFailedError(f"the model failed: {_sentence(error)}"))
            self._recover()

    def _admit(self, rows: Rows) -> None:
        while rows.has_free():
            with self._changed:
                if not self._waiting:
                    return
                handle, submitted = self._waiting.popleft()
            rows.admit(handle, submitted)

    def _recover(self) -> None:
        """The failed call may have consumed the state, so every row starts afresh."""
        with self._changed:
            if self._phase == "running":
                self._phase = "recovering"
        self._rows = None
        self._rows = Rows(self.model)
        with self._changed:
            if self._phase == "recovering":
                self._phase = "running"

    def _fail_running(self, error: EngineError) -> None:
        rows = self._rows
        for sequence in rows.sequences if rows is not None else ():
            sequence.handle.delivery.fail(error)

    def _close(self, phase: Phase, error: EngineError) -> None:
        self._fail_running(error)
        with self._changed:
            self._phase = phase
            self._rows = None
            waiting = list(self._waiting)
            self._waiting.clear()
        for handle, _ in waiting:
            handle.delivery.fail(error)


def _sentence(error: Exception) -> str:
    """The first line of an error, short enough for a client; details are in the log."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
