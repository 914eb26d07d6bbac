"""A rank's part of something that is cut over ranks, with zeros where it does not divide."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Share"]


@dataclass(frozen=True)
class Share:
    """Members ``start .. stop`` of something, on a rank that has room for ``size``."""

    start: int
    stop: int
    size: int

    @classmethod
    def of(cls, whole: int, size: int, rank: int, first: int = 0) -> Share:
        """The rank's part of ``whole`` members from ``first`` on, ``size`` to a rank."""
        start, stop = (min(number * size, whole) for number in (rank, rank + 1))
        return cls(first + start, first + stop, size)

    def times(self, width: int) -> Share:
        """The same members with ``width`` elements each."""
        return Share(self.start * width, self.stop * width, self.size * width)

    def after(self, offset: int) -> Share:
        """The same members behind ``offset`` others."""
        return Share(self.start + offset, self.stop + offset, self.size)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def padding(self) -> int:
        """Members of zeros at the end."""
        return self.size - (self.stop - self.start)
