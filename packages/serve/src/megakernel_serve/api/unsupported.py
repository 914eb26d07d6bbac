"""Fields that other servers know and this one does not: refused by name, never ignored.

A field is only refused if its value would change the answer, since many clients send defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megakernel_serve.api.errors import unsupported

__all__ = ["refuse_unsupported"]


def _other_than(*neutral: Any) -> Callable[[Any], bool]:
    def refused(value: Any) -> bool:
        # 0 == False in Python, but logprobs=0 asks for something and logprobs=false does not.
        return not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral
        )

    return refused


def _constrained(value: Any) -> bool:
    return not (isinstance(value, Mapping) and value.get("type") == "text")


_REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "logprobs": _other_than(False),
    "top_logprobs": _other_than(0),
    "prompt_logprobs": _other_than(),
    "presence_penalty": _other_than(0),
    "frequency_penalty": _other_than(0),
    "repetition_penalty": _other_than(1),
    "logit_bias": _other_than({}),
    "best_of": _other_than(1),
    "suffix": _other_than(""),
    "response_format": _constrained,
    "functions": _other_than([]),
    "function_call": _other_than("none"),
    "continue_final_message": _other_than(False),
    "thinking_token_budget": _other_than(),
    "guided_json": _other_than(),
    "guided_regex": _other_than(),
    "guided_grammar": _other_than(),
    "structured_outputs": _other_than(),
}


def refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Raises a 400 for the first field that asks for something that does not exist here."""
    for name, refused in _REFUSED.items():
        value = values.get(name)
        if value is not None and refused(value):
            raise unsupported(name)
