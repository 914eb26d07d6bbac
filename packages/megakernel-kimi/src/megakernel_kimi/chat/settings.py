"""What the options of a request ask for, checked and with the format's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kda_mla_kernels.chat import ChatError, ChatOptions

from megakernel_kimi.chat.values import compact_json

__all__ = ["Settings"]

_EFFORTS = ("low", "high", "max")
_DEFAULT_EFFORT = "max"
_TEMPLATE_ARGUMENTS = ("thinking", "enable_thinking", "preserve_thinking", "reasoning_effort")


@dataclass(frozen=True)
class Settings:
    """Resolved options."""

    effort: str | None
    """None: thinking is off."""
    choice: str
    """``auto``, ``none``, ``required`` or ``function``."""
    function: str | None
    """Name of the function that must be called, with the choice ``function``."""
    response_kind: str
    """``text``, ``json_object`` or ``json_schema``."""
    schema: str | None
    """The JSON schema as text."""

    @classmethod
    def of(cls, options: ChatOptions) -> Settings:
        """Checks the options.

        Raises:
            ChatError: one of them cannot be expressed.
        """
        choice, function = _tool_choice(options.tool_choice)
        kind, schema = _response_format(options.response_format)
        return cls(_effort(options), choice, function, kind, schema)


def _effort(options: ChatOptions) -> str | None:
    template = options.template_arguments
    for name in template:
        if name not in _TEMPLATE_ARGUMENTS:
            raise ChatError(
                f"chat_template_kwargs.{name} is not known; known are"
                f" {', '.join(_TEMPLATE_ARGUMENTS)}",
                "chat_template_kwargs",
            )
    if _first(options.preserve_thinking, template.get("preserve_thinking")) is False:
        raise ChatError(
            "preserve_thinking cannot be false: the reasoning of earlier answers is part of every"
            " prompt",
            "preserve_thinking",
        )
    thinking = _first(options.thinking, template.get("thinking"), template.get("enable_thinking"))
    if thinking is not None and not isinstance(thinking, bool):
        raise ChatError(f"thinking must be true or false, not {thinking!r}", "thinking")
    effort = _first(options.effort, template.get("reasoning_effort"))
    if effort is not None and effort != "none" and effort not in _EFFORTS:
        raise ChatError(
            f"reasoning_effort is {effort!r}; supported are none, {', '.join(_EFFORTS)}",
            "reasoning_effort",
        )
    if thinking is False or (effort == "none" and thinking is not True):
        return None
    return _DEFAULT_EFFORT if effort in (None, "none") else effort


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _tool_choice(choice: Any) -> tuple[str, str | None]:
    if choice is None:
        return "auto", None
    if choice in ("auto", "none", "required"):
        return choice, None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(choice, Mapping) and choice.get("type") == "function" and isinstance(name, str):
        return "function", name
    raise ChatError(
        f"tool_choice is {choice!r}; supported are 'auto', 'none', 'required' and"
        ' {"type": "function", "function": {"name": ...}}',
        "tool_choice",
    )


def _response_format(wanted: Mapping[str, Any] | None) -> tuple[str, str | None]:
    param = "response_format"
    kind = "text" if wanted is None else wanted.get("type")
    if wanted is None or kind in ("text", "json_object"):
        return str(kind), None
    if kind != "json_schema":
        raise ChatError(
            f"response_format.type is {kind!r}; supported are text, json_object, json_schema", param
        )
    outer = wanted.get("json_schema")
    schema = outer.get("schema", outer) if isinstance(outer, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ChatError("response_format.json_schema must hold a schema object", param)
    return kind, compact_json(schema, sort_keys=True, param=param)
