"""The OpenAI-compatible HTTP interface."""

from megakernel_serve.api.app import create_app
from megakernel_serve.api.service import Service, ServiceConfig

__all__ = ["Service", "ServiceConfig", "create_app"]
