"""Runs a model for many callers: requests in, token ids out, one device thread in between."""

from megakernel_serve.engine.delivery import Delta, Finish, FinishReason, Timing
from megakernel_serve.engine.engine import Engine, EngineStatus
from megakernel_serve.engine.errors import (
    ContextLengthError,
    EngineBusy,
    EngineError,
    EngineFailed,
    EngineStopped,
    NonFiniteLogits,
    RequestFailed,
)
from megakernel_serve.engine.request import Request, RequestHandle, Result

__all__ = [
    "ContextLengthError",
    "Delta",
    "Engine",
    "EngineBusy",
    "EngineError",
    "EngineFailed",
    "EngineStatus",
    "EngineStopped",
    "Finish",
    "FinishReason",
    "NonFiniteLogits",
    "Request",
    "RequestFailed",
    "RequestHandle",
    "Result",
    "Timing",
]
