"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tokenizers import Tokenizer

from megakernel_serve.api.body import read_json, validate
from megakernel_serve.api.envelope import Envelope
from megakernel_serve.api.errors import invalid
from megakernel_serve.api.generation import (
    Choice,
    cancel_all,
    engine_requests,
    merged,
    submit_all,
    usage,
)
from megakernel_serve.api.prompts import Prompt, encode, read_prompts
from megakernel_serve.api.schema import MOST_CHOICES, CompletionRequest
from megakernel_serve.api.service import Service
from megakernel_serve.api.sse import EventStream, unless_client_leaves
from megakernel_serve.api.unsupported import refuse_unsupported
from megakernel_serve.text import TextAnswer

__all__ = ["completions"]

TextChoice: TypeAlias = Choice[TextAnswer]

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class _Prompt:
    ids: tuple[int, ...]
    echo: str


@dataclass(frozen=True)
class _Job:
    """One request, ready to run."""

    body: CompletionRequest
    envelope: Envelope
    prompts: Sequence[_Prompt]
    choices: Sequence[TextChoice]

    def echo(self, index: int) -> str:
        return self.prompts[index // (self.body.n or 1)].echo

    def usage(self) -> dict[str, Any]:
        return usage(sum(len(prompt.ids) for prompt in self.prompts), self.choices)


async def completions(request: Request) -> Response:
    """Continues one or several prompts."""
    service: Service = request.app.state.service
    values = await read_json(request, service.config.max_body_bytes)
    refuse_unsupported(values)
    body = validate(values, CompletionRequest)
    envelope = Envelope.new("cmpl", "text_completion", service.check_model(body.model))
    prompts = await asyncio.to_thread(_encode_all, service, body)
    if body.max_tokens == 0:
        return _echo_only(body, envelope, prompts)
    job = _Job(body, envelope, prompts, _submit(service, body, prompts))
    if body.stream:
        seconds = service.config.keepalive_seconds
        return EventStream(_stream(job), partial(cancel_all, job.choices), seconds)
    try:
        return JSONResponse(await unless_client_leaves(request.receive, _collect(job)))
    finally:
        cancel_all(job.choices)


def _encode_all(service: Service, body: CompletionRequest) -> list[_Prompt]:
    tokenizer = service.loaded.tokenizer
    prompts = read_prompts(body.prompt)
    if len(prompts) * (body.n or 1) > min(MOST_CHOICES, service.config.max_waiting):
        raise invalid("the prompts times n are more answers than this server can queue", "n")
    encoded = []
    for prompt in prompts:
        ids = encode(tokenizer, prompt)
        encoded.append(_Prompt(ids, _echo(tokenizer, prompt) if body.echo else ""))
    return encoded


def _echo(tokenizer: Tokenizer, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt, skip_special_tokens=False)


def _submit(
    service: Service, body: CompletionRequest, prompts: Sequence[_Prompt]
) -> list[TextChoice]:
    default = service.config.defaults.get("max_tokens") or DEFAULT_MAX_TOKENS
    requests = [
        request
        for prompt in prompts
        for request in engine_requests(service, body, prompt.ids, body.max_tokens, default)
    ]
    handles = submit_all(service, requests, "prompt")
    tokenizer = service.loaded.tokenizer
    return [
        Choice(
            index,
            handle,
            TextAnswer(
                tokenizer,
                body.stop,
                min_tokens=body.min_tokens or 0,
                include_stop=bool(body.include_stop_str_in_output),
            ),
        )
        for index, handle in enumerate(handles)
    ]


def _choice(index: int, text: str, choice: TextChoice | None = None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": choice.finish_reason if choice else None,
        "stop_reason": choice.stop_reason if choice else None,
    }


async def _collect(job: _Job) -> dict[str, Any]:
    texts = [job.echo(choice.index) for choice in job.choices]
    async with aclosing(merged(job.choices)) as steps:
        async for step in steps:
            texts[step.choice.index] += "".join(step.pieces)
    entries = [_choice(one.index, texts[one.index], one) for one in job.choices]
    return job.envelope.wrap(entries, usage=job.usage())


async def _stream(job: _Job) -> AsyncGenerator[dict[str, Any], None]:
    extra: dict[str, Any] = {"usage": None} if job.body.include_usage else {}
    async with aclosing(merged(job.choices)) as steps:
        if job.body.echo:
            for choice in job.choices:
                text = job.echo(choice.index)
                yield job.envelope.wrap([_choice(choice.index, text)], **extra)
        async for step in steps:
            if step.pieces or step.ended:
                ended = step.choice if step.ended else None
                entry = _choice(step.choice.index, "".join(step.pieces), ended)
                yield job.envelope.wrap([entry], **extra)
    if job.body.include_usage:
        yield job.envelope.wrap([], usage=job.usage())


def _echo_only(body: CompletionRequest, envelope: Envelope, prompts: Sequence[_Prompt]) -> Response:
    if not body.echo:
        raise invalid("max_tokens may be 0 only together with echo", "max_tokens")
    if body.stream:
        raise invalid("a stream must generate at least one token", "max_tokens")
    count = body.n or 1
    entries = [
        _choice(index, prompts[index // count].echo) | {"finish_reason": "length"}
        for index in range(len(prompts) * count)
    ]
    spent = usage(sum(len(prompt.ids) for prompt in prompts), ())
    return JSONResponse(envelope.wrap(entries, usage=spent))
