"""Splits the text of an answer into content and function blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kda_mla_kernels.chat import CallArguments, CallEnd, CallStart, ChatEvent, ContentText

from megakernel_qwen.chat.calls import FUNCTION_OPEN, NAME_LIMIT, FunctionReader, held_back
from megakernel_qwen.chat.schema import SchemaTypes

__all__ = ["AnswerReader"]

_OPENING = re.compile(rf"{FUNCTION_OPEN}([^>\n]{{1,{NAME_LIMIT}}})[>\n]")
_NO_SCHEMA = SchemaTypes({})


class AnswerReader:
    """Reads everything after the reasoning.

    Inside a region (between the two tool-call markers) any function block is a call; outside, only
    one that names a declared tool is, because an answer may well quote the syntax. Where no tool is
    declared, blocks inside a region are read and not reported.

    White space is held until it is known not to stand before a call, where it is dropped; after a
    call it only counts between two pieces of content.

    Args:
        schemas: parameter types of the declared tools, by name.
        events: receives what is read.
    """

    def __init__(self, schemas: Mapping[str, SchemaTypes], events: list[ChatEvent]) -> None:
        self._schemas = schemas
        self._events = events
        self._buffer = ""
        self._region = False
        self._function: FunctionReader | None = None
        self._calls = 0
        self._space: list[str] = []
        self._leading_breaks = 0
        self._has_content = False
        self._seen_call = False

    def after_reasoning(self) -> None:
        """The end marker of the reasoning came: the blank line after it is no content."""
        if not self._has_content:
            self._leading_breaks = 2

    def open_region(self) -> None:
        """The marker that opens a tool call came."""
        self._settle(complete=True)
        self._expect_call()
        self._region = True

    def close_region(self) -> None:
        """The marker that closes a tool call came; without an open one it means nothing."""
        if self._region or self._function:
            self._settle(complete=True)
            self._space.clear()
            self._region = False

    def push(self, text: str) -> None:
        """Takes more text."""
        self._buffer += text
        while self._buffer and self._step():
            pass

    def finish(self, complete: bool) -> None:
        """Flushes at the end. ``complete`` closes an unfinished call instead of leaving it open."""
        self._settle(complete)
        if not self._seen_call:
            self._emit_content("".join(self._space))
        self._space.clear()

    def _step(self) -> bool:
        """Reads one thing from the buffer. Returns False if it has to wait for more text."""
        if self._function:
            rest = self._function.push(self._buffer)
            self._buffer = rest or ""
            self._emit_arguments(self._function)
            if rest is not None:
                self._end_function()
            return rest is not None
        if not (self._region or self._schemas):
            self._content(self._take(len(self._buffer)))
            return False
        place = self._buffer.find(FUNCTION_OPEN)
        if place < 0:
            held = held_back(self._buffer, (FUNCTION_OPEN,))
            self._content(self._take(len(self._buffer) - held))
            return False
        self._content(self._take(place))
        return self._read_opening()

    def _read_opening(self) -> bool:
        match = _OPENING.match(self._buffer)
        name = match[1].strip() if match else ""
        if match and name and (self._region or match[1] in self._schemas):
            self._take(match.end())
            self._start_function(name)
        elif match or not self._may_open():
            self._content(self._take(len(FUNCTION_OPEN)))
        else:
            return False
        return True

    def _may_open(self) -> bool:
        name = self._buffer[len(FUNCTION_OPEN) :]
        if len(name) > NAME_LIMIT or set(name) & {">", "\n"}:
            return False
        return self._region or any(tool.startswith(name) for tool in self._schemas)

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text

    def _settle(self, complete: bool) -> None:
        """Ends what is open, because a marker or the end of the answer came."""
        partial = self._take(len(self._buffer))
        if self._function and complete:
            self._function.close()
            self._emit_arguments(self._function)
            self._end_function()
        elif not self._function and not self._region:
            self._content(partial)

    def _content(self, text: str) -> None:
        while self._leading_breaks and text.startswith("\n"):
            text = text[1:]
            self._leading_breaks -= 1
        if self._seen_call and not self._has_content:
            text = text.lstrip()
        if not text:
            return
        self._leading_breaks = 0
        body = text.rstrip() if self._region or self._schemas else text
        if body:
            self._emit_content("".join(self._space) + body)
            self._space.clear()
        self._space.append(text[len(body) :])

    def _emit_content(self, text: str) -> None:
        if text:
            self._has_content = True
            self._events.append(ContentText(text))

    def _expect_call(self) -> None:
        self._space.clear()
        self._seen_call = True

    def _start_function(self, name: str) -> None:
        self._expect_call()
        self._leading_breaks = 0
        self._function = FunctionReader(self._schemas.get(name, _NO_SCHEMA))
        if self._schemas:
            self._events.append(CallStart(self._calls, name))

    def _emit_arguments(self, function: FunctionReader) -> None:
        if self._schemas:
            pieces = filter(None, function.arguments)
            self._events.extend(CallArguments(self._calls, piece) for piece in pieces)
        function.arguments.clear()

    def _end_function(self) -> None:
        self._function = None
        if self._schemas:
            self._events.append(CallEnd(self._calls))
            self._calls += 1
