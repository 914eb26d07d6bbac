"""The fixed texts of the format's own system messages. The model knows them byte for byte."""

from __future__ import annotations

__all__ = [
    "response_format",
    "thinking_effort",
    "tool_choice",
    "tools_added",
    "tools_declared",
]


def tools_declared(payload: str) -> str:
    """Declares the tools that a request starts with."""
    return (
        "# Tools\n"
        "Here are the available tools, described in JSONSchema.\n"
        "\n"
        f"```json\n{payload}\n```"
    )


def tools_added(payload: str) -> str:
    """Declares further tools in the middle of a conversation."""
    return (
        "## New Tools Available\n"
        "The system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        "Here are the specs for the extended tools.\n"
        "\n"
        f"```json\n{payload}\n```"
    )


def thinking_effort(effort: str) -> str:
    """Sets how much to think."""
    return (
        "`thinking_effort` guides on how much to think in your thinking channel (not including the"
        " response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={effort}`."
    )


def tool_choice(choice: str) -> str:
    """Demands (``required``) or forbids (``none``) calls."""
    duty = "MUST call tools" if choice == "required" else "MUST NOT call any tools"
    return f"The system is invoked with `tool_choice={choice}`.\nYou {duty} in the next message."


def response_format(kind: str, schema: str | None) -> str:
    """Demands JSON (``json_object``), or JSON of a schema (``json_schema``)."""
    body = (
        f"The system is invoked with `response_format={kind}`.\n"
        "Your response must be raw JSON data without markdown code blocks (```json) or any"
        " additional formatting."
    )
    if schema is None:
        return body
    return f"{body}\nThe JSON data must match the following schema:\n```json\n{schema}\n```"
