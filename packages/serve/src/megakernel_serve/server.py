"""Listening: the socket first, so that a port clash shows at once, then loading and serving."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megakernel_serve.address import Address
from megakernel_serve.api import Service, create_app
from megakernel_serve.api.errors import unavailable
from megakernel_serve.loading import LoadedModel
from megakernel_serve.stop_signals import StopSignals

__all__ = ["bind", "serve"]

ABORT_SECONDS = 5.0
"""How long the device may take to end its last call after everything was given up."""

FAREWELL_SECONDS = 3
"""How long clients may take to read the end of an answer that was given up."""


def bind(address: Address) -> tuple[socket.socket, Address]:
    """A listening socket, and its address with the real port.

    Raises:
        OSError: the address is unknown or taken; the message says which.
    """
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}") from None
    return listener, Address(address.host, listener.getsockname()[1])


class _Server(uvicorn.Server):
    """Drains with the door open: until the last answer, health checks and refusals go on."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        stops: StopSignals,
        drain_seconds: float,
        draining: Callable[[int], None],
    ) -> None:
        super().__init__(config)
        self._service, self._stops, self._drain_seconds = service, stops, drain_seconds
        self._draining: Callable[[int], None] | None = draining

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stops.note(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        if self._stops.first_at is None:
            return False
        self._service.begin_drain()
        if self._draining and self.server_state.tasks:
            self._draining(len(self.server_state.tasks))
        self._draining = None  # said once
        late = time.monotonic() - self._stops.first_at >= self._drain_seconds
        return late or len(self._stops.received) > 1 or not self.server_state.tasks

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Before uvicorn cancels anything, so that every open answer ends in its own words.
        await asyncio.to_thread(self._service.shutdown, ABORT_SECONDS)
        await super().shutdown(sockets)


class _CancelledQuietly:
    """ASGI: a request that uvicorn cancels, its client being too slow, gets a 503 if it can."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not started:
                refusal = unavailable("the server is shutting down", 5).response()
                await refusal(scope, receive, send)


def serve(
    service: Service,
    listener: socket.socket,
    load: Callable[[], LoadedModel],
    drain_seconds: float,
    ready: Callable[[], None] = lambda: None,
    stops: StopSignals | None = None,
    draining: Callable[[int], None] = lambda requests: None,
) -> None:
    """Serves until a signal, then lets running requests end for ``drain_seconds``.

    Meanwhile new requests get a 503. What still runs after the drain, or at a second signal, is
    given up: it ends with a 503, or with an error event if it streams.

    Args:
        load: called in a thread; ``/health`` answers 503 until it returns.
        ready: called in that thread once requests are taken.
        stops: signals noted so far; those that come now are added.
        draining: called once with the number of requests that a signal finds running.

    Raises:
        Exception: whatever ``load`` raised.
    """
    app = create_app(service)

    def stop() -> None:
        server.should_exit = True

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        service.load_in_background(load, ready, failed=stop)
        yield

    app.router.lifespan_context = lifespan
    config = uvicorn.Config(
        _CancelledQuietly(app),
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=FAREWELL_SECONDS,
    )
    server = _Server(config, service, stops or StopSignals(), drain_seconds, draining)
    server.run(sockets=[listener])
    if service.load_error is not None:
        raise service.load_error
