"""Checking and spelling the values of a request: JSON, tools, contents, calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kda_mla_kernels.chat import ChatError, Message

__all__ = ["Call", "calls_of", "compact_json", "content_parts", "strict_json", "tools_payload"]


@dataclass(frozen=True)
class Call:
    """One tool call of an assistant message."""

    id: str | None
    name: str
    arguments: Mapping[str, Any] | str
    """An object, or a text that is not JSON."""


def compact_json(value: Any, *, sort_keys: bool, param: str) -> str:
    """JSON without spaces, other than ASCII characters kept.

    Raises:
        ChatError: the value is not JSON, e.g. not a number, or nested too deeply.
    """
    try:
        return json.dumps(
            value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"a value cannot be written as JSON: {error}", param) from error


def strict_json(text: str) -> Any:
    """Parses JSON; NaN and the infinities are not JSON.

    Raises:
        ValueError: the text is not JSON or is nested too deeply.
    """

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def tools_payload(tools: Sequence[Mapping[str, Any]], param: str = "tools") -> str:
    """The declaration of tools: JSON with sorted keys and only what the format declares.

    Raises:
        ChatError: a tool is not a function with a name.
    """
    if not isinstance(tools, list | tuple):
        raise ChatError("tools must be a list", param)
    return compact_json([_tool(tool, param) for tool in tools], sort_keys=True, param=param)


def _tool(tool: Any, param: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise ChatError('a tool must be {"type": "function", "function": {...}}', param)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise ChatError(f"a tool's function.name must be a text, not {name!r}", param)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ChatError(f"the parameters of tool {name!r} must be an object", param)
    declared = {"name": name, "parameters": parameters}
    for key in ("description", "strict"):
        if function.get(key) is not None:
            declared[key] = function[key]
    return {"type": "function", "function": declared}


def content_parts(message: Message, *, optional: bool = False) -> list[str]:
    """The texts of a message's content, one per part.

    Raises:
        ChatError: the content is missing (unless ``optional``) or is not text.
    """
    content, role = message.get("content"), message.get("role")
    if content is None and optional:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ChatError(f"the content of a {role} message must be a text or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise ChatError(f"a content part has type {kind!r}; only 'text' is supported")
        if not isinstance(part.get("text"), str):
            raise ChatError("a content part of type 'text' must hold a text")
        texts.append(part["text"])
    return texts


def calls_of(message: Message) -> list[Call]:
    """The tool calls of an assistant message.

    Raises:
        ChatError: a call is malformed, or its arguments are JSON but not an object.
    """
    if message.get("function_call") is not None:
        raise ChatError("function_call is not supported; use tool_calls")
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise ChatError("tool_calls must be a list")
    return [_call(call) for call in calls]


def _call(call: Any) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise ChatError('a tool call must be {"id": ..., "type": "function", "function": {...}}')
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ChatError(f"a tool call's function.name must be a text, not {name!r}")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, str):
        try:
            parsed = strict_json(arguments)
        except ValueError:
            return Call(call.get("id"), name, arguments)
        arguments = parsed
    if not isinstance(arguments, Mapping):
        raise ChatError(f"the arguments of a call of {name!r} must be a JSON object")
    return Call(call.get("id"), name, arguments)
