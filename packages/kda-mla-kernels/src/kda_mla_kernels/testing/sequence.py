"""One row of a model, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Any

import numpy as np

from kda_mla_kernels.model import Model

__all__ = ["Sequence"]


class Sequence:
    """Feeds tokens to one row of a new state and keeps count of its position."""

    def __init__(self, model: Model, row: int = 0) -> None:
        self.model, self.row, self.position = model, row, 0
        self.state: Any = model.init_state()

    def prefill(self, tokens: Tokens[int], chunk: int | None = None, **options: Any) -> list[Any]:
        """Logits of each chunk, as :meth:`Model.prefill` gives them."""
        chunk = chunk or len(tokens)
        logits = []
        for first in range(0, len(tokens), chunk):
            part = tokens[first : first + chunk]
            out = self.model.prefill(self.state, self.row, part, self.position, **options)
            self.state, self.position = out.state, self.position + len(part)
            logits.append(np.asarray(out.logits))
        return logits

    def decode(self, token: int) -> np.ndarray:
        """f32 [V] after one more token."""
        rows = self.model.info.max_rows
        tokens, positions = np.zeros(rows, int), np.zeros(rows, int)
        tokens[self.row], positions[self.row] = token, self.position
        active = np.arange(rows) == self.row
        out = self.model.decode(self.state, tokens, positions, active, with_logits=True)  # type: ignore[arg-type]
        self.state, self.position = out.state, self.position + 1
        return np.asarray(out.logits)[self.row]

    def verify(self, tokens: Tokens[int]) -> np.ndarray:
        """f32 [T, V] of a block; :meth:`commit` must follow."""
        out = self.model.verify(self.state, [self.row], [tokens], [self.position])
        self.state = out.state
        return np.asarray(out.logits)[0]

    def commit(self, count: int) -> None:
        """Keeps the block's first tokens."""
        self.state = self.model.commit(self.state, [count])
        self.position += count
