"""Token ids to text, one id at a time, in whole code points."""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

__all__ = ["Detokenizer"]


class Detokenizer:
    """Decodes one sequence incrementally. Special tokens give no text.

    A token may hold part of a code point: its text waits for the rest, and becomes U+FFFD only if
    the sequence ends first. Ids that the tokenizer does not know (padding rows of an embedding
    table can be sampled) give no text either.

    Args:
        keep: special tokens that shall give their text all the same.
    """

    def __init__(self, tokenizer: Tokenizer, keep: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._silent = frozenset(
            token for token, entry in added.items() if entry.special and entry.content not in keep
        )
        self._stream = DecodeStream(skip_special_tokens=False)
        self._incomplete: list[int] = []

    def push(self, token: int) -> str:
        """The text that this id completes; may be empty."""
        # Silent ids would grow the stream's window without ever completing anything.
        if token in self._silent or self._tokenizer.id_to_token(token) is None:
            return ""
        self._incomplete.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # the binding raises bare Exception: "Invalid prefix encountered"
            return self.finish()
        if text is None:
            return ""
        self._incomplete.clear()
        return text

    def finish(self) -> str:
        """The text of ids that still wait; the detokenizer can then be used afresh."""
        waiting, self._incomplete = self._incomplete, []
        self._stream = DecodeStream(skip_special_tokens=False)
        return self._tokenizer.decode(waiting, skip_special_tokens=False) if waiting else ""
