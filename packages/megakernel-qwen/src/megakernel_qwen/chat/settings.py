"""What the options of a request mean for this format, resolved and checked in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kda_mla_kernels.chat import ChatError, ChatOptions

from megakernel_qwen.chat.dialect import Dialect
from megakernel_qwen.chat.template import EFFORT_LINES

__all__ = ["Settings", "resolve"]

_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "xhigh",
    "xhigh": "xhigh",
    "max": "xhigh",
}


@dataclass(frozen=True)
class Settings:
    """Everything that rendering and parsing need to know of a request beside its messages."""

    thinking: bool
    effort_line: str
    """Empty if the effort has none or thinking is off."""
    preserve_thinking: bool
    """Whether turns before the last user query keep their reasoning."""
    tools: tuple[Mapping[str, Any], ...]
    """The tools the model may call: none with ``tool_choice="none"``."""
    forced_call: str
    """The start of a function block that the prompt already holds; empty if no call is forced."""


def resolve(options: ChatOptions, dialect: Dialect) -> Settings:
    """Applies defaults, aliases and template arguments.

    A field of the request wins over the template argument of the same meaning. A thinking switch
    wins over the effort; an effort switches thinking on, ``none`` off. A forced call switches it
    off: the prompt then ends inside the call, which leaves no place to think.

    Raises:
        ChatError: a value that this format does not know, or a combination that it cannot express.
    """
    _check_response_format(options.response_format)
    declared = _checked_tools(options.tools)
    forced_call = _forced_call(options.tool_choice, declared)
    effort = _either(options.effort, options.template_arguments, "reasoning_effort")
    thinking = _thinking(options, effort, bool(forced_call), dialect.thinks_by_default)
    preserve = _flag(options.preserve_thinking, options.template_arguments, "preserve_thinking")
    line = EFFORT_LINES[_level(effort)]
    return Settings(
        thinking=thinking,
        effort_line=line if thinking and dialect.effort_lines else "",
        preserve_thinking=dialect.keeps_reasoning if preserve is None else preserve,
        tools=() if options.tool_choice == "none" else declared,
        forced_call=forced_call,
    )


def _either(value: Any, arguments: Mapping[str, Any], name: str) -> Any:
    return arguments.get(name) if value is None else value


def _flag(value: bool | None, arguments: Mapping[str, Any], name: str) -> bool | None:
    found = _either(value, arguments, name)
    if found is not None and not isinstance(found, bool):
        raise ChatError(f"{name} must be true or false, not {found!r}", "chat_template_kwargs")
    return found


def _level(effort: Any) -> str:
    if effort is None or effort == "none":
        return "xhigh"
    if not isinstance(effort, str) or effort not in _EFFORTS:
        known = ", ".join(["none", *_EFFORTS])
        raise ChatError(
            f"reasoning_effort must be one of {known}, not {effort!r}", "reasoning_effort"
        )
    return _EFFORTS[effort]


def _thinking(options: ChatOptions, effort: Any, forced: bool, default: bool) -> bool:
    asked = options.thinking
    for name in ("enable_thinking", "thinking"):
        asked = _flag(asked, options.template_arguments, name)
    if asked is None and effort is not None:
        asked = effort != "none"
    if asked and forced:
        raise ChatError(
            "a forced tool call leaves no place to think; turn thinking off or use tool_choice"
            " 'auto'",
            "tool_choice",
        )
    return (default and not forced) if asked is None else asked


def _check_response_format(response_format: Mapping[str, Any] | None) -> None:
    kind = "text" if response_format is None else response_format.get("type")
    if kind != "text":
        raise ChatError(
            f"response_format {kind!r} is not supported yet; only 'text' is", "response_format"
        )


def _checked_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise ChatError(f"tools[{place}] must be an object of type 'function'", "tools")
        name = function.get("name")
        if not isinstance(name, str) or not name.strip() or set(name) & set("<>\r\n"):
            raise ChatError(
                f"tools[{place}].function.name must be a name without <, > and line breaks, not"
                f" {name!r}",
                "tools",
            )
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise ChatError(f"tools[{place}].function.parameters must be a JSON schema", "tools")
    return tuple(tools)


def _forced_call(choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    if choice in ("auto", "none"):
        return ""
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required":
        if not names:
            raise ChatError("tool_choice 'required' needs at least one tool", "tool_choice")
        return f"<function={names[0]}>\n" if len(names) == 1 else "<function="
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(
            "tool_choice must be 'auto', 'none', 'required' or"
            ' {"type": "function", "function": {"name": ...}}, not ' + repr(choice),
            "tool_choice",
        )
    if function["name"] not in names:
        raise ChatError(
            f"tool_choice names {function['name']!r}, which is not among the tools"
            f" ({', '.join(names) or 'none'})",
            "tool_choice",
        )
    return f"<function={function['name']}>\n"
