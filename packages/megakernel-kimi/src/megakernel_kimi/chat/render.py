"""Rendering the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kda_mla_kernels.chat import ChatError, Message

from megakernel_kimi.chat import bodies
from megakernel_kimi.chat.values import (
    Call,
    calls_of,
    compact_json,
    content_parts,
    tools_payload,
)
from megakernel_kimi.chat.writer import Writer

__all__ = ["declares_tools", "write_conversation", "write_internal"]


def write_internal(writer: Writer, kind: str, body: str) -> None:
    """One of the format's own system messages."""
    with writer.message("system", type=kind):
        writer.text(body.strip())


def declares_tools(message: Message) -> bool:
    """Whether a message in the conversation brings further tools."""
    return message.get("role") in ("system", "developer") and bool(message.get("tools"))


def write_conversation(writer: Writer, messages: Sequence[Message], thinking: bool) -> None:
    """All messages in order; each run of tool results in the order of its calls.

    Raises:
        ChatError: a message cannot be expressed.
    """
    calls: list[Call] = []
    results: list[Message] = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "tool":
            results.append(message)
            continue
        _write_results(writer, results, calls)
        calls, results = [], []
        if role in ("system", "developer", "user"):
            _write_plain(writer, message)
        elif role == "assistant":
            calls = calls_of(message)
            _write_assistant(writer, message, calls, thinking)
        else:
            raise ChatError(
                f"a message has role {role!r}; supported are system, developer, user, assistant,"
                " tool"
            )
    _write_results(writer, results, calls)


def _write_plain(writer: Writer, message: Message) -> None:
    declares = declares_tools(message)
    if declares:
        payload = tools_payload(message["tools"], "messages")
        write_internal(writer, "tool-declare", bodies.tools_added(payload))
    parts = content_parts(message, optional=declares)
    if declares and not any(parts):
        return
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise ChatError(f"a message's name must be a text, not {name!r}")
    role = "user" if message["role"] == "user" else "system"
    with writer.message(role, name=name):
        for part in parts:
            writer.text(part)


def _write_assistant(
    writer: Writer, message: Message, calls: Sequence[Call], thinking: bool
) -> None:
    with writer.message("assistant"):
        if thinking:
            with writer.element("think"):
                writer.text(_reasoning(message))
        with writer.element("response"):
            for part in content_parts(message, optional=True):
                writer.text(part)
        if calls:
            with writer.element("tools"):
                for index, call in enumerate(calls, 1):
                    _write_call(writer, index, call)


def _reasoning(message: Message) -> str:
    for name in ("reasoning_content", "reasoning"):
        text = message.get(name)
        if text is None:
            continue
        if not isinstance(text, str):
            raise ChatError(f"{name} must be a text, not {type(text).__name__}")
        return text if text.strip() else ""
    return ""


def _write_call(writer: Writer, index: int, call: Call) -> None:
    with writer.element("call", tool=call.name, index=str(index)):
        if isinstance(call.arguments, str):
            with writer.element("json", type="object"):
                writer.text(call.arguments)
            return
        for key, value in call.arguments.items():
            with writer.element("argument", key=key, type=_type_name(value)):
                writer.text(
                    value
                    if isinstance(value, str)
                    else compact_json(value, sort_keys=False, param="messages")
                )


def _type_name(value: Any) -> str:
    match value:
        case str():
            return "string"
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case Mapping():
            return "object"
        case _:
            return "array"


def _write_results(writer: Writer, results: Sequence[Message], calls: Sequence[Call]) -> None:
    """A run of tool results: in call order if every one names its call, else as it stands."""
    places = [_place(message, calls) for message in results]
    known = [place for place in places if place is not None]
    pairs = list(zip(results, places))
    if len(known) == len(results):
        order = sorted(range(len(results)), key=known.__getitem__)
        pairs = [pairs[i] for i in order]
    for position, (message, place) in enumerate(pairs):
        name = message.get("name") if place is None else calls[place].name
        if not isinstance(name, str) or not name:
            raise ChatError(
                f"a tool message has tool_call_id {message.get('tool_call_id')!r}, which is no"
                " call of the answer before it, and no name"
            )
        index = position if place is None else place
        with writer.message("tool", tool=name, index=str(index + 1)):
            for part in content_parts(message):
                writer.text(part)


def _place(message: Message, calls: Sequence[Call]) -> int | None:
    """Position of the call that a result answers, by its id or by ``NAME:position``."""
    wanted = message.get("tool_call_id")
    if wanted is None:
        return None
    for place, call in enumerate(calls):
        if call.id == wanted:
            return place
    for place, call in enumerate(calls):
        if f"{call.name}:{place}" == wanted:
            return place
    return None
