"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from kda_mla_kernels.chat import ChatFormat, Rendered
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megakernel_serve.api.body import read_json, validate
from megakernel_serve.api.conversation import may_call, render
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
from megakernel_serve.api.reply import CallPolicy, Reply
from megakernel_serve.api.schema import ChatRequest, named_tool
from megakernel_serve.api.service import Service
from megakernel_serve.api.sse import EventStream, unless_client_leaves
from megakernel_serve.api.unsupported import refuse_unsupported
from megakernel_serve.text import ChatAnswer

__all__ = ["chat_completions"]

Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class _Job:
    """One request, ready to run."""

    body: ChatRequest
    envelope: Envelope
    prompt_tokens: int
    choices: Sequence[Choice[ChatAnswer]]

    def replies(self) -> list[Reply]:
        policy = CallPolicy(
            allowed=may_call(self.body),
            parallel=self.body.parallel_tool_calls is not False,
            named=named_tool(self.body.tool_choice) is not None,
        )
        return [Reply(policy) for _ in self.choices]

    def usage(self) -> dict[str, Any]:
        return usage(self.prompt_tokens, self.choices)


async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    service: Service = request.app.state.service
    values = await read_json(request, service.config.max_body_bytes)
    refuse_unsupported(values)
    body = validate(values, ChatRequest)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = Envelope.new("chatcmpl", kind, service.check_model(body.model))
    if (body.n or 1) > service.config.max_waiting:
        raise invalid("n is more answers than this server can queue", "n")
    chat_format, rendered = await asyncio.to_thread(render, service, body)
    choices = _submit(service, body, chat_format, rendered)
    job = _Job(body, envelope, len(rendered.token_ids), choices)
    if body.stream:
        seconds = service.config.keepalive_seconds
        return EventStream(_stream(job), partial(cancel_all, job.choices), seconds)
    try:
        return JSONResponse(await unless_client_leaves(request.receive, _collect(job)))
    finally:
        cancel_all(job.choices)


def _submit(
    service: Service, body: ChatRequest, chat_format: ChatFormat, rendered: Rendered
) -> list[Choice[ChatAnswer]]:
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    default = service.config.defaults.get("max_tokens")
    requests = engine_requests(service, body, rendered.token_ids, asked, default)
    answers = [
        ChatAnswer(
            chat_format.parser(rendered),
            body.stop,
            min_tokens=body.min_tokens or 0,
            include_stop=bool(body.include_stop_str_in_output),
        )
        for _ in requests
    ]
    handles = submit_all(service, requests, "messages")
    return [
        Choice(index, handle, answer)
        for index, (handle, answer) in enumerate(zip(handles, answers))
    ]


async def _collect(job: _Job) -> Event:
    replies = job.replies()
    async with aclosing(merged(job.choices)) as steps:
        async for step in steps:
            replies[step.choice.index].add(step.pieces)
    entries = [
        {
            "index": choice.index,
            "message": replies[choice.index].message(),
            "logprobs": None,
            "finish_reason": replies[choice.index].finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }
        for choice in job.choices
    ]
    return job.envelope.wrap(entries, usage=job.usage())


async def _stream(job: _Job) -> AsyncGenerator[Event, None]:
    replies = job.replies()
    extra: dict[str, Any] = {"usage": None} if job.body.include_usage else {}

    def chunk(index: int, delta: Event, **end: Any) -> Event:
        entry = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | end
        return job.envelope.wrap([entry], **extra)

    async with aclosing(merged(job.choices)) as steps:
        for choice in job.choices:
            yield chunk(choice.index, {"role": "assistant", "content": ""})
        async for step in steps:
            choice, reply = step.choice, replies[step.choice.index]
            for delta in reply.add(step.pieces):
                yield chunk(choice.index, delta)
            if step.ended:
                reason = reply.finish_reason(choice.finish_reason)
                yield chunk(choice.index, {}, finish_reason=reason, stop_reason=choice.stop_reason)
    if job.body.include_usage:
        yield job.envelope.wrap([], usage=job.usage())
