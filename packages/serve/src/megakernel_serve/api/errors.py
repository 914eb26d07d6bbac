"""Errors as clients expect them: ``{"error": {message, type, param, code}}`` with the right status.

The status matters beyond taste: client libraries repeat a request by themselves on 408, 409, 429
and from 500 on, so a mistake in a request must never be reported as one of these.
"""

from __future__ import annotations

import logging
from typing import Any

from kda_mla_kernels.chat import ChatError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megakernel_serve.engine import (
    ContextLengthError,
    EngineBusyError,
    EngineError,
    EngineStoppedError,
    TokenIdError,
)

__all__ = [
    "ApiError",
    "any_exception",
    "as_api_error",
    "http_exception",
    "invalid",
    "unavailable",
    "unsupported",
]

_log = logging.getLogger(__name__)

LONGEST_MESSAGE = 1000


class ApiError(Exception):
    """An answer with an error body.

    Args:
        status: HTTP status.
        message: one sentence for the caller, without paths or tracebacks.
        param: request field at fault. code: machine-readable reason. headers: extra headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        message = str(self)[:LONGEST_MESSAGE]
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is at fault."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str) -> ApiError:
    """A field that exists elsewhere, but not here."""
    return invalid(f"{param} is not supported by this server", param, "unsupported_parameter")


def unavailable(message: str, seconds: int) -> ApiError:
    """The same request may succeed later."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(seconds)})


def as_api_error(error: BaseException, param: str = "prompt") -> ApiError:
    """The answer to an exception. ``param`` names the field that the prompt came from."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ChatError):
        return invalid(str(error), error.param)
    if isinstance(error, ContextLengthError):
        return invalid(str(error), param, "context_length_exceeded")
    if isinstance(error, TokenIdError):
        return invalid(str(error), "stop_token_ids" if error.where == "stop" else param)
    if isinstance(error, EngineBusyError | EngineStoppedError):
        return unavailable(str(error), error.retry_after_seconds)
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    _log.error("an unexpected error", exc_info=error)
    return ApiError(500, "an unexpected error happened; the server's log has the details")


async def http_exception(request: Request, error: Exception) -> Response:
    """What the router raises: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    where = f"{request.method} {request.url.path}"
    message = {404: f"unknown path: {where}", 405: f"method not allowed: {where}"}.get(
        error.status_code, error.detail
    )
    return ApiError(error.status_code, message, headers=headers).response()


async def any_exception(request: Request, error: Exception) -> Response:
    """Everything that an endpoint raises."""
    return as_api_error(error).response()
