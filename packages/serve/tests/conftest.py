"""Fixtures: a scripted model, an engine on it, the HTTP interface in process and on a socket."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from megakernel_serve.address import Address
from megakernel_serve.api import Service, ServiceConfig, create_app
from megakernel_serve.engine import Engine
from megakernel_serve.loading import LoadedModel
from megakernel_serve.server import bind


def _bigram() -> Any:
    """The module next to this file, under the name that the command line's tests use too."""
    if "bigram" not in sys.modules:
        path = Path(__file__).with_name("bigram.py")
        spec = importlib.util.spec_from_file_location("bigram", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["bigram"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["bigram"])
    return sys.modules["bigram"]


bigram = _bigram()


eventually = bigram.eventually


@pytest.fixture
def model():
    return bigram.BigramModel()


@pytest.fixture
def engine(model) -> Iterator[Engine]:
    engine = Engine(model, max_waiting=3)
    yield engine
    for gate in (model.script.gate, model.script.decode_gate):
        if gate is not None:
            gate.set()
    engine.shutdown()


class Api:
    """The application in process, driven by blocking calls."""

    def __init__(self, model: Any, **config: Any) -> None:
        self.model = model
        self.service = Service(ServiceConfig(**config))
        self.app = create_app(self.service)

    def load(self, chat_format: Any = None) -> Api:
        self.service.attach(
            LoadedModel(self.model, self.model.tokenizer, chat_format or self.model.chat_format)
        )
        return self

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(go())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "hi", "max_tokens": 50} | body)

    def chat(self, text: str = "hi", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages} | body)

    def close(self) -> None:
        for gate in (self.model.script.gate, self.model.script.decode_gate):
            if gate is not None:
                gate.set()
        self.service.shutdown(5)


@pytest.fixture
def make_api(model) -> Iterator[Callable[..., Api]]:
    made: list[Api] = []

    def make(**config: Any) -> Api:
        made.append(Api(model, **config))
        return made[-1]

    yield make
    for api in made:
        api.close()


@pytest.fixture
def api(make_api) -> Api:
    return make_api().load()


@pytest.fixture
def live(api) -> Iterator[str]:
    """The base URL of a real server."""
    import uvicorn

    listener, address = bind(Address("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(api.app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    yield str(address)
    server.should_exit = server.force_exit = True
    thread.join(10)
    listener.close()
