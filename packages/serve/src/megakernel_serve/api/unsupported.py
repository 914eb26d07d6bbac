"""Fields that other servers know and this one does not: refused by name, never ignored.

A field is only refused if its value would change the answer, since many clients send defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megakernel_serve.api.errors import unsupported

__all__ = ["REFUSED", "REFUSED_PREFIX", "refuse_unsupported"]


def _other_than(*neutral: Any) -> Callable[[Any], bool]:
    def refused(value: Any) -> bool:
        # 0 == False in Python, but logprobs=0 asks for something and logprobs=false does not.
        return not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral
        )

    return refused


def _constrained(value: Any) -> bool:
    return not (isinstance(value, Mapping) and value.get("type") == "text")


REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "logprobs": _other_than(False),
    "top_logprobs": _other_than(0),
    "prompt_logprobs": _other_than(),
    "presence_penalty": _other_than(0),
    "frequency_penalty": _other_than(0),
    "repetition_penalty": _other_than(1),
    "length_penalty": _other_than(1),
    "logit_bias": _other_than({}),
    "logits_processors": _other_than([]),
    "allowed_token_ids": _other_than(),
    "bad_words": _other_than([]),
    "best_of": _other_than(1),
    "use_beam_search": _other_than(False),
    "suffix": _other_than(""),
    "prompt_embeds": _other_than(),
    "truncate_prompt_tokens": _other_than(),
    "skip_special_tokens": _other_than(True),
    "response_format": _constrained,
    "structured_outputs": _other_than(),
    "functions": _other_than([]),
    "function_call": _other_than("none"),
    "add_generation_prompt": _other_than(True),
    "continue_final_message": _other_than(False),
    "chat_template": _other_than(),
    "documents": _other_than([]),
    "thinking_token_budget": _other_than(),
}
"""Per field, whether a value of it asks for something; null never does."""

REFUSED_PREFIX = "guided_"
"""Fields of constrained decoding; each with any value but null."""


def refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Raises a 400 for the first field that asks for something that does not exist here."""
    for name, value in values.items():
        refused = _other_than() if name.startswith(REFUSED_PREFIX) else REFUSED.get(name)
        if value is not None and refused is not None and refused(value):
            raise unsupported(name)
