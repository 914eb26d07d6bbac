"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from kda_mla_kernels.chat import ChatFormat, Rendered
from starlette.requests import Request
from starlette.responses import Response

from megakernel_serve.api.answering import Endpoint, Event, answer, check_answers
from megakernel_serve.api.conversation import may_call, render
from megakernel_serve.api.envelope import Envelope
from megakernel_serve.api.generation import Choice, engine_requests, merged, submit_all, usage
from megakernel_serve.api.reply import CallPolicy, Reply
from megakernel_serve.api.schema import ChatRequest, named_tool
from megakernel_serve.api.service import Service
from megakernel_serve.text import ChatAnswer

__all__ = ["chat_completions"]


@dataclass(frozen=True)
class _Job:
    """One request, ready to run."""

    body: ChatRequest
    envelope: Envelope
    prompt_tokens: int
    choices: Sequence[Choice[ChatAnswer]]

    def _replies(self) -> list[Reply]:
        policy = CallPolicy(
            allowed=may_call(self.body),
            parallel=self.body.parallel_tool_calls is not False,
            named=named_tool(self.body.tool_choice) is not None,
        )
        return [Reply(policy) for _ in self.choices]

    def _usage(self) -> dict[str, Any]:
        return usage(self.prompt_tokens, self.choices)

    async def collect(self) -> Event:
        """The whole answer."""
        replies = self._replies()
        async with aclosing(merged(self.choices)) as steps:
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
            for choice in self.choices
        ]
        return self.envelope.wrap(entries, usage=self._usage())

    async def stream(self) -> AsyncGenerator[Event, None]:
        """The answer in events."""
        replies = self._replies()
        extra: dict[str, Any] = {"usage": None} if self.body.include_usage else {}

        def chunk(index: int, delta: Event, **end: Any) -> Event:
            entry = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | end
            return self.envelope.wrap([entry], **extra)

        async with aclosing(merged(self.choices)) as steps:
            for choice in self.choices:
                yield chunk(choice.index, {"role": "assistant", "content": ""})
            async for step in steps:
                choice, reply = step.choice, replies[step.choice.index]
                for delta in reply.add(step.pieces):
                    yield chunk(choice.index, delta)
                if step.ended:
                    reason = reply.finish_reason(choice.finish_reason)
                    yield chunk(
                        choice.index, {}, finish_reason=reason, stop_reason=choice.stop_reason
                    )
        if self.body.include_usage:
            yield self.envelope.wrap([], usage=self._usage())


async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    return await answer(request, _ENDPOINT)


def _read(service: Service, body: ChatRequest) -> tuple[ChatFormat, Rendered]:
    check_answers(service, 1, body.n or 1)
    return render(service, body, fits=True)


def _submit(
    service: Service, body: ChatRequest, envelope: Envelope, prompt: tuple[ChatFormat, Rendered]
) -> _Job:
    chat_format, rendered = prompt
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
    choices = [
        Choice(index, handle, one) for index, (handle, one) in enumerate(zip(handles, answers))
    ]
    return _Job(body, envelope, len(rendered.token_ids), choices)


_ENDPOINT = Endpoint(
    schema=ChatRequest,
    id_prefix="chatcmpl",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    read=_read,
    submit=_submit,
)
