"""Request ids and API keys, as plain ASGI: nothing here may stand between a handler and the
disconnect message, which wrapping request classes tend to do."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megakernel_serve.api.errors import ApiError

__all__ = ["ApiKeys", "RequestIds"]

OPEN_PATHS = frozenset(["/health", "/version"])

_ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestIds:
    """Every answer carries X-Request-Id: the client's own, if it is fit for a log, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _ACCEPTABLE_ID.fullmatch(given) else secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeys:
    """Lets only bearers of a key pass, except to the open paths and for OPTIONS."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in OPEN_PATHS
        if guarded and scope["method"] != "OPTIONS" and not self._knows(Headers(scope=scope)):
            error = ApiError(
                401,
                "this server needs a valid API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent = key.strip().encode("latin-1")
        # Every key is compared, each in constant time, so that timing tells nothing.
        matches = [hmac.compare_digest(sent, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)
