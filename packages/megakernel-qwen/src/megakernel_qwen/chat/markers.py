"""The control tokens that carry the format, by meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from megakernel_qwen.tokenizer import QwenTokenizer

__all__ = ["Markers"]

_TEXTS = {
    "turn_start": "<|im_start|>",
    "turn_end": "<|im_end|>",
    "end_of_text": "<|endoftext|>",
    "think": "<think>",
    "think_end": "</think>",
    "tool_call": "<tool_call>",
    "tool_call_end": "</tool_call>",
    "tool_response": "<tool_response>",
    "tool_response_end": "</tool_response>",
}


@dataclass(frozen=True)
class Markers:
    """Token ids of the control tokens, as the checkpoint's tokenizer numbers them."""

    turn_start: int
    turn_end: int
    end_of_text: int
    think: int
    think_end: int
    tool_call: int
    tool_call_end: int
    tool_response: int
    tool_response_end: int

    @classmethod
    def of(cls, tokenizer: QwenTokenizer) -> Markers:
        """Looks the ids up by token text.

        Raises:
            CheckpointError: the tokenizer lacks one of them.
        """
        return cls(**{name: tokenizer.control_id(text) for name, text in _TEXTS.items()})

    def by_text(self) -> Mapping[str, int]:
        """Ids by token text."""
        return {_TEXTS[field.name]: getattr(self, field.name) for field in fields(self)}
