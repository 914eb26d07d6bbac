"""The contract of a chat format: messages to token ids, generated ids to events.

A model package implements it for its own checkpoints (``Model.chat_format``); a server uses it
without knowing any marker. Messages are OpenAI chat messages as plain dictionaries (``role``,
``content`` as text or text parts, ``reasoning_content``, ``tool_calls``, ``tool_call_id``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ChatError",
    "ChatEvent",
    "ChatFormat",
    "ChatOptions",
    "ChatParser",
    "ContentText",
    "Message",
    "ReasoningText",
    "Rendered",
]

Message: TypeAlias = Mapping[str, Any]


class ChatError(ValueError):
    """A conversation that this format cannot express. ``param`` names the request field."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class ChatOptions:
    """Everything beside the messages that changes how a prompt is rendered.

    ``None`` means "the format's default". ``effort`` is an OpenAI ``reasoning_effort`` value, which
    the format maps to its own levels or refuses; ``"none"`` turns thinking off.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    thinking: bool | None = None
    effort: str | None = None
    preserve_thinking: bool | None = None
    response_format: Mapping[str, Any] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rendered:
    """A prompt and what the parser needs to know of it."""

    token_ids: tuple[int, ...]
    thinking: bool
    """True if the generated text starts inside the reasoning channel."""
    options: ChatOptions


@dataclass(frozen=True)
class ReasoningText:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins. ``index`` counts the calls of this answer from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments: the pieces of one index concatenate to a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A tool call is complete."""

    index: int


ChatEvent: TypeAlias = ReasoningText | ContentText | CallStart | CallArguments | CallEnd


class ChatParser(Protocol):
    """Turns the generated ids of one answer into events, incrementally.

    Text is emitted in whole code points; markers never appear in it.
    """

    reasoning_tokens: int
    """Ids seen so far that belong to the reasoning channel, markers not counted."""

    def push(self, token_ids: Sequence[int]) -> list[ChatEvent]:
        """Takes the next ids (without the stop id) and returns what they complete."""
        ...

    def finish(self, reason: Literal["stop", "length", "abort"] = "stop") -> list[ChatEvent]:
        """Flushes held-back text at the end of generation."""
        ...


@runtime_checkable
class ChatFormat(Protocol):
    """Rendering and parsing for one family of checkpoints."""

    stop_ids: frozenset[int]

    def render(self, messages: Sequence[Message], options: ChatOptions) -> Rendered:
        """Token ids of a conversation, with the prefix that starts the next answer.

        Raises:
            ChatError: the conversation or an option cannot be expressed.
        """
        ...

    def parser(self, rendered: Rendered) -> ChatParser:
        """A parser for one answer to ``rendered``."""
        ...
