"""Prompts of a completion request: text or ids, one or several."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from megakernel_serve.api.errors import invalid
from megakernel_serve.api.schema import MOST_CHOICES

__all__ = ["Prompt", "encode", "read_prompts"]

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


def encode(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Ids of a prompt.

    Raises:
        ApiError: 400, if there are none.
    """
    ids = tuple(tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt)
    if not ids:
        raise invalid("the prompt holds no tokens", "prompt")
    return ids


def _are_ids(value: list[Any]) -> bool:
    return all(type(one) is int and one >= 0 for one in value)
