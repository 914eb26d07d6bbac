"""From the body of a chat request to the chat format's own terms."""

from __future__ import annotations

from typing import Any

from kda_mla_kernels.chat import ChatFormat, ChatOptions, Rendered

from megakernel_serve.api.errors import invalid
from megakernel_serve.api.prompts import check_length
from megakernel_serve.api.schema import ChatFields, ChatMessage
from megakernel_serve.api.service import Service

__all__ = ["may_call", "render"]


def render(
    service: Service, body: ChatFields, *, fits: bool = False
) -> tuple[ChatFormat, Rendered]:
    """Renders a conversation. Takes time for long ones: not for the event loop.

    Args:
        fits: refuse early what the context cannot hold.

    Raises:
        ChatError, ApiError: the conversation cannot be expressed.
    """
    chat_format = service.loaded.chat_format
    if chat_format is None:
        raise invalid("this model has no chat format; use /v1/completions", "messages")
    messages = [_message(message) for message in body.messages]
    if fits:
        for message in body.messages:
            _check_length(service, message)
    try:
        return chat_format, chat_format.render(messages, _options(service, body))
    except RecursionError:
        raise invalid("the conversation is nested too deeply", "messages") from None


def may_call(body: ChatFields) -> bool:
    """True if tool calls in the answer shall reach the client."""
    declared = bool(body.tools) or any(message.tools for message in body.messages)
    return declared and body.tool_choice != "none"


def _check_length(service: Service, message: ChatMessage) -> None:
    """Formats may leave out what an assistant said, and spaces around texts; nothing else."""
    content = message.content or ""
    if message.role != "assistant":
        for text in [content] if isinstance(content, str) else [part.text for part in content]:
            check_length(service, text.strip(), "messages")


def _message(message: ChatMessage) -> dict[str, Any]:
    values = message.model_dump(exclude_none=True)
    reasoning = values.pop("reasoning", None)
    if reasoning is not None:
        values.setdefault("reasoning_content", reasoning)
    if message.role == "developer":
        values["role"] = "system"
    values.setdefault("content", "")
    return values


def _options(service: Service, body: ChatFields) -> ChatOptions:
    arguments = dict(body.chat_template_kwargs or {})
    thinking = service.config.thinking
    for name in ("thinking", "enable_thinking"):
        if arguments.get(name) is not None:
            thinking = arguments[name]
    return ChatOptions(
        tools=tuple(body.tools or ()),
        tool_choice=body.tool_choice or "auto",
        thinking=thinking,
        effort=body.reasoning_effort or service.config.effort,
        preserve_thinking=arguments.get("preserve_thinking"),
        template_arguments=arguments,
    )
