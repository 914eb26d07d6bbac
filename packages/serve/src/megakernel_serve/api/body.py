"""Request bodies: size, encoding, JSON, and the check against a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from megakernel_serve.api.errors import ApiError, invalid

__all__ = ["parse_json", "read_json", "validate"]

Schema = TypeVar("Schema", bound=BaseModel)

# Pairs of escapes, single escapes of a surrogate, any other escape: in this order.
_SURROGATE = re.compile(
    r"(?P<whole>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    r"|\\."
)

_OBJECT_TYPES = ("model_type", "model_attributes_type", "dict_type")
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        ApiError: 413 if it has more than ``limit`` bytes, 400 for everything else.
    """
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise invalid(f"the content type must be application/json, not {kind!r}")
    return parse_json(await _read_bytes(request, limit))


def validate(values: dict[str, Any], schema: type[Schema]) -> Schema:
    """The object as an instance of ``schema``.

    Raises:
        ApiError: 400, with the field in ``param``.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise _first_error(error, values) from None


def parse_json(raw: bytes) -> dict[str, Any]:
    """Strict JSON: an object, in UTF-8, without NaN. Lone surrogates become U+FFFD.

    Raises:
        ApiError: 400.
    """
    try:
        text = raw.decode("utf-8-sig")
        if "\\u" in text:  # no tokenizer and no encoder takes half of a pair
            text = _SURROGATE.sub(lambda m: r"\ufffd" if m["lone"] else m[0], text)
        values = json.loads(text, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise invalid("the body is not valid UTF-8") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise invalid("the body must be a JSON object")
    return values


async def _read_bytes(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise invalid("the client left before its request was complete") from None
    return bytes(body)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _first_error(error: ValidationError, values: dict[str, Any]) -> ApiError:
    """The first complaint, with the path of the field as clients write it: ``messages[0].role``.

    A value of several legal types has a complaint for each of them. The one that leads deepest
    into the value belongs to the type that the client meant; of several, each is told.
    """
    placed = [(_path(one, values), one) for one in error.errors(include_url=False)]
    first = placed[0][0]
    path = max((path for path, _ in placed if path.startswith(first)), key=len)
    message = " or ".join(dict.fromkeys(_message(one) for where, one in placed if where == path))
    return invalid(f"{path}: {message}" if path else message, path or None)


def _path(error: Mapping[str, Any], values: Any) -> str:
    """Where the fault lies in ``values``, without the names that pydantic gives to types."""
    path, here = "", values
    for part in error["loc"]:
        if isinstance(part, int) and isinstance(here, list):
            path, here = f"{path}[{part}]", here[part]
        elif isinstance(here, dict) and (part in here or error["type"] == "missing"):
            path, here = f"{path}.{part}" if path else str(part), here.get(part)
    return path


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] in _OBJECT_TYPES:
        return "Input should be a valid object"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if error["type"] in _BOUNDS:
        message += f", not {str(error['input'])[:40]}"
    return message
