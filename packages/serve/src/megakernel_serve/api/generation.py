"""Running the choices of one HTTP request: parameters, submission, events, cancellation."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from kda_mla_kernels.sampling import SamplingParams

from megakernel_serve.api.errors import ApiError, as_api_error, invalid
from megakernel_serve.api.schema import GenerationFields
from megakernel_serve.api.service import Service
from megakernel_serve.engine import EngineError, Finish, Request, RequestHandle
from megakernel_serve.text import ChatAnswer, TextAnswer

__all__ = [
    "Choice",
    "cancel_all",
    "check_min_tokens",
    "engine_requests",
    "merged",
    "submit_all",
    "usage",
]

SomeAnswer = TypeVar("SomeAnswer", TextAnswer, ChatAnswer)


@dataclass(frozen=True)
class Step:
    """What one choice gained.

    ``ended`` belongs to this step, while the choice itself may be further already: it runs ahead
    of a reader that is slow.
    """

    choice: Choice[Any]
    pieces: list[Any]
    ended: bool


@dataclass(eq=False)
class Choice(Generic[SomeAnswer]):
    """One of the answers that a request asked for."""

    index: int
    handle: RequestHandle
    answer: SomeAnswer
    finish: Finish | None = None

    @property
    def finish_reason(self) -> str | None:
        """``stop`` or ``length``; None while it runs."""
        if self.answer.matched is not None:
            return "stop"
        return self.finish.reason if self.finish is not None else None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the end id."""
        if self.answer.matched is not None:
            return self.answer.matched
        return self.finish.stop_id if self.finish is not None else None

    @property
    def completion_tokens(self) -> int:
        """Tokens that count: up to the stop, the end id included."""
        ended_by_id = self.answer.matched is None and self.stop_reason is not None
        return self.answer.tokens + ended_by_id

    async def steps(self) -> AsyncIterator[Step]:
        """What each step adds; an empty list means only that something moved."""
        async for delta in self.handle:
            pieces: list[Any] = list(self.answer.push(delta.token_ids))
            if delta.finish is not None and self.answer.matched is None:
                self.finish = delta.finish
                pieces += self.answer.finish(delta.finish.reason)
            matched = self.answer.matched is not None
            if matched:
                self.handle.cancel()
            yield Step(self, pieces, ended=matched or delta.finish is not None)
            if matched:
                return


def engine_requests(
    service: Service,
    body: GenerationFields,
    prompt: tuple[int, ...],
    max_tokens: int | None,
    default: int | None,
) -> list[Request]:
    """The engine's view of a prompt's ``n`` choices.

    A given seed counts up from choice to choice, so that they differ and can be repeated.

    Args:
        max_tokens: what the client asked for. default: what else, clipped to the room that the
            context leaves; None takes all of it.

    Raises:
        ApiError: 400.
    """
    room = service.engine.model.info.max_context - len(prompt)
    if max_tokens is None:
        # With no room at all the engine is asked for one token, to refuse in its own words.
        max_tokens = max(1, room if default is None else min(default, room))
    check_min_tokens(body, max_tokens)
    request = Request(
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=_sampling(service, body),
        stop_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
    )
    return [
        replace(request, sampling=replace(request.sampling, seed=request.sampling.seed + choice))
        for choice in range(body.n or 1)
    ]


def check_min_tokens(body: GenerationFields, max_tokens: int) -> None:
    """Raises a 400 for more tokens at least than at most."""
    if (body.min_tokens or 0) > max_tokens:
        raise invalid(
            f"min_tokens={body.min_tokens} is above the {max_tokens} tokens to generate",
            "min_tokens",
        )


def submit_all(service: Service, requests: Sequence[Request], param: str) -> list[RequestHandle]:
    """Submits all or none. ``param`` names the field that the prompts came from.

    Raises:
        ApiError: 400, 500 or 503.
    """
    handles: list[RequestHandle] = []
    try:
        for request in requests:
            handles.append(service.engine.submit(request))
    except (ValueError, EngineError) as error:
        for handle in handles:
            handle.cancel()
        raise as_api_error(error, param) from None
    return handles


def cancel_all(choices: Sequence[Choice[Any]]) -> None:
    """Gives up what still runs; does nothing to choices that have ended."""
    for choice in choices:
        choice.handle.cancel()


async def merged(choices: Sequence[Choice[Any]]) -> AsyncGenerator[Step, None]:
    """The steps of all choices as they come.

    Leaving the iterator early, or cancelling it, gives all choices up.

    Raises:
        EngineError: one of them failed.
    """
    # Bounded: a slow client holds the pumps back, and deltas pile up (merged) in the handles.
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=len(choices))

    async def pump(choice: Choice[Any]) -> None:
        try:
            async for step in choice.steps():
                await queue.put(step)
            await queue.put(None)
        except Exception as error:  # raised again by the reader below
            await queue.put(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        cancel_all(choices)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage(prompt_tokens: int, choices: Sequence[Choice[Any]]) -> dict[str, Any]:
    """The usage object; ``prompt_tokens`` counts each prompt once."""
    completion = sum(choice.completion_tokens for choice in choices)
    reasoning = sum(getattr(choice.answer, "reasoning_tokens", 0) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _sampling(service: Service, body: GenerationFields) -> SamplingParams:
    """The request's values, else the server's defaults, else the checkpoint's."""
    defaults, generation = service.config.defaults, service.engine.model.generation

    def pick(name: str) -> Any:
        given = getattr(body, name)
        if given is None:
            given = defaults.get(name)
        return getattr(generation, name) if given is None else given

    seed = defaults.get("seed") if body.seed is None else body.seed
    try:
        return SamplingParams(
            temperature=pick("temperature"),
            top_k=max(0, pick("top_k")),
            top_p=pick("top_p"),
            min_p=pick("min_p"),
            seed=secrets.randbits(64) if seed is None else seed,
        )
    except ValueError as error:  # the request's values and the flags were checked already
        raise ApiError(
            500, f"the checkpoint's generation defaults are wrong: {error}", code="bad_defaults"
        ) from None
