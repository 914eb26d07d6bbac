"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Tokenizer

from megakernel_serve.api.answering import Endpoint, Event, answer, check_answers
from megakernel_serve.api.envelope import Envelope
from megakernel_serve.api.errors import invalid
from megakernel_serve.api.generation import (
    Choice,
    check_min_tokens,
    engine_requests,
    merged,
    submit_all,
    usage,
)
from megakernel_serve.api.prompts import Prompt, check_fits, encode, read_prompts
from megakernel_serve.api.schema import CompletionRequest
from megakernel_serve.api.service import Service
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
    """One request, ready to run; without choices it only echoes."""

    body: CompletionRequest
    envelope: Envelope
    prompts: Sequence[_Prompt]
    choices: Sequence[TextChoice]

    def _echo(self, index: int) -> str:
        return self.prompts[index // (self.body.n or 1)].echo

    def _usage(self) -> dict[str, Any]:
        return usage(sum(len(prompt.ids) for prompt in self.prompts), self.choices)

    async def collect(self) -> Event:
        """The whole answer."""
        count = len(self.prompts) * (self.body.n or 1)
        texts = [self._echo(index) for index in range(count)]
        async with aclosing(merged(self.choices)) as steps:
            async for step in steps:
                texts[step.choice.index] += "".join(step.pieces)
        if self.choices:
            entries = [_choice(one.index, texts[one.index], one) for one in self.choices]
        else:
            entries = [
                _choice(index, text) | {"finish_reason": "length"}
                for index, text in enumerate(texts)
            ]
        return self.envelope.wrap(entries, usage=self._usage())

    async def stream(self) -> AsyncGenerator[Event, None]:
        """The answer in events."""
        extra: dict[str, Any] = {"usage": None} if self.body.include_usage else {}
        async with aclosing(merged(self.choices)) as steps:
            if self.body.echo:
                for choice in self.choices:
                    text = self._echo(choice.index)
                    yield self.envelope.wrap([_choice(choice.index, text)], **extra)
            async for step in steps:
                if step.pieces or step.ended:
                    ended = step.choice if step.ended else None
                    entry = _choice(step.choice.index, "".join(step.pieces), ended)
                    yield self.envelope.wrap([entry], **extra)
        if self.body.include_usage:
            yield self.envelope.wrap([], usage=self._usage())


async def completions(request: Request) -> Response:
    """Continues one or several prompts."""
    return await answer(request, _ENDPOINT)


def _read(service: Service, body: CompletionRequest) -> list[_Prompt]:
    tokenizer = service.loaded.tokenizer
    prompts = read_prompts(body.prompt)
    check_answers(service, len(prompts), body.n or 1)
    encoded = []
    for prompt in prompts:
        ids = encode(service, prompt)
        check_fits(service, ids, body.max_tokens or 0, body.stop_token_ids or ())
        encoded.append(_Prompt(ids, _echo(tokenizer, prompt) if body.echo else ""))
    return encoded


def _echo(tokenizer: Tokenizer, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt, skip_special_tokens=False)


def _submit(
    service: Service, body: CompletionRequest, envelope: Envelope, prompts: Sequence[_Prompt]
) -> _Job:
    if body.max_tokens == 0:
        _check_echo(body)
        return _Job(body, envelope, prompts, ())
    default = service.config.defaults.get("max_tokens") or DEFAULT_MAX_TOKENS
    requests = [
        request
        for prompt in prompts
        for request in engine_requests(service, body, prompt.ids, body.max_tokens, default)
    ]
    handles = submit_all(service, requests, "prompt")
    tokenizer = service.loaded.tokenizer
    choices = [
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
    return _Job(body, envelope, prompts, choices)


def _check_echo(body: CompletionRequest) -> None:
    """A request for no token at all makes sense as a question for the prompt's own length."""
    if not body.echo:
        raise invalid("max_tokens may be 0 only together with echo", "max_tokens")
    if body.stream:
        raise invalid("a stream must generate at least one token", "max_tokens")
    check_min_tokens(body, 0)


def _choice(index: int, text: str, choice: TextChoice | None = None) -> Event:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": choice.finish_reason if choice else None,
        "stop_reason": choice.stop_reason if choice else None,
    }


_ENDPOINT = Endpoint(
    schema=CompletionRequest,
    id_prefix="cmpl",
    object="text_completion",
    chunk_object="text_completion",
    read=_read,
    submit=_submit,
)
