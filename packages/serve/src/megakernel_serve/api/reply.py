"""One chat answer: events of the chat format to a message, or to the deltas of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kda_mla_kernels.chat import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
)

__all__ = ["CallPolicy", "Reply"]


@dataclass(frozen=True)
class CallPolicy:
    """Which tool calls reach the client."""

    allowed: bool
    parallel: bool = True
    named: bool = False
    """The client asked for one tool by name, and then expects the finish reason ``stop``."""

    def passes(self, event: ChatEvent) -> bool:
        """False for the events of calls that are dropped."""
        if isinstance(event, ContentText | ReasoningText):
            return True
        return self.allowed and (self.parallel or event.index == 0)


@dataclass
class _Call:
    name: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")
    arguments: str = ""
    complete: bool = False


class Reply:
    """Collects the events of one choice."""

    def __init__(self, policy: CallPolicy) -> None:
        self._policy = policy
        self._reasoning = ""
        self._content = ""
        self._calls: dict[int, _Call] = {}

    def add(self, events: Iterable[ChatEvent]) -> list[dict[str, Any]]:
        """Takes events, and returns the deltas that a stream sends for them."""
        deltas: list[dict[str, Any]] = []
        for event in events:
            if self._policy.passes(event) and (delta := self._take(event)):
                deltas.append(delta)
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """``tool_calls`` instead of ``stop`` if a complete call was made."""
        called = any(call.complete for call in self._calls.values())
        return "tool_calls" if called and reason == "stop" and not self._policy.named else reason

    def message(self) -> dict[str, Any]:
        """The whole message. Calls that were cut off are left out."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments or "{}"},
            }
            for call in self._calls.values()
            if call.complete
        ]
        content: str | None = self._content
        if (calls and not self._content.strip()) or (self._reasoning and not self._content):
            content = None
        reasoning = self._reasoning or None
        message = {
            "role": "assistant",
            "content": content,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
        }
        return message | ({"tool_calls": calls} if calls else {})

    def _take(self, event: ChatEvent) -> dict[str, Any] | None:
        match event:
            case ReasoningText(text):
                self._reasoning += text
                return {"reasoning_content": text, "reasoning": text}
            case ContentText(text):
                self._content += text
                return {"content": text}
            case CallStart(index, name):
                call = self._calls[index] = _Call(name)
                function = {"name": name, "arguments": ""}
                entry = {"index": index, "id": call.id, "type": "function", "function": function}
                return {"tool_calls": [entry]}
            case CallArguments(index, text):
                self._calls[index].arguments += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallEnd(index):
                self._calls[index].complete = True
                return None
