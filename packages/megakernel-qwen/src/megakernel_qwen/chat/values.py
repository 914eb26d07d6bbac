"""Writers of one parameter value each: text in, JSON pieces out."""

from __future__ import annotations

from typing import Protocol

from megakernel_qwen.chat.schema import json_string_piece, json_value

__all__ = ["ValueWriter", "value_writer"]


class ValueWriter(Protocol):
    """Takes a value's text in pieces; what it returns concatenates to one JSON value."""

    def push(self, text: str) -> str:
        """The JSON that this piece completes."""
        ...

    def close(self) -> str:
        """The rest of the JSON."""
        ...


def value_writer(types: frozenset[str]) -> ValueWriter:
    """A writer that streams where text may be streamed, and waits for the end elsewhere."""
    if types <= {"string", "null"} and "string" in types:
        return _Text(nullable="null" in types)
    return _Parsed(types)


class _Text:
    """Streams a string; a nullable one waits while it may still turn out to be ``null``."""

    def __init__(self, nullable: bool) -> None:
        self._nullable = nullable
        self._waiting = ""
        self._started = False

    def push(self, text: str) -> str:
        if self._started:
            return json_string_piece(text)
        self._waiting += text
        if not self._waiting or (self._nullable and "null".startswith(self._waiting)):
            return ""
        self._started = True
        return '"' + json_string_piece(self._waiting)

    def close(self) -> str:
        if self._started:
            return '"'
        return "null" if self._waiting == "null" else f'"{json_string_piece(self._waiting)}"'


class _Parsed:
    """Collects the text and converts it at the end."""

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._pieces: list[str] = []

    def push(self, text: str) -> str:
        self._pieces.append(text)
        return ""

    def close(self) -> str:
        return json_value("".join(self._pieces), self._types)
