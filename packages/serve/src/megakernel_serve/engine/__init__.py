"""Runs a model for many callers: requests in, token ids out, one device thread in between."""

from megakernel_serve.engine.delivery import Delta, Finish, FinishReason, Timing
from megakernel_serve.engine.engine import Engine, EngineStatus
from megakernel_serve.engine.errors import (
    ContextLengthError,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineStoppedError,
    NonFiniteLogitsError,
    RequestFailedError,
    TokenIdError,
)
from megakernel_serve.engine.request import Request, RequestHandle, Result

__all__ = [
    "ContextLengthError",
    "Delta",
    "Engine",
    "EngineBusyError",
    "EngineError",
    "EngineFailedError",
    "EngineStatus",
    "EngineStoppedError",
    "Finish",
    "FinishReason",
    "NonFiniteLogitsError",
    "Request",
    "RequestFailedError",
    "RequestHandle",
    "Result",
    "Timing",
    "TokenIdError",
]
