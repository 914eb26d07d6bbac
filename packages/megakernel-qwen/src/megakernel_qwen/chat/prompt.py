"""Builds a prompt from fixed texts, in which markers count, and given texts, in which none does."""

from __future__ import annotations

import re

from kda_mla_kernels.chat import ChatError

from megakernel_qwen.chat.markers import Markers
from megakernel_qwen.tokenizer import QwenTokenizer

__all__ = ["PromptBuilder"]


class PromptBuilder:
    """Collects the pieces of a prompt and encodes them.

    Text is joined up to the next control token before it is encoded, because byte pairs may merge
    across the border of two pieces: the ids are those of the whole rendered text.
    """

    def __init__(self, tokenizer: QwenTokenizer, markers: Markers) -> None:
        self._tokenizer = tokenizer
        self._ids_by_text = markers.by_text()
        self._split = re.compile("(" + "|".join(map(re.escape, self._ids_by_text)) + ")")
        self._pieces: list[str] = []
        self._token_ids: list[int] = []

    def fixed(self, text: str) -> None:
        """Adds a text of the template; the markers that it spells become control tokens."""
        for piece in self._split.split(text):
            if piece in self._ids_by_text:
                self._encode_pieces()
                self._token_ids.append(self._ids_by_text[piece])
            elif piece:
                self._pieces.append(piece)

    def given(self, text: str) -> None:
        """Adds a text of the request; nothing in it becomes a control token."""
        self._pieces.append(text)

    def token_ids(self) -> tuple[int, ...]:
        """The ids of everything added so far.

        Raises:
            ChatError: a text holds a lone surrogate, which no encoding of Unicode can express.
        """
        self._encode_pieces()
        return tuple(self._token_ids)

    def _encode_pieces(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        try:
            self._token_ids += self._tokenizer.encode_text(text)
        except UnicodeEncodeError as error:
            code = f"\\u{ord(text[error.start]):04x}"
            raise ChatError(f"the text holds {code}, half of a surrogate pair") from None
