"""Parameter values: from the text a model wrote to JSON, guided by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["SchemaTypes", "json_string_piece", "json_value"]

_DEPTH = 16
"""References and unions nested deeper are taken as text."""

_OF_VALUE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "boolean"),
    (str, "string"),
    (int, "integer"),
    (float, "number"),
    (type(None), "null"),
    (Mapping, "object"),
    (list, "array"),
)


class SchemaTypes:
    """JSON types that a function's parameters may have.

    Args:
        parameters: the function's ``parameters`` schema; local references are followed.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = parameters
        properties = parameters.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}

    def of(self, parameter: str) -> frozenset[str]:
        """Types of a parameter; ``{"string"}`` if its schema says nothing."""
        found = self._types(self._properties.get(parameter), _DEPTH)
        return frozenset(found) or frozenset({"string"})

    def _types(self, schema: Any, depth: int) -> set[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return set()
        if isinstance(schema.get("$ref"), str):
            return self._types(self._referred(schema["$ref"]), depth - 1)
        declared = schema.get("type")
        if isinstance(declared, str):
            return {declared}
        if isinstance(declared, list):
            return {kind for kind in declared if isinstance(kind, str)}
        for union in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(union), list):
                return set().union(*(self._types(one, depth - 1) for one in schema[union]))
        if "const" in schema:
            return {_type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            return {_type_of(value) for value in schema["enum"]}
        return {"object"} if "properties" in schema else {"array"} if "items" in schema else set()

    def _referred(self, reference: str) -> Any:
        found: Any = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


def json_value(text: str, types: frozenset[str]) -> str:
    """JSON for a value: parsed if one of the types allows it, else the text as a string."""
    try:
        value = json.loads(_json_spelling(text.strip(), types))
        if _allowed(value, types):
            if isinstance(value, float) and "number" not in types:
                value = int(value)
            found = json.dumps(value, ensure_ascii=False, allow_nan=False)
            # An escaped lone surrogate must stay escaped: nothing could encode the character.
            return found if _encodable(found) else json.dumps(value)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def json_string_piece(text: str) -> str:
    """A piece of a string, escaped for use between JSON quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_spelling(text: str, types: frozenset[str]) -> str:
    # Models trained on Python write True and None.
    lower = text.lower()
    if "boolean" in types and lower in ("true", "false"):
        return lower
    return "null" if "null" in types and lower in ("null", "none") else text


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _type_of(value: Any) -> str:
    return next((name for kind, name in _OF_VALUE if isinstance(value, kind)), "string")


def _allowed(value: Any, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    if kind == "string":
        return False  # quotes around a text belong to it: string parameters are written raw
    if kind == "integer":
        return bool({"integer", "number"} & types)
    if kind == "number":
        return "number" in types or ("integer" in types and float(value).is_integer())
    return kind in types
