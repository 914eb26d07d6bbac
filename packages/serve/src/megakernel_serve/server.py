"""Listening: the socket first, so that a port clash shows at once, then loading and serving."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType

import uvicorn

from megakernel_serve.address import Address
from megakernel_serve.api import Service, create_app
from megakernel_serve.loading import LoadedModel

__all__ = ["bind", "serve"]

ABORT_SECONDS = 10.0
"""How long the device may take to end its last call after everything was given up."""


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
    """Tells the service of a stop signal before uvicorn closes the door."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.begin_drain()
        super().handle_exit(sig, frame)


def serve(
    service: Service,
    listener: socket.socket,
    load: Callable[[], LoadedModel],
    drain_seconds: int,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serves until a signal, then lets running requests end for ``drain_seconds``.

    SIGTERM returns, SIGINT raises ``KeyboardInterrupt``, a second SIGINT ends at once.

    Args:
        load: called in a thread; ``/health`` answers 503 until it returns.
        ready: called in that thread once requests are taken.

    Raises:
        Exception: whatever ``load`` raised.
    """
    app = create_app(service)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, timeout_graceful_shutdown=drain_seconds
    )
    server = _Server(config, service)

    def stop() -> None:
        server.should_exit = True

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        service.load_in_background(load, ready, failed=stop)
        yield
        await asyncio.to_thread(service.shutdown, ABORT_SECONDS)

    app.router.lifespan_context = lifespan
    with _sigterm_is_no_error():
        server.run(sockets=[listener])
    if service.load_error is not None:
        raise service.load_error


@contextlib.contextmanager
def _sigterm_is_no_error() -> Iterator[None]:
    """uvicorn raises a signal again after its shutdown; SIGTERM would then kill the process."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
