"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopScanner"]


class StopScanner:
    """Lets text through up to the first stop string.

    Only as much is held back as could still become a stop string. If a piece completes several,
    the one that ends first wins, and the order of the list decides between equals. Nothing comes
    out after a match.

    Args:
        stops: strings that are not empty.
        include: let the matched string itself through.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Takes the next piece and returns what may be shown."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [
            (at + len(stop), rank)
            for rank, stop in enumerate(self._stops)
            if (at := text.find(stop)) >= 0
        ]
        if not found:
            held = self._open_length(text)
            self._held = text[len(text) - held :]
            return text[: len(text) - held]
        end, rank = min(found)
        self.matched, self._held = self._stops[rank], ""
        return text[: end if self._include else end - len(self.matched)]

    def flush(self) -> str:
        """What was held back, once no more text can complete it."""
        held, self._held = self._held, ""
        return held

    def _open_length(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
