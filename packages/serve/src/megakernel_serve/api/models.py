"""``GET /v1/models``, ``/health`` and ``/version``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megakernel_serve import __version__
from megakernel_serve.api.service import Service

__all__ = ["health", "list_models", "show_model", "version"]


async def list_models(request: Request) -> Response:
    """All names of the one model."""
    service: Service = request.app.state.service
    data = [_entry(service, name) for name in service.model_names]
    return JSONResponse({"object": "list", "data": data})


async def show_model(request: Request) -> Response:
    """One model, or a 404."""
    service: Service = request.app.state.service
    name = service.check_model(request.path_params["model"])
    return JSONResponse(_entry(service, name))


async def health(request: Request) -> Response:
    """200 if a request would be taken now; 503 while loading, draining, stalled or failed."""
    service: Service = request.app.state.service
    word, figures = service.health()
    return JSONResponse({"status": word, **figures}, 200 if word == "ok" else 503)


async def version(request: Request) -> Response:
    """The version of this package."""
    return JSONResponse({"version": __version__})


def _entry(service: Service, name: str) -> dict[str, Any]:
    info = service.loaded.model.info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "megakernel",
        "root": info.name,
        "max_model_len": info.max_context,
    }
