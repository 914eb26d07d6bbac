"""The outer object of every answer and every chunk."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

__all__ = ["Envelope"]


@dataclass(frozen=True)
class Envelope:
    """What stays the same through all chunks of one answer."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, object: str, model: str) -> Envelope:
        """A new answer; ``model`` is the name that the client asked for."""
        return cls(f"{prefix}-{secrets.token_hex(12)}", object, int(time.time()), model)

    def wrap(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """One JSON object; ``extra`` follows the choices."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **extra,
        }
