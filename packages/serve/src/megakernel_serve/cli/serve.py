"""``megakernel serve``: the HTTP server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megakernel_serve.address import Address
from megakernel_serve.stop_signals import StopSignals

if TYPE_CHECKING:
    from megakernel_serve.api import ServiceConfig
    from megakernel_serve.cli.main import Invocation
    from megakernel_serve.settings import Settings

__all__ = ["run", "run_at"]

DEFAULT_ROWS = 8


def run(invocation: Invocation) -> int:
    """Runs the command on ``--host`` and ``--port``."""
    return run_at(invocation, Address(invocation.settings.host, invocation.settings.port))


def run_at(invocation: Invocation, address: Address) -> int:
    """Binds, loads in the background, serves until a signal."""
    with StopSignals() as stops:
        _serve(invocation, address, stops)
        stops.raise_interrupt()
    return 0


def _serve(invocation: Invocation, address: Address, stops: StopSignals) -> None:
    from megakernel_serve.api import Service
    from megakernel_serve.cli.terminal import status
    from megakernel_serve.loading import choose, load
    from megakernel_serve.server import bind, serve

    settings = invocation.settings
    listener, real = bind(address)
    choice = choose(invocation)
    if stops.received:
        listener.close()
        return
    service = Service(_service_config(settings))
    status.print(f"Listening on {real}, loading {choice.checkpoint}", soft_wrap=True)

    def ready() -> None:
        status.print(f"Ready: {', '.join(service.model_names)} at {real}/v1", soft_wrap=True)

    def draining(requests: int) -> None:
        answers = "1 answer" if requests == 1 else f"{requests} answers"
        limit = f"for at most {settings.drain_seconds} s"
        status.print(f"Finishing {answers} {limit}; a second signal gives up", soft_wrap=True)

    loading = partial(load, choice, settings, rows=DEFAULT_ROWS, progress=status.is_terminal)
    serve(service, listener, loading, settings.drain_seconds, ready, stops, draining)


def _service_config(settings: Settings) -> ServiceConfig:
    from megakernel_serve.api import ServiceConfig

    names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
    return ServiceConfig(
        model_names=settings.served_model_name,
        api_keys=settings.api_key,
        max_waiting=settings.queue,
        defaults={name: getattr(settings, name) for name in names},
        thinking=settings.thinking,
        effort=settings.effort,
        cors_origins=settings.cors_origins,
        max_body_bytes=settings.max_body_mb << 20,
    )
