"""Server-sent events, and noticing that the client has left.

Some servers tell the application of a disconnect only at its next send, which may be a long
prefill away, and no server cancels a handler that streams nothing. So both kinds of answers run
next to a task that waits for the disconnect message.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megakernel_serve.api.errors import as_api_error

__all__ = ["ClientLeftError", "EventStream", "unless_client_leaves"]

Result = TypeVar("Result")

KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


class EventStream(Response):
    """Sends each dictionary as one event, then ``[DONE]``; an exception becomes an error event.

    Args:
        events: closed when the client leaves.
        release: called at the end in any case, even if no event was ever asked for.
        keepalive_seconds: silence after which a comment is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        release: Callable[[], None],
        keepalive_seconds: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._release = events, release
        self._keepalive_seconds = keepalive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            await unless_client_leaves(receive, self._send_all(send))
        except (ClientLeftError, OSError):
            pass  # some servers raise OSError from a send to a client that has left
        finally:
            self._release()
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        last = False
        while not last:
            step = asyncio.ensure_future(anext(self._events, None))
            try:
                while not (await asyncio.wait({step}, timeout=self._keepalive_seconds))[0]:
                    await write(KEEPALIVE)
                event, last = _outcome(step)
            finally:
                await _cancel(step)
            if event is not None:
                await write(_encode(event))
        await write(DONE, more=False)


def _outcome(step: asyncio.Future[dict[str, Any] | None]) -> tuple[dict[str, Any] | None, bool]:
    """The event of a finished step, and whether it is the last one."""
    try:
        event = step.result()
    except Exception as error:  # the status is sent; an event is all that is left
        return as_api_error(error).body(), True
    return event, event is None


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled if the client goes away first.

    Raises:
        ClientLeftError: it did.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        await _cancel(working, leaving)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _encode(event: dict[str, Any]) -> bytes:
    text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
