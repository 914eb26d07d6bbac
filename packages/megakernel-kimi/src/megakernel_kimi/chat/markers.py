"""The control tokens that the chat format is made of."""

from __future__ import annotations

from dataclasses import dataclass

from megakernel_kimi.tokenizer import KimiTokenizer

__all__ = ["Markers"]


@dataclass(frozen=True)
class Markers:
    """Token ids."""

    open: int
    close: int
    sep: int
    end_of_message: int
    end_of_text: int

    @classmethod
    def of(cls, tokenizer: KimiTokenizer) -> Markers:
        """Looks the names up.

        Raises:
            CheckpointError: the tokenizer lacks one of them.
        """
        return cls(
            open=tokenizer.special_id("<|open|>"),
            close=tokenizer.special_id("<|close|>"),
            sep=tokenizer.special_id("<|sep|>"),
            end_of_message=tokenizer.special_id("<|end_of_msg|>"),
            end_of_text=tokenizer.special_id("[EOS]"),
        )

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        return frozenset({self.end_of_message, self.end_of_text})
