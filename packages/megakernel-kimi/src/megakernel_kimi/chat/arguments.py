"""The arguments of a call, from the tags of the format to the text of a JSON object.

Pieces come out as early as they are certain. A string's text is JSON as soon as it is escaped. Any
other value is held back until it is complete, since text that is not JSON becomes a string.
"""

from __future__ import annotations

import json
from typing import Literal

from megakernel_kimi.chat.values import strict_json

__all__ = ["ArgumentText"]


class ArgumentText:
    """Builds one call's arguments. Every method returns the next piece of the JSON text."""

    def __init__(self) -> None:
        self._form: Literal["members", "object"] | None = None
        self._value: Literal["string", "other", "object"] | None = None
        self._held: list[str] = []

    def open_member(self, key: str, value_type: str | None) -> str:
        """An argument begins. Without a type it is taken for a string."""
        piece = self.close()
        if self._form == "object":
            return piece
        piece += "{" if self._form is None else ","
        self._form = "members"
        self._value = "string" if value_type in (None, "string") else "other"
        piece += f"{json.dumps(key, ensure_ascii=False)}:"
        return piece + '"' if self._value == "string" else piece

    def open_object(self) -> str:
        """The whole object follows as JSON text. Only legal as a call's only child."""
        piece = self.close()
        if self._form is None:
            self._form = self._value = "object"
        return piece

    def text(self, text: str) -> str:
        """Text of the value that is open; dropped where none is."""
        if self._value == "string":
            return json.dumps(text, ensure_ascii=False)[1:-1]
        if self._value is not None:
            self._held.append(text)
        return text if self._value == "object" else ""

    def close(self) -> str:
        """The value that is open is complete."""
        value, self._value = self._value, None
        if value == "string":
            return '"'
        if value != "other":
            return ""
        text, self._held = "".join(self._held), []
        try:
            strict_json(text)
        except ValueError:
            return json.dumps(text, ensure_ascii=False)
        return text.strip()

    def finish(self) -> tuple[str, bool]:
        """The call is complete: the last piece, and whether all pieces are a JSON object."""
        piece = self.close()
        if self._form == "members":
            return piece + "}", True
        whole = "".join(self._held)
        if not whole.strip():
            return "{}", True
        try:
            return "", isinstance(strict_json(whole), dict)
        except ValueError:
            return "", False
