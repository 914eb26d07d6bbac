"""Cutting very long texts as the checkpoint's own tokenizer does.

Merging slows down on runs without a place to split, so texts are cut at fixed lengths first. The
cuts change ids, so they are part of the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["MAX_CHARACTERS", "MAX_RUN", "cut"]

MAX_CHARACTERS = 400_000
"""Characters encoded at once."""
MAX_RUN = 25_000
"""Characters of a run that is white space throughout, or has none."""

_LONG_RUN = re.compile(rf"\s{{{MAX_RUN + 1},}}|\S{{{MAX_RUN + 1},}}")


def cut(text: str) -> Iterator[str]:
    """The pieces of a text that are encoded one by one; they concatenate to it."""
    for start in range(0, len(text), MAX_CHARACTERS):
        yield from _cut_runs(text[start : start + MAX_CHARACTERS])


def _cut_runs(text: str) -> Iterator[str]:
    begin = 0
    for run in _LONG_RUN.finditer(text):
        for at in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
            yield text[begin:at]
            begin = at
    yield text[begin:]
