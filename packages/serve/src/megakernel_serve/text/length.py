"""A bound on how much text fits into some tokens, without cutting it into tokens."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

__all__ = ["LengthBound"]


@dataclass(frozen=True)
class LengthBound:
    """What a tokenizer can at most put into one token.

    Args:
        longest: bytes of the longest token; None if there is no bound, since some text vanishes.
        composes: whether the tokenizer composes code points (NFC) first, which shortens text.
    """

    longest: int | None
    composes: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> LengthBound:
        """The bound of a tokenizer; only byte-level ones that keep every byte have one."""
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder().values()
        normalizer = _state(tokenizer.normalizer).get("type")
        if (
            normalizer not in (None, "NFC")
            or not _keeps_bytes(_state(tokenizer.pre_tokenizer))
            or any(symbol not in vocabulary for symbol in alphabet)
            or any(token.lstrip or token.rstrip for token in added)
            or tokenizer.truncation is not None
        ):
            return cls(None)
        lengths = [len(token) for token in vocabulary]  # one symbol of the alphabet is one byte
        lengths += [len(token.content.encode()) for token in added]
        return cls(max(lengths), composes=normalizer == "NFC")

    def exceeded(self, text: str, tokens: int) -> bool:
        """True if the text cannot fit into this many tokens, however it is cut."""
        if self.longest is None or len(text) * 4 <= (most := self.longest * tokens):
            return False  # no code point has more than 4 bytes
        if self.composes and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return len(text.encode()) > most


def _state(part: Any) -> dict[str, Any]:
    """How ``tokenizer.json`` describes a part of a tokenizer; empty if there is none."""
    return dict(json.loads(part.__getstate__())) if part is not None else {}


def _keeps_bytes(state: dict[str, Any]) -> bool:
    parts = state.get("pretokenizers", [state])
    kinds = [part.get("type") for part in parts]
    removes = any(part.get("behavior") == "Removed" for part in parts)
    return kinds[-1] == "ByteLevel" and set(kinds) <= {"Split", "ByteLevel"} and not removes
