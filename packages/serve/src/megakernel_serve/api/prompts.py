"""Prompts of a completion request: text or ids, one or several."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from megakernel_serve.api.errors import as_api_error, invalid
from megakernel_serve.api.schema import MOST_CHOICES
from megakernel_serve.api.service import Service

__all__ = ["Prompt", "check_fits", "check_length", "encode", "read_prompts"]

Prompt = str | list[int]


def read_prompts(value: Any) -> list[Prompt]:
    """One entry per prompt.

    Raises:
        ApiError: 400, if the value is none of str, [str], [int], [[int]], or holds nothing.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid("prompt must be a string, a list of strings, or token ids", "prompt")
    if not value:
        raise invalid("prompt is empty", "prompt")
    if _are_ids(value):
        return [value]
    if not all(isinstance(one, str) or (isinstance(one, list) and _are_ids(one)) for one in value):
        raise invalid(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists"
            " of token ids; ids are whole numbers >= 0",
            "prompt",
        )
    if len(value) > MOST_CHOICES:
        raise invalid(
            f"{len(value)} prompts are too many; at most {MOST_CHOICES} are possible", "prompt"
        )
    return value


def encode(service: Service, prompt: Prompt) -> tuple[int, ...]:
    """Ids of a prompt.

    Raises:
        ApiError: 400, if there are none, or if a text is so long that it cannot fit.
    """
    if isinstance(prompt, str):
        check_length(service, prompt, "prompt")
    ids = _ids(service, prompt)
    if not ids:
        raise invalid("the prompt holds no tokens", "prompt")
    return ids


def _ids(service: Service, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(service.loaded.tokenizer.encode(prompt).ids)
    return tuple(prompt)


def check_fits(
    service: Service, ids: Sequence[int], max_tokens: int, stop_ids: Collection[int]
) -> None:
    """Raises a 400 for ids that the model does not know, or more of them than fit."""
    try:
        service.engine.check(ids, max_tokens, stop_ids)
    except ValueError as error:
        raise as_api_error(error) from None


def check_length(service: Service, text: str, param: str) -> None:
    """Raises a 400 for text that exceeds the context however it is cut into tokens.

    Cheaper than cutting it: that takes a tokenizer many seconds for megabytes.
    """
    context = service.engine.model.info.max_context
    if service.length_bound.exceeded(text, context):
        raise invalid(
            f"this model's context is {context} tokens, and the {len(text)} characters of the text"
            f" cannot fit: no token has more than {service.length_bound.longest} bytes",
            param,
            "context_length_exceeded",
        )


def _are_ids(value: list[Any]) -> bool:
    return all(type(one) is int and one >= 0 for one in value)
