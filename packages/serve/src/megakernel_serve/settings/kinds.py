"""The kinds of values that settings have: how text becomes one, and what to call it in an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["NAME", "SHARE", "SWITCH", "UTF8", "WORDS", "Kind", "number", "one_of", "whole_number"]


@dataclass(frozen=True)
class Kind:
    """One kind of value."""

    parse: Callable[[str], Any]
    """Raises ValueError for text that is no such value."""
    wanted: str
    """Completes the sentence "it must be ..."."""
    is_switch: bool = False
    is_list: bool = False
    """Its flag may be given several times."""
    choices: tuple[str, ...] = ()
    """The legal words, if they are few."""


def whole_number(least: int, most: int | None = None) -> Kind:
    """Integers from ``least`` to ``most``, both included."""
    top = sys.maxsize if most is None else most

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= top:
            raise ValueError
        return value

    span = f">= {least}" if most is None else f"from {least} to {most}"
    return Kind(parse, f"a whole number {span}")


def number(least: float, most: float) -> Kind:
    """Real numbers from ``least`` to ``most``, both included."""

    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise ValueError
        return value

    return Kind(parse, f"a number from {least:g} to {most:g}")


def one_of(*choices: str) -> Kind:
    """One of a few words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return Kind(parse, f"one of {', '.join(choices)}", choices=choices)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError
    return value


def _switch(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


def _utf8(text: str) -> str:
    text.encode()  # raises a ValueError for bytes that Python could not decode
    return text


def _name(text: str) -> str:
    if not text.strip():  # --model "$MODEL" with an empty MODEL must not load something else
        raise ValueError
    return text


def _words(text: str) -> tuple[str, ...]:
    text = _utf8(text)
    words = tuple(word for word in (part.strip() for part in text.split(",")) if word)
    if not words:  # --api-key "$KEY" with an empty KEY must not open the server to everybody
        raise ValueError
    return words


SHARE = Kind(_share, "a number above 0, up to 1")
SWITCH = Kind(_switch, "true or false", is_switch=True)
WORDS = Kind(_words, "a comma-separated list", is_list=True)
NAME = Kind(_name, "text that is not empty")
"""Also of files, which may hold any bytes."""
UTF8 = Kind(_utf8, "text in UTF-8")
