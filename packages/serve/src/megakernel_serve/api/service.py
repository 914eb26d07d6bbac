"""What all endpoints share: the model once it is loaded, its engine, and the server's settings."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from megakernel_serve.api.errors import ApiError, unavailable
from megakernel_serve.engine import Engine
from megakernel_serve.loading import LoadedModel
from megakernel_serve.text import LengthBound

__all__ = ["Health", "Service", "ServiceConfig"]

_log = logging.getLogger(__name__)

STALL_SECONDS = 600.0
"""A chunk or step that takes longer than this counts as hung; compiling one takes minutes."""

Health: TypeAlias = Literal["ok", "loading", "failed", "draining", "stalled"]


@dataclass(frozen=True)
class ServiceConfig:
    """How the HTTP interface behaves.

    Args:
        model_names: names that requests may ask for; empty takes the model's own.
        api_keys: accepted bearer tokens; empty lets everybody in.
        max_waiting: requests that may wait for a row.
        defaults: sampling values and ``max_tokens`` for requests that name none.
        thinking, effort: for conversations that name none.
        cors_origins: origins whose pages may call; ``*`` is all.
        max_body_bytes: largest request body.
        keepalive_seconds: silence after which a stream gets a comment, so that no proxy cuts it.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 256
    defaults: dict[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    effort: str | None = None
    cors_origins: tuple[str, ...] = ("*",)
    max_body_bytes: int = 32 << 20
    keepalive_seconds: float = 15.0


class Service:
    """Loads in the background, serves, shuts down. Methods may be called from any thread."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.created = int(time.time())
        self.load_error: Exception | None = None
        self.length_bound = LengthBound(None)
        self._loaded: tuple[LoadedModel, Engine] | None = None
        self._draining = False
        self._lock = threading.Lock()

    def load_in_background(
        self,
        load: Callable[[], LoadedModel],
        ready: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts loading; then ``ready`` or ``failed`` is called from the loading thread."""

        def work() -> None:
            try:
                self.attach(load(), warm_up=True)
                ready()
            except Exception as error:
                _log.debug("loading failed", exc_info=True)
                self.load_error = error
                failed()

        threading.Thread(target=work, name="megakernel-load", daemon=True).start()

    def attach(self, loaded: LoadedModel, *, warm_up: bool = False) -> None:
        """Makes a loaded model available to requests, if asked for only after a first run."""
        self.length_bound = LengthBound.of(loaded.tokenizer)
        engine = Engine(loaded.model, max_waiting=self.config.max_waiting)
        if warm_up:
            try:
                engine.warm_up()
            except Exception:
                engine.shutdown()
                raise
        with self._lock:
            self._loaded = (loaded, engine)
            draining = self._draining
        if draining:
            engine.shutdown()

    @property
    def loaded(self) -> LoadedModel:
        """The model. Raises a 503 while there is none."""
        return self._ready()[0]

    @property
    def engine(self) -> Engine:
        """The engine. Raises a 503 while there is none."""
        return self._ready()[1]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model is offered, the main one first."""
        return self.config.model_names or (self.loaded.model.info.name,)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises a 404 for a model that is not here."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404,
                f"the model {name!r} does not exist here (available: {known})",
                param="model",
                code="model_not_found",
            )
        return name

    def health(self) -> tuple[Health, dict[str, Any]]:
        """One word for the state, and figures for humans."""
        if self._loaded is None:
            word: Health = "failed" if self.load_error else "loading"
            return ("draining" if self._draining else word), {}
        status = self._loaded[1].status()
        figures = {
            "engine": status.phase,
            "running": status.running,
            "waiting": status.waiting,
            "seconds_since_progress": round(status.idle_seconds, 3),
        }
        if status.phase == "failed":
            return "failed", figures
        if self._draining or not status.accepting:
            return "draining", figures
        return ("stalled" if status.idle_seconds > STALL_SECONDS else "ok"), figures

    def begin_drain(self) -> None:
        """New requests get a 503 from now on; running ones go on."""
        self._draining = True

    def shutdown(self, timeout: float) -> None:
        """Gives up what still runs and waits for the engine's thread."""
        with self._lock:
            self._draining = True
            loaded = self._loaded
        if loaded is not None:
            loaded[1].shutdown(timeout)

    def _ready(self) -> tuple[LoadedModel, Engine]:
        if self._draining:
            raise unavailable("the server is shutting down", 5)
        if self._loaded is None:
            if self.load_error is not None:
                raise ApiError(503, "the model could not be loaded", code="load_failed")
            raise unavailable("the model is still loading", 5)
        return self._loaded
