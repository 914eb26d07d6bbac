"""The way of a generating request, the same for every endpoint: read, check, run, answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megakernel_serve.api.body import read_json, validate
from megakernel_serve.api.envelope import Envelope
from megakernel_serve.api.errors import invalid
from megakernel_serve.api.generation import Choice, cancel_all
from megakernel_serve.api.schema import MOST_CHOICES, GenerationFields
from megakernel_serve.api.service import Service
from megakernel_serve.api.sse import EventStream, unless_client_leaves
from megakernel_serve.api.unsupported import refuse_unsupported

__all__ = ["Endpoint", "Event", "Job", "answer", "check_answers"]

Event: TypeAlias = dict[str, Any]
Body = TypeVar("Body", bound=GenerationFields)
Prompt = TypeVar("Prompt")


class Job(Protocol):
    """One request whose choices have been submitted."""

    @property
    def choices(self) -> Sequence[Choice[Any]]:
        """What runs; given up when the client leaves."""
        ...

    async def collect(self) -> Event:
        """The whole answer."""
        ...

    def stream(self) -> AsyncGenerator[Event, None]:
        """The answer in events."""
        ...


@dataclass(frozen=True)
class Endpoint(Generic[Body, Prompt]):
    """What is particular to one kind of generating request."""

    schema: type[Body]
    id_prefix: str
    object: str
    """``object`` of a whole answer."""
    chunk_object: str
    """``object`` of an event."""
    read: Callable[[Service, Body], Prompt]
    """Brings prompts to token ids; called in a thread, since long ones take time."""
    submit: Callable[[Service, Body, Envelope, Prompt], Job]
    """Starts the choices; called in the event loop, so that a cancelled request leaves none."""


async def answer(request: Request, endpoint: Endpoint[Any, Any]) -> Response:
    """Answers a request, as a stream if it asks for one.

    Raises:
        ApiError: the request cannot be taken. Errors while a stream runs are events.
    """
    service: Service = request.app.state.service
    values = await read_json(request, service.config.max_body_bytes)
    refuse_unsupported(values)
    body = validate(values, endpoint.schema)
    kind = endpoint.chunk_object if body.stream else endpoint.object
    envelope = Envelope.new(endpoint.id_prefix, kind, service.check_model(body.model))
    prompt = await asyncio.to_thread(endpoint.read, service, body)
    job = endpoint.submit(service, body, envelope, prompt)
    if body.stream:
        seconds = service.config.keepalive_seconds
        return EventStream(job.stream(), partial(cancel_all, job.choices), seconds)
    try:
        return JSONResponse(await unless_client_leaves(request.receive, job.collect()))
    finally:
        cancel_all(job.choices)


def check_answers(service: Service, prompts: int, n: int) -> None:
    """Raises a 400 for more answers than one request may ask for, or than the queue can hold."""
    most = min(MOST_CHOICES, service.config.max_waiting)
    if prompts * n > most:
        count = f"{prompts} prompts times n={n} are" if prompts > 1 else f"n={n} asks for"
        raise invalid(f"{count} {prompts * n} answers; at most {most} are possible", "n")
