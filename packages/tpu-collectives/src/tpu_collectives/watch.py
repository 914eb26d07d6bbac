"""What the interpreter notices while a function runs its kernels, the same way on every jax."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import jax

from tpu_collectives import _compat
from tpu_collectives.errors import ExchangeError

__all__ = ["Watched", "simulator", "watch"]

Result = TypeVar("Result")
_LEFT_OVER = "non-zero count"


@dataclass(frozen=True)
class Watched(Generic[Result]):
    """What a function returned, and the faults of its kernels.

    Args:
        result: as returned.
        raced: two accesses to a buffer were not ordered, in the last kernel that ran.
        leftovers: one line per semaphore and rank that was not zero at the end.
        log: everything that the interpreter printed.
    """

    result: Result
    raced: bool
    leftovers: tuple[str, ...]
    log: str = field(repr=False)

    def check(self) -> Result:
        """The result of a run without faults.

        Raises:
            ExchangeError: a race, or semaphores that are not zero.
        """
        if self.raced:
            raise ExchangeError(f"accesses are not ordered:\n{self.log}")
        if self.leftovers:
            raise ExchangeError(
                "semaphores must be zero when a kernel ends, so that every start has its wait: "
                + "; ".join(self.leftovers)
            )
        return self.result


def simulator(dma: Literal["on_wait", "eager"] = "on_wait", detect_races: bool = True) -> Any:
    """``interpret=`` of a ``pallas_call`` whose function :func:`watch` runs.

    Args:
        dma: copy as late as a wait allows, so that early reads see NaN, or at once, so that a copy
            that nobody waits for leaves its semaphore behind.
        detect_races: order all accesses.
    """
    return _compat.interpret_params(detect_races, dma)


def watch(run: Callable[[], Result]) -> Watched[Result]:
    """Runs a function whose last kernel is interpreted by :func:`simulator`, and waits for it."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            result = jax.block_until_ready(run())
    except Exception:
        _compat.reset_interpreter()
        raise
    log = printed.getvalue()
    leftovers = tuple(line for line in log.splitlines() if _LEFT_OVER in line)
    return Watched(result, _compat.races_found(), leftovers, log)
