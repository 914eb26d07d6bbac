"""A request, and the handle that its caller holds while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from kda_mla_kernels.sampling import SamplingParams

from megakernel_serve.engine.delivery import Delivery, Delta, Finish

__all__ = ["Request", "RequestHandle", "Result"]


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Args:
        prompt: token ids, at least one.
        max_tokens: most tokens to generate, at least 1; the end id counts.
        sampling: how tokens are chosen.
        stop_ids: ids that end this request beside the model's own end ids.
        ignore_eos: the model's own end ids do not end this request.
        min_tokens: end ids do not count before this many tokens.

    Raises:
        ValueError: a value outside its range; the message names it.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt is empty; it must hold at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must lie between 0 and max_tokens ({self.max_tokens}),"
                f" not {self.min_tokens}"
            )


@dataclass(frozen=True)
class Result:
    """Everything that a request generated."""

    token_ids: tuple[int, ...]
    finish: Finish


class RequestHandle:
    """A submitted request. Iterate over it, in a thread or in an event loop, but only once."""

    def __init__(self, request: Request, cancel: Callable[[RequestHandle], None]) -> None:
        self.request = request
        self.delivery = Delivery()
        self.cancelled = False
        self._cancel = cancel

    def cancel(self) -> None:
        """Gives the request up, from any thread; does nothing if it has ended.

        A waiting request leaves the queue at once, a running one at the next chunk or step.
        The last delta then has the finish reason ``abort``.
        """
        if not self.cancelled and not self.delivery.ended:
            self.cancelled = True
            self._cancel(self)

    def __iter__(self) -> Iterator[Delta]:
        while (delta := self.delivery.take()) is not None:
            yield delta

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while (delta := await self.delivery.take_async()) is not None:
            yield delta

    def result(self) -> Result:
        """Waits for the end.

        Raises:
            EngineError: the request failed.
        """
        return _collected(list(self))

    async def result_async(self) -> Result:
        """As :meth:`result`, without blocking the event loop."""
        return _collected([delta async for delta in self])


def _collected(deltas: list[Delta]) -> Result:
    finish = deltas[-1].finish
    assert finish is not None  # the last delta of every handle carries it
    return Result(tuple(token for delta in deltas for token in delta.token_ids), finish)
