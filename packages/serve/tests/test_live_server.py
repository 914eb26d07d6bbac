"""A real server on the loopback interface, with the client library that most users have."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import httpx
import openai
import pytest
from bigram import eventually

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, **fields):
    messages = [{"role": "user", "content": "hi"}]
    return client.chat.completions.create(model="bigram", messages=messages, **fields)


def test_completions_plain_and_streamed(client):
    plain = client.completions.create(model="bigram", prompt="hi", max_tokens=50)
    assert plain.choices[0].text == "hello world"
    stream = client.completions.create(model="bigram", prompt="hi", max_tokens=50, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hello world"


def test_chat_plain_and_streamed(client):
    assert ask(client).choices[0].message.content == "hello world"
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "hello world"
    assert chunks[-1].usage.completion_tokens == chunks[-1].usage.total_tokens - 3


def test_tool_calls_accumulate_in_the_library(api, client):
    api.model.script.default = '<call>look{"at":"sky"}</call>'
    call = ask(client, tools=TOOLS).choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("look", '{"at":"sky"}')
    messages = [{"role": "user", "content": "hi"}]
    with client.chat.completions.stream(model="bigram", messages=messages, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("look", '{"at":"sky"}')
    assert final.choices[0].finish_reason == "tool_calls"


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["bigram"]
    assert client.models.retrieve("bigram").id == "bigram"


def test_errors_become_the_librarys_exceptions(api, client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="bigram", prompt="x" * 300)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    api.model.script.fail_prefill = RuntimeError("boom")
    with pytest.raises(openai.InternalServerError, match="boom"):
        ask(client)
    with pytest.raises(openai.APIError, match="boom"):
        list(ask(client, stream=True))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_the_engine(api, live, stream):
    api.model.script.step_seconds = 0.01
    body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True, "stream": stream}

    def impatient():
        with httpx.stream("POST", f"{live}/v1/completions", json=body, timeout=0.3) as response:
            for _ in response.iter_lines():
                return

    with nullcontext() if stream else pytest.raises(httpx.ReadTimeout):
        impatient()
    eventually(lambda: api.service.engine.status().running == 0, 3)
    assert sum(call[0] == "decode" for call in api.model.calls) < 150


def test_a_client_that_leaves_the_queue_never_starts(api, live):
    api.model.script.gate = threading.Event()
    from megakernel_serve.engine import Request

    for _ in range(2):
        api.service.engine.submit(Request((1,), 1))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live}/v1/completions", json={"prompt": "hi"}, timeout=0.3)
    eventually(lambda: api.service.engine.status().waiting == 0, 3)
    api.model.script.gate.set()
    eventually(lambda: api.service.engine.status().running == 0)
    assert sum(call[0] == "prefill" for call in api.model.calls) == 2


def test_a_silent_stream_gets_comments(api, live):
    object.__setattr__(api.service.config, "keepalive_seconds", 0.05)
    api.model.script.gate = threading.Event()
    body = {"prompt": "hi", "stream": True, "max_tokens": 2}
    with httpx.stream("POST", f"{live}/v1/completions", json=body, timeout=10) as response:
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        api.model.script.gate.set()
        assert list(lines)[-2] == "data: [DONE]"


def test_many_clients_at_once_all_get_their_own_answer(api, live):
    names = [f"{letter * 3}" for letter in "abcdefghijkl"]
    api.model.script.replies = {name: f"hello {name}, how are you" for name in names}
    answers = {}

    def one(name):
        body = {"prompt": name, "max_tokens": 60}
        response = httpx.post(f"{live}/v1/completions", json=body, timeout=30)
        answers[name] = response.json()["choices"][0]["text"]

    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == api.model.script.replies
