"""Reads the body of one function block, incrementally and in linear time.

    <function=NAME>            (read by the caller)
    <parameter=KEY>
    value
    </parameter>
    </function>

Missing closing tags are forgiven: a value ends at the next tag that cannot belong to it, a block at
the next block.
"""

from __future__ import annotations

import re

from megakernel_qwen.chat.schema import SchemaTypes, json_string_piece
from megakernel_qwen.chat.values import ValueWriter, value_writer

__all__ = ["FUNCTION_OPEN", "NAME_LIMIT", "FunctionReader", "first_tag", "held_back"]

FUNCTION_OPEN = "<function="
_FUNCTION_CLOSE = "</function>"
_PARAMETER_OPEN = "<parameter="
_PARAMETER_CLOSE = "</parameter>"
_BODY_TAGS = (_PARAMETER_OPEN, _FUNCTION_CLOSE, FUNCTION_OPEN)
_VALUE_TAGS = (_PARAMETER_CLOSE, _PARAMETER_OPEN, _FUNCTION_CLOSE)
# The line break before a closing tag is no part of the value.
_VALUE_ENDS = (*_VALUE_TAGS, *("\n" + tag for tag in _VALUE_TAGS))

NAME_LIMIT = 256
"""Characters of a function or parameter name; what is longer is no name."""
_KEY = re.compile(rf"([^>\n]{{0,{NAME_LIMIT}}})[>\n]")


def first_tag(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """Place and name of the tag that comes first, or (-1, "")."""
    found = [(place, tag) for tag in tags if (place := text.find(tag)) >= 0]
    return min(found, default=(-1, ""))


def held_back(text: str, tags: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that could become one of the tags."""
    longest = min(len(text), max(map(len, tags)) - 1)
    for length in range(longest, 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


class FunctionReader:
    """Turns the text after ``<function=NAME>`` into pieces of a JSON object.

    ``arguments`` collects the pieces; whoever drives the reader takes them out.
    """

    def __init__(self, types: SchemaTypes) -> None:
        self.arguments: list[str] = []
        self._types = types
        self._buffer = ""
        self._state = self._read_body
        self._writer: ValueWriter | None = None
        self._keys: set[str] = set()
        self._at_value_start = False

    def push(self, text: str) -> str | None:
        """Takes more text. Returns what follows the block once it is closed, else None."""
        self._buffer += text
        while True:
            state = self._state
            rest = state()
            if rest is not None:
                self._close_object()
                return rest
            if self._state == state:
                return None

    def close(self) -> None:
        """Ends the block where the text ended, as if the missing tags had come."""
        if self._state == self._read_value:
            tail = self._buffer[: len(self._buffer) - held_back(self._buffer, _VALUE_ENDS)]
            partial = self._buffer[len(tail) :]
            self._end_value(tail if partial.startswith("\n") else self._buffer)
        self._close_object()

    def _read_body(self) -> str | None:
        place, tag = first_tag(self._buffer, _BODY_TAGS)
        if place < 0:
            keep = held_back(self._buffer, _BODY_TAGS)
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return None
        if tag == FUNCTION_OPEN:
            return self._buffer[place:]
        rest = self._buffer[place + len(tag) :]
        if tag == _FUNCTION_CLOSE:
            return rest
        self._buffer = rest
        self._state = self._read_key
        return None

    def _read_key(self) -> None:
        match = _KEY.match(self._buffer)
        if match:
            self._buffer = self._buffer[match.end() :]
            self._start_value(match[1].strip(), line_broken=match[0].endswith("\n"))
        elif len(self._buffer) > NAME_LIMIT:
            self._state = self._read_body

    def _read_value(self) -> None:
        if self._at_value_start and self._buffer:
            self._buffer = self._buffer.removeprefix("\n")
            self._at_value_start = False
        place, tag = first_tag(self._buffer, _VALUE_TAGS)
        if place >= 0:
            value = self._buffer[:place].removesuffix("\n")
            closed = tag == _PARAMETER_CLOSE
            self._buffer = self._buffer[place + (len(tag) if closed else 0) :]
            self._end_value(value)
            return
        safe = len(self._buffer) - held_back(self._buffer, _VALUE_ENDS)
        self._write(self._buffer[:safe])
        self._buffer = self._buffer[safe:]

    def _start_value(self, key: str, line_broken: bool) -> None:
        self._state = self._read_value
        self._at_value_start = not line_broken
        self._writer = None
        if key in self._keys:
            return  # a JSON object has each key once: the first value stays
        self.arguments.append(f'{", " if self._keys else "{"}"{json_string_piece(key)}": ')
        self._keys.add(key)
        self._writer = value_writer(self._types.of(key))

    def _end_value(self, text: str) -> None:
        self._write(text)
        if self._writer:
            self.arguments.append(self._writer.close())
        self._writer = None
        self._state = self._read_body

    def _write(self, text: str) -> None:
        if self._writer and text:
            self.arguments.append(self._writer.push(text))

    def _close_object(self) -> None:
        self.arguments.append("}" if self._keys else "{}")
