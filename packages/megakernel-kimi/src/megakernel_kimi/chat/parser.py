"""Reading an answer: generated ids to events.

Tags are recognised by control tokens only, so text that looks like a tag stays text. A correct
answer is ``[think] [response] [tools]``, each opened and closed. Real ones deviate: a channel is
left without closing it, the opening think tag is repeated, the message ends inside a channel. So an
opening tag ends whatever was open, and a closing tag that does not fit is skipped.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby
from typing import Literal

from kda_mla_kernels.chat import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
)

from megakernel_kimi.chat.arguments import ArgumentText
from megakernel_kimi.chat.markers import Markers
from megakernel_kimi.chat.tags import Tag, read_tag
from megakernel_kimi.tokenizer import KimiTokenizer

__all__ = ["KimiParser", "Start", "joined"]

MAX_TAG_BYTES = 4096
"""A tag's text that is longer is no tag: it is given back to the channel it stands in."""


@dataclass(frozen=True)
class Start:
    """Where an answer begins."""

    thinking: bool = False
    calls: bool = True
    """False: tool calls are read but not reported."""
    function: str | None = None
    """Name of a call that the prompt has already begun."""


class _In(Enum):
    THINK = auto()
    RESPONSE = auto()
    BETWEEN = auto()
    TOOLS = auto()
    CALL = auto()
    VALUE = auto()
    DONE = auto()


@dataclass
class _OpenTag:
    opens: bool
    text: bytearray


class KimiParser:
    """One answer's parser; see :class:`kda_mla_kernels.chat.ChatParser`.

    A call that generation ends in has no ``CallEnd``, and neither has one whose arguments turn out
    not to be a JSON object. White space around tool calls is not content.
    """

    def __init__(self, tokenizer: KimiTokenizer, markers: Markers, start: Start) -> None:
        self.reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._markers = markers
        self._start = start
        self._in = _In.THINK if start.thinking else _In.RESPONSE
        self._answered = not start.thinking
        self._events: list[ChatEvent] = []
        self._tag: _OpenTag | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # White space of an answer that has nothing else yet: content, unless calls follow.
        self._blank: list[str] | None = []
        self._num_calls = 0
        self._saw_call = False
        self._arguments: ArgumentText | None = None
        if start.function is not None:
            self._begin_call(start.function)

    def push(self, token_ids: Sequence[int]) -> list[ChatEvent]:
        """Takes the next ids and returns what they complete."""
        for token in token_ids:
            if self._in is not _In.DONE:
                self._take(token)
        return self._taken_events()

    def finish(self, reason: Literal["stop", "length", "abort"] = "stop") -> list[ChatEvent]:
        """Flushes held-back text. The reason makes no difference to this format."""
        if self._in is not _In.DONE:
            self._tag = None
            self._end_text()
            self._end_answer()
        return self._taken_events()

    def _taken_events(self) -> list[ChatEvent]:
        events, self._events = joined(self._events), []
        return events

    # Ids

    def _take(self, token: int) -> None:
        markers = self._markers
        if token in (markers.open, markers.close):
            self._end_text()
            self._tag = _OpenTag(token == markers.open, bytearray())
        elif token == markers.sep:
            if self._tag is not None:
                self._end_tag(self._tag)
        elif token in markers.stop_ids:
            self._end_text()
            self._end_answer()
        elif not self._tokenizer.is_text(token):
            return
        elif self._tag is not None:
            self._tag.text += self._tokenizer.token_bytes(token)
            if len(self._tag.text) > MAX_TAG_BYTES:
                text, self._tag = bytes(self._tag.text), None
                self._text(self._decoder.decode(text))
        else:
            self.reasoning_tokens += self._in is _In.THINK
            self._text(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def _end_text(self) -> None:
        if self._tag is None:
            self._text(self._decoder.decode(b"", final=True))

    def _end_tag(self, open_tag: _OpenTag) -> None:
        self._tag = None
        tag = read_tag(open_tag.text.decode("utf-8", "replace"))
        if open_tag.opens:
            self._open(tag)
        else:
            self._close(tag.name)

    # Tags

    def _open(self, tag: Tag) -> None:
        match tag.name:
            case "think" if self._in is not _In.THINK:
                self._leave(_In.THINK)
            case "response":
                self._leave(_In.RESPONSE)
                self._answered = True
            case "tools":
                self._leave(_In.TOOLS)
            case "call":
                self._leave(_In.TOOLS)
                self._begin_call(tag.attributes.get("tool", ""))
            case "argument" if self._in in (_In.CALL, _In.VALUE) and "key" in tag.attributes:
                self._in = _In.VALUE
                if self._arguments is not None:
                    key, value_type = tag.attributes["key"], tag.attributes.get("type")
                    self._argument(self._arguments.open_member(key, value_type))
            case "json" if self._in in (_In.CALL, _In.VALUE):
                self._in = _In.VALUE
                if self._arguments is not None:
                    self._argument(self._arguments.open_object())
            case "message":
                self._leave(_In.BETWEEN)
                self._end_answer()

    def _close(self, name: str) -> None:
        match name, self._in:
            case ("think", _In.THINK) | ("response", _In.RESPONSE):
                self._in = _In.BETWEEN
            case ("argument" | "json", _In.VALUE):
                self._in = _In.CALL
                if self._arguments is not None:
                    self._argument(self._arguments.close())
            case ("call", _In.CALL | _In.VALUE):
                self._leave(_In.TOOLS)
            case ("tools", _In.TOOLS | _In.CALL | _In.VALUE):
                self._leave(_In.BETWEEN)
            case ("message", _):
                self._leave(_In.BETWEEN)
                self._end_answer()

    def _leave(self, to: _In) -> None:
        """Moves to another channel; a call that is open is complete."""
        if self._arguments is not None:
            piece, complete = self._arguments.finish()
            self._argument(piece)
            if complete:
                self._events.append(CallEnd(self._num_calls - 1))
            self._arguments = None
        self._in = to

    def _begin_call(self, name: str) -> None:
        self._in = _In.CALL
        self._answered = self._saw_call = True
        if self._start.calls and name:
            self._events.append(CallStart(self._num_calls, name))
            self._num_calls += 1
            self._arguments = ArgumentText()

    def _end_answer(self) -> None:
        self._in = _In.DONE
        if self._blank and not self._saw_call:
            self._events.append(ContentText("".join(self._blank)))

    # Text

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._in is _In.BETWEEN and not self._answered and text.strip():
            # An answer straight after the reasoning, without its opening tag.
            self._in, self._answered = _In.RESPONSE, True
            text = text.lstrip()
        if self._in is _In.THINK:
            self._events.append(ReasoningText(text))
        elif self._in is _In.RESPONSE:
            self._content(text)
        elif self._in is _In.VALUE and self._arguments is not None:
            self._argument(self._arguments.text(text))

    def _content(self, text: str) -> None:
        if self._blank is not None:
            self._blank.append(text)
            if text.isspace():
                return
            text, self._blank = "".join(self._blank), None
        self._events.append(ContentText(text))

    def _argument(self, piece: str) -> None:
        if piece:
            self._events.append(CallArguments(self._num_calls - 1, piece))


def joined(events: Iterable[ChatEvent]) -> list[ChatEvent]:
    """The same events with neighbouring texts of one kind (and one call) made one."""
    result: list[ChatEvent] = []
    for _, run in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        first, *more = run
        if more and isinstance(first, ReasoningText | ContentText | CallArguments):
            texts = (event.text for event in (first, *more))  # type: ignore[union-attr]
            result.append(replace(first, text="".join(texts)))
        else:
            result += [first, *more]
    return result
