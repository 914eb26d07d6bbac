"""The streaming parser: generated ids to reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Literal

from kda_mla_kernels.chat import CallArguments, ChatEvent, ContentText, ReasoningText

from megakernel_qwen.chat.answer import AnswerReader
from megakernel_qwen.chat.markers import Markers
from megakernel_qwen.chat.schema import SchemaTypes
from megakernel_qwen.chat.settings import Settings
from megakernel_qwen.tokenizer import QwenTokenizer, TextStream

__all__ = ["QwenChatParser"]


class QwenChatParser:
    """Reads one answer, a :class:`kda_mla_kernels.chat.ChatParser`.

    Markers are known by id: the same characters spelled by ordinary tokens are text. Control
    tokens without a meaning here, repeated markers and ids outside the tokenizer give no text. The
    events do not depend on how the ids are cut into calls, but for the borders between pieces. Time
    is linear in the answer.
    """

    reasoning_tokens: int
    """Ordinary ids seen inside the reasoning."""

    def __init__(self, tokenizer: QwenTokenizer, markers: Markers, settings: Settings) -> None:
        self.reasoning_tokens = 0
        self._control_ids = tokenizer.control_ids
        self._markers = markers
        self._stream = TextStream(tokenizer)
        self._events: list[ChatEvent] = []
        schemas = {
            tool["function"]["name"]: SchemaTypes(tool["function"].get("parameters") or {})
            for tool in settings.tools
        }
        self._answer = AnswerReader(schemas, self._events)
        self._in_reasoning = settings.thinking
        self._reasoning_started = False
        self._drop_break = False
        self._breaks = 0
        if settings.forced_call:
            self._answer.open_region()
            self._answer.push(settings.forced_call)

    def push(self, token_ids: Sequence[int]) -> list[ChatEvent]:
        """Takes the next ids and returns what they complete."""
        for token_id in token_ids:
            if token_id in self._control_ids:
                self._take_text(self._stream.flush())
                self._take_marker(token_id)
            else:
                self.reasoning_tokens += self._in_reasoning
                self._take_text(self._stream.push(token_id))
        return self._drain()

    def finish(self, reason: Literal["stop", "length", "abort"] = "stop") -> list[ChatEvent]:
        """Flushes held-back text.

        After ``"stop"`` (the model ended its turn) an unfinished call is closed as if its missing
        tags had come. Otherwise it stays without a ``CallEnd`` and its arguments are no complete
        JSON: the caller drops it. A stop string that cut a call counts as ``"abort"`` here.
        """
        self._take_text(self._stream.flush())
        if self._in_reasoning:
            self._end_reasoning(dropped_breaks=0)
        self._answer.finish(complete=reason == "stop")
        return self._drain()

    def _take_text(self, text: str) -> None:
        if not text:
            return
        if not self._in_reasoning:
            self._answer.push(text)
            return
        if self._drop_break:
            text = text.removeprefix("\n")
            self._drop_break = False
        self._reasoning_started |= bool(text)
        body = text.rstrip("\n")
        if body:
            self._events.append(ReasoningText("\n" * self._breaks + body))
            self._breaks = 0
        self._breaks += len(text) - len(body)

    def _take_marker(self, token_id: int) -> None:
        markers = self._markers
        if token_id == markers.tool_call:
            # The blank line before a call is part of the format, as it is after content.
            self._end_reasoning(dropped_breaks=2)
            self._answer.open_region()
        elif token_id == markers.tool_call_end:
            self._answer.close_region()
        elif token_id == markers.think_end:
            self._end_reasoning(dropped_breaks=1)
            self._answer.after_reasoning()
        elif token_id == markers.think and self._in_reasoning and not self._reasoning_started:
            self._drop_break = True

    def _end_reasoning(self, dropped_breaks: int) -> None:
        left = self._breaks - dropped_breaks
        if self._in_reasoning and left > 0:
            self._events.append(ReasoningText("\n" * left))
        self._in_reasoning = False
        self._breaks = 0

    def _drain(self) -> list[ChatEvent]:
        drained = _merged(self._events)
        self._events.clear()
        return drained


def _merged(events: Iterable[ChatEvent]) -> list[ChatEvent]:
    """Joins neighbouring pieces of the same text."""
    merged: list[ChatEvent] = []
    for (kind, index), group in groupby(events, _channel):
        if kind is CallArguments:
            merged.append(CallArguments(index, "".join(_texts(group))))
        elif kind in (ContentText, ReasoningText):
            merged.append(kind("".join(_texts(group))))
        else:
            merged += group
    return merged


def _channel(event: ChatEvent) -> tuple[Any, int]:
    return type(event), getattr(event, "index", -1)


def _texts(group: Iterable[Any]) -> Iterable[str]:
    return (event.text for event in group)
