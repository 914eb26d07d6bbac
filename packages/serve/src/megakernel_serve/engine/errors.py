"""Why a request was not taken, or did not end well."""

from typing import Literal

__all__ = [
    "ContextLengthError",
    "EngineBusyError",
    "EngineError",
    "EngineFailedError",
    "EngineStoppedError",
    "NonFiniteLogitsError",
    "RequestFailedError",
    "TokenIdError",
]


class ContextLengthError(ValueError):
    """Prompt and requested tokens together do not fit into one row."""


class TokenIdError(ValueError):
    """An id is outside the vocabulary. ``where`` says which one: in the prompt or a stop id."""

    def __init__(self, where: Literal["prompt", "stop"], token: int, vocab_size: int) -> None:
        super().__init__(f"{where} token id {token} is outside the vocabulary of {vocab_size} ids")
        self.where = where


class EngineError(RuntimeError):
    """Base of everything that is the engine's fault and not the caller's."""


class EngineBusyError(EngineError):
    """The queue is full; the same request may be taken later."""

    retry_after_seconds = 1


class EngineStoppedError(EngineError):
    """The engine is shutting down, and does not take or has given up this request."""

    retry_after_seconds = 5


class EngineFailedError(EngineError):
    """The engine lost its state and could not make a new one; only a restart helps."""


class RequestFailedError(EngineError):
    """The model raised while this request was running; other requests may still succeed."""


class NonFiniteLogitsError(RequestFailedError):
    """The model returned NaN or infinity for this request."""
