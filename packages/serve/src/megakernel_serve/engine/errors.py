"""Why a request was not taken, or did not end well."""

__all__ = [
    "ContextLengthError",
    "EngineBusy",
    "EngineError",
    "EngineFailed",
    "EngineStopped",
    "NonFiniteLogits",
    "RequestFailed",
]


class ContextLengthError(ValueError):
    """Prompt and requested tokens together do not fit into one row."""


class EngineError(RuntimeError):
    """Base of everything that is the engine's fault and not the caller's."""


class EngineBusy(EngineError):
    """The queue is full; the same request may be taken later."""

    retry_after_seconds = 1


class EngineStopped(EngineError):
    """The engine is shutting down, and does not take or has given up this request."""

    retry_after_seconds = 5


class EngineFailed(EngineError):
    """The engine lost its state and could not make a new one; only a restart helps."""


class RequestFailed(EngineError):
    """The model raised while this request was running; other requests may still succeed."""


class NonFiniteLogits(RequestFailed):
    """The model returned NaN or infinity for this request."""
