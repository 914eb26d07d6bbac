"""The application: routes, middleware, error handlers."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megakernel_serve.api.chat import chat_completions
from megakernel_serve.api.completions import completions
from megakernel_serve.api.errors import any_exception, http_exception
from megakernel_serve.api.middleware import ApiKeys, RequestIds
from megakernel_serve.api.models import health, list_models, show_model, version
from megakernel_serve.api.service import Service
from megakernel_serve.api.sse import ClientLeftError
from megakernel_serve.api.tokenize import detokenize, tokenize

__all__ = ["create_app"]

CLIENT_CLOSED_REQUEST = 499
"""The customary status of an answer that nobody reads; it only shows in the access log."""


def create_app(service: Service) -> Starlette:
    """The ASGI application of a service."""
    config = service.config
    middleware = [
        Middleware(RequestIds),
        Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        ),
    ]
    if config.api_keys:
        middleware.append(Middleware(ApiKeys, keys=config.api_keys))
    # Inside of the others, so that answers to errors carry an id and may be read by any page.
    middleware.append(Middleware(ExceptionMiddleware, handlers={Exception: any_exception}))
    app = Starlette(
        routes=_routes(),
        middleware=middleware,
        exception_handlers={HTTPException: http_exception, ClientLeftError: _client_left},
    )
    app.router.redirect_slashes = False  # clients do not follow redirects of a POST
    app.state.service = service
    return app


def _routes() -> list[Route]:
    return [
        Route("/health", health),
        Route("/version", version),
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", show_model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        *(Route(f"{root}/tokenize", tokenize, methods=["POST"]) for root in ("", "/v1")),
        *(Route(f"{root}/detokenize", detokenize, methods=["POST"]) for root in ("", "/v1")),
    ]


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
