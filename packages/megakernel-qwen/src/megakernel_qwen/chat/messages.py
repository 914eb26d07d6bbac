"""Reads OpenAI chat messages into the few texts that a template needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kda_mla_kernels.chat import ChatError, Message

__all__ = ["Call", "Turn", "last_query", "read_messages"]

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Call:
    """A tool call of the history."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """One message, checked and trimmed."""

    role: str
    """system, user, assistant or tool"""
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def read_messages(messages: Sequence[Message]) -> list[Turn]:
    """Checks the conversation; ``developer`` is read as ``system``.

    Raises:
        ChatError: no message, an unknown role, a system message that is not the first, a part that
            is not text, or a tool call whose arguments are not a JSON object.
    """
    if not messages:
        raise ChatError("messages must hold at least one message")
    turns = [_turn(message, f"messages[{place}]") for place, message in enumerate(messages)]
    for place, turn in enumerate(turns[1:], 1):
        if turn.role == "system":
            raise ChatError("a system message must be the first message", f"messages[{place}].role")
    return turns


def last_query(turns: Sequence[Turn]) -> int:
    """Place of the last thing a user asked, as opposed to tool results sent in a user's name.

    Raises:
        ChatError: there is none.
    """
    for place in range(len(turns) - 1, -1, -1):
        turn = turns[place]
        wrapped = turn.text.startswith("<tool_response>") and turn.text.endswith("</tool_response>")
        if turn.role == "user" and not wrapped:
            return place
    raise ChatError("messages must hold a user message that asks something")


def _turn(message: Message, where: str) -> Turn:
    if not isinstance(message, Mapping):
        raise ChatError(f"{where} must be an object", where)
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise ChatError(
            f"{where}.role must be one of system, developer, user, assistant, tool, not {role!r}",
            f"{where}.role",
        )
    text = _text(message.get("content"), f"{where}.content").strip()
    if role != "assistant":
        return Turn(role, text)
    reasoning = message.get("reasoning_content")
    reasoning = message.get("reasoning") if reasoning is None else reasoning
    if reasoning is not None and not isinstance(reasoning, str):
        raise ChatError(f"{where}.reasoning_content must be text", f"{where}.reasoning_content")
    return Turn(role, text, (reasoning or "").strip(), _calls(message, where))


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ChatError(f"{where} must be text, null or a list of text parts", where)
    pieces: list[str] = []
    for place, part in enumerate(content):
        if isinstance(part, str):
            pieces.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ChatError(
                f"{where}[{place}] has type {kind!r}; this model reads text parts only", where
            )
        if not isinstance(part.get("text"), str):
            raise ChatError(f"{where}[{place}].text must be text", where)
        pieces.append(part["text"])
    return "".join(pieces)


def _calls(message: Message, where: str) -> tuple[Call, ...]:
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ChatError(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
    return tuple(_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls))


def _call(call: Any, where: str) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{where} must have a function with a name", where)
    return Call(function["name"], _arguments(function.get("arguments"), f"{where}.arguments"))


def _arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    # Clients send no arguments as null, as an empty text and as "{}".
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ChatError(f"{where} is not valid JSON", where) from None
    if not isinstance(arguments, Mapping):
        raise ChatError(f"{where} must be a JSON object", where)
    return arguments
