"""Where a server listens."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Address"]


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads ``HOST:PORT``; an IPv6 host stands in brackets.

        Raises:
            ValueError: the text is anything else.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not HOST:PORT, for example 127.0.0.1:8000")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"
