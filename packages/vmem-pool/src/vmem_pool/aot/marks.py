"""Transfers and waits in the text of a schedule, and where its bundles come from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vmem_pool.aot.loops import source_of

__all__ = ["Mark", "files_of", "marks_of"]

EVENTS = re.compile(
    r"(?:\{ |;;  )(?:%\w+ = )?"
    r"(?P<op>dma\.done\.wait|dma\.(?!done)\w+|vwait\.\w+|vsync\w+\.remote)(?P<rest>[^;]*)"
)
PREDICATED = re.compile(r"^\s*(?:\[thread:\S+\]\s*)?\(!?%p")


@dataclass(frozen=True)
class Mark:
    """An event in the text of a schedule.

    Attributes:
        at: its bundle.
        op: as in :class:`~vmem_pool.aot.Event`.
        source: "file.py:line"; empty for what the compiler adds by itself.
        predicated: it may be passed without being executed.
    """

    at: int
    op: str
    source: str
    predicated: bool

    @property
    def must_run(self) -> bool:
        """A wait of the program that no way can pass without executing it."""
        return bool(self.source) and not self.predicated and self.op.endswith("wait")

    def fits(self, op: str, source: str) -> bool:
        """Whether it is of this kind; a source that ends with a colon stands for a whole file."""
        same = self.source.startswith(source) if source[-1:] == ":" else self.source == source
        return same and self.op == op


def marks_of(bundles: Sequence[str]) -> tuple[Mark, ...]:
    """The events of a schedule in the order of its text."""
    return tuple(mark for at, bundle in enumerate(bundles) for mark in _marks(at, bundle))


def files_of(bundles: Sequence[str]) -> tuple[str, ...]:
    """The file that most operations of each bundle come from; gaps belong to what is before."""
    last, files = "", []
    for bundle in bundles:
        names = re.findall(r'loc\((?:[^"]*\()?"([^"]*)":\d+', bundle)
        if names:
            last = Counter(names).most_common(1)[0][0]
        files.append(last)
    return tuple(files)


def _marks(at: int, bundle: str) -> Iterable[Mark]:
    for found in EVENTS.finditer(bundle):
        op, rest = found["op"], found["rest"]
        if op == "dma.done.wait":
            kind = "dma_wait"
        elif op.startswith("dma"):
            kind = "dma_start"
        else:
            kind = "semaphore_wait" if op.startswith("vwait") else "semaphore_signal"
        yield Mark(at, kind, source_of(rest), bool(PREDICATED.search(rest)))
