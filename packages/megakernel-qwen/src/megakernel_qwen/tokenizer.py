"""The byte-level BPE tokenizer of a checkpoint: safe encoding and incremental decoding.

Two ``tokenizers`` objects stand behind it. One knows the control tokens and is what users of the
model get; the other was built without them, so that a text that looks like a control token encodes
as ordinary text whatever another thread does.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kda_mla_kernels.errors import CheckpointError
from tokenizers import Tokenizer

__all__ = ["QwenTokenizer", "TextStream", "load_tokenizer"]


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: this maps it back."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + place): byte for place, byte in enumerate(hidden)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


class QwenTokenizer:
    """A checkpoint's tokenizer, with control tokens and text kept apart.

    Args:
        description: the contents of ``tokenizer.json``.
        source: shown in errors.

    Raises:
        CheckpointError: not a byte-level BPE tokenizer, or not valid.
    """

    tokenizer: Tokenizer
    """Knows the control tokens; the object to hand to users."""
    control_ids: frozenset[int]
    """Ids of all added tokens: none of them is ever produced by :meth:`encode_text`."""

    def __init__(self, description: str, source: str = "tokenizer.json") -> None:
        fields = _parse(description, source)
        self.tokenizer = _build(description, source)
        # Only tokens marked "special" can be switched off by a flag, and the markers of thinking
        # and tool calls are not: the text side drops the whole list.
        text_only = {**fields, "added_tokens": [], "post_processor": None}
        self._text = _build(json.dumps(text_only), source)
        added = self.tokenizer.get_added_tokens_decoder()
        self.control_ids = frozenset(added)
        self._bytes = {
            index: bytes(_BYTE_OF_CHARACTER[character] for character in token)
            for token, index in self.tokenizer.get_vocab(with_added_tokens=False).items()
            if all(character in _BYTE_OF_CHARACTER for character in token)
        }
        self._bytes.update({index: str(token).encode() for index, token in added.items()})

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text in which no control token is recognised.

        Raises:
            UnicodeEncodeError: the text holds a lone surrogate.
        """
        text.encode()
        return self._text.encode(text, add_special_tokens=False).ids

    def control_id(self, token: str) -> int:
        """The id of a control token.

        Raises:
            CheckpointError: this tokenizer has no such token.
        """
        index = self.tokenizer.token_to_id(token)
        if index is None or index not in self.control_ids:
            raise CheckpointError(f"the tokenizer has no control token {token!r}")
        return index

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for; none for padding rows of the embedding table."""
        return self._bytes.get(token_id, b"")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, control tokens included; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")


class TextStream:
    """Turns ids into text as they come, in whole code points.

    Bytes that can never become a code point give U+FFFD at once; an incomplete one waits.
    """

    def __init__(self, tokenizer: QwenTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes. Unknown ids give none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left of an incomplete code point, as U+FFFD. The stream can be used on."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def load_tokenizer(folder: str | Path) -> QwenTokenizer:
    """Reads ``tokenizer.json`` of a checkpoint folder.

    Raises:
        CheckpointError: the file is missing, unreadable or no byte-level BPE tokenizer.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a checkpoint folder needs its tokenizer.json")
    try:
        description = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as text: {error}") from error
    return QwenTokenizer(description, str(path))


def _parse(description: str, source: str) -> dict[str, Any]:
    try:
        fields = json.loads(description)
    except ValueError as error:
        raise CheckpointError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(fields, dict) or (fields.get("model") or {}).get("type") != "BPE":
        raise CheckpointError(f"{source} does not describe a BPE tokenizer")
    if (fields.get("decoder") or {}).get("type") != "ByteLevel":
        raise CheckpointError(f"{source} is not byte-level: its decoder must be ByteLevel")
    return fields


def _build(description: str, source: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(description)
    except Exception as error:  # the binding raises plain Exception
        raise CheckpointError(f"{source} is not a valid tokenizer: {error}") from error
