"""Reading the text of a generated tag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Tag", "read_tag"]

_NAME = re.compile(r"\s*([^\s=]+)")
_ATTRIBUTE = re.compile(r'\s+([^\s="]+)="([^"]*)"')


@dataclass(frozen=True)
class Tag:
    """A tag's name and attributes, values unescaped. A name of "" is no tag."""

    name: str
    attributes: Mapping[str, str]


def read_tag(text: str) -> Tag:
    """Reads name and attributes; stops at the first thing that is not an attribute."""
    name = _NAME.match(text)
    if name is None:
        return Tag("", {})
    attributes: dict[str, str] = {}
    at = name.end()
    while found := _ATTRIBUTE.match(text, at):
        # The reverse of escaping: "&" was escaped first, so it comes back last.
        value = found[2].replace("&quot;", '"').replace("&amp;", "&")
        attributes.setdefault(found[1], value)
        at = found.end()
    return Tag(name[1], attributes)
