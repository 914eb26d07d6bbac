"""The chat format of Kimi K3 checkpoints, as a server uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kda_mla_kernels.chat import ChatError, ChatOptions, Message, Rendered

from megakernel_kimi.chat import bodies
from megakernel_kimi.chat.markers import Markers
from megakernel_kimi.chat.parser import KimiParser, Start
from megakernel_kimi.chat.render import declares_tools, write_conversation, write_internal
from megakernel_kimi.chat.settings import Settings
from megakernel_kimi.chat.values import tools_payload
from megakernel_kimi.chat.writer import Writer
from megakernel_kimi.tokenizer import KimiTokenizer

__all__ = ["KimiChatFormat", "KimiRendered"]


@dataclass(frozen=True)
class KimiRendered(Rendered):
    """A prompt, and where its answer begins."""

    start: Start = field(default_factory=Start)


class KimiChatFormat:
    """Implements :class:`kda_mla_kernels.chat.ChatFormat`.

    Thinking is on by default, with effort ``max``; ``low`` and ``high`` are the other levels. A
    named function is forced by beginning its call in the prompt (with an empty reasoning channel
    where thinking is on), ``required`` only asks for a call. The ``name`` of an assistant message
    has no place in the format and is not rendered.

    Raises:
        CheckpointError: the tokenizer lacks one of the format's control tokens.
    """

    def __init__(self, tokenizer: KimiTokenizer) -> None:
        self._tokenizer = tokenizer
        self._markers = Markers.of(tokenizer)
        self.stop_ids = self._markers.stop_ids

    def render(self, messages: Sequence[Message], options: ChatOptions) -> KimiRendered:
        """Token ids of a conversation, with the prefix that starts the next answer.

        Raises:
            ChatError: the conversation or an option cannot be expressed.
        """
        if not messages:
            raise ChatError("messages must hold at least one message")
        settings = Settings.of(options)
        writer = Writer(self._tokenizer, self._markers)
        if options.tools:
            payload = tools_payload(options.tools)
            write_internal(writer, "tool-declare", bodies.tools_declared(payload))
        if settings.effort is not None:
            write_internal(writer, "thinking-effort", bodies.thinking_effort(settings.effort))
        write_conversation(writer, messages, settings.effort is not None)
        _check_choice(settings, messages, options)
        declared = bool(options.tools) or any(map(declares_tools, messages))
        if settings.choice == "required" or (settings.choice == "none" and declared):
            write_internal(writer, "tool-choice", bodies.tool_choice(settings.choice))
        if settings.response_kind != "text":
            body = bodies.response_format(settings.response_kind, settings.schema)
            write_internal(writer, "response-format", body)
        _write_prefix(writer, settings)
        start = Start(
            thinking=settings.effort is not None and settings.function is None,
            calls=declared and settings.choice != "none",
            function=settings.function,
        )
        return KimiRendered(tuple(writer.ids), start.thinking, options, start)

    def parser(self, rendered: Rendered) -> KimiParser:
        """A parser for one answer to ``rendered``."""
        if isinstance(rendered, KimiRendered):
            start = rendered.start
        else:
            calls = bool(rendered.options.tools) and rendered.options.tool_choice != "none"
            start = Start(rendered.thinking, calls)
        return KimiParser(self._tokenizer, self._markers, start)


def _check_choice(settings: Settings, messages: Sequence[Message], options: ChatOptions) -> None:
    if settings.choice not in ("required", "function"):
        return
    tools = list(options.tools)
    for message in messages:
        if declares_tools(message):
            tools += message["tools"]
    if not tools:
        raise ChatError(
            f"tool_choice is {settings.choice!r}, but no tools are given", "tool_choice"
        )
    names = [(tool.get("function") or {}).get("name") for tool in tools]
    if settings.function is not None and settings.function not in names:
        raise ChatError(
            f"tool_choice names {settings.function!r}, which is not among the tools", "tool_choice"
        )


def _write_prefix(writer: Writer, settings: Settings) -> None:
    writer.open("message", role="assistant")
    if settings.function is not None:
        if settings.effort is not None:
            with writer.element("think"):
                pass
        writer.open("tools")
        writer.open("call", tool=settings.function, index="1")
    elif settings.effort is not None:
        writer.open("think")
    else:
        writer.open("response")
