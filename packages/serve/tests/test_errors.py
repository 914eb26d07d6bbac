"""Everything a client can do wrong, and what the server can do wrong, in process."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from pathlib import Path

import pytest
from bigram import eventually
from megakernel_serve.api.unsupported import REFUSED, REFUSED_PREFIX


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["message"]
    return error


USER = {"role": "user", "content": "x"}
BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [[1], [None]]}, "prompt"),
    ({"prompt": ["x"] * 200}, "prompt"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": 2.1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_p": 1.1}, "top_p"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "min_p": 2}, "min_p"),
    ({"prompt": "x", "seed": 2**64}, "seed"),
    ({"prompt": "x", "seed": 1.5}, "seed"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 129}, "n"),
    ({"prompt": ["x"] * 100, "n": 100}, "n"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "stop": ["a", ""]}, "stop"),
    ({"prompt": "x", "stop": [1]}, "stop[0]"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"prompt": "x", "stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "max_tokens": 0, "echo": True}, "max_tokens"),
    ({"prompt": [2**32], "echo": True, "max_tokens": 1}, "prompt"),
    ({"prompt": [2**32], "echo": True, "max_tokens": 0}, "prompt"),
    ({"prompt": [10**6], "echo": True, "max_tokens": 0}, "prompt"),
    ({"prompt": [1] * 257, "echo": True, "max_tokens": 0}, "prompt"),
    ({"prompt": "x", "echo": True, "max_tokens": 0, "stop_token_ids": [999]}, "stop_token_ids"),
    ({"prompt": "x", "echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ({"prompt": "x", "model": 5}, "model"),
    ({"prompt": "x", "logprobs": 0}, "logprobs"),
    ({"prompt": "x", "logprobs": 5}, "logprobs"),
    ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty"),
    ({"prompt": "x", "frequency_penalty": -1}, "frequency_penalty"),
    ({"prompt": "x", "repetition_penalty": 1.1}, "repetition_penalty"),
    ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "guided_choice": ["a", "b"]}, "guided_choice"),
    ({"prompt": "x", "guided_anything": {}}, "guided_anything"),
    ({"prompt": "x", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"prompt": "x", "allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"prompt": "x", "bad_words": ["a"]}, "bad_words"),
    ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "x", "length_penalty": 0.5}, "length_penalty"),
    ({"prompt": "x", "prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"prompt": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"prompt": "x", "skip_special_tokens": False}, "skip_special_tokens"),
]
BAD_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [USER], "tool_choice": 5}, "tool_choice"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ({"messages": [USER], "max_completion_tokens": "x"}, "max_completion_tokens"),
    ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": [USER], "tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [USER], "tool_choice": "maybe"}, "tool_choice"),
    ({"messages": [USER], "reasoning_effort": "huge"}, "reasoning_effort"),
    ({"messages": [USER], "chat_template_kwargs": {"thinking": "x"}}, "chat_template_kwargs"),
    ({"messages": [USER], "logprobs": True}, "logprobs"),
    ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
    ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format"),
    ({"messages": [USER], "response_format": "json"}, "response_format"),
]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
def test_a_bad_completion_request_names_its_field(api, body, param):
    assert error_of(api.post("/v1/completions", body), 400)["param"] == param


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_a_bad_chat_request_names_its_field(api, body, param):
    assert error_of(api.post("/v1/chat/completions", body), 400)["param"] == param


def test_a_value_of_no_legal_type_is_told_every_legal_one(api):
    error = error_of(api.chat(tool_choice=5), 400)
    wanted = "Input should be a valid string or Input should be a valid object"
    assert error["message"] == f"tool_choice: {wanted}"


def test_defaults_of_a_checkpoint_that_make_no_sense_are_told(api):
    object.__setattr__(api.model.generation, "temperature", -1.0)
    error = error_of(api.complete(temperature=None), 500)
    assert "generation defaults are wrong: temperature must be a number >= 0" in error["message"]
    assert error["code"] == "bad_defaults"
    assert api.complete(temperature=1).status_code == 200


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_that_cannot_fit_is_refused_before_it_is_cut_into_tokens(api, monkeypatch, chat):
    def never(*_, **__):
        raise AssertionError("it was cut into tokens")

    text = "word " * 400_000
    if chat:
        monkeypatch.setattr(type(api.model.chat_format), "render", never)
        error = error_of(api.chat(text), 400)
    else:
        from megakernel_serve.api import prompts

        bound = api.service.length_bound
        assert bound.exceeded("x" * (256 * bound.longest + 1), 256)
        assert not bound.exceeded("x" * (256 * bound.longest), 256)
        monkeypatch.setattr(prompts, "_ids", never)
        error = error_of(api.complete(prompt=text), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if chat else "prompt")


def test_neutral_values_of_unsupported_fields_and_unknown_fields_are_accepted(api):
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "logprobs": None,
        "best_of": 1,
        "length_penalty": 1.0,
        "bad_words": [],
        "use_beam_search": False,
        "guided_json": None,
        "skip_special_tokens": True,
        "user": "me",
        "metadata": {"a": 1},
        "store": False,
        "surprise": [1],
    }
    assert api.complete(**neutral).status_code == 200
    chat = {"response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0}
    assert api.chat(**chat).status_code == 200


def test_the_readme_lists_exactly_the_fields_that_are_refused():
    readme = Path(__file__).parents[1] / "README.md"
    if not readme.exists():
        pytest.skip("the README does not come with an installed package")
    start = "Refused with a 400"
    (paragraph,) = [line for line in readme.read_text().splitlines() if line.startswith(start)]
    assert set(re.findall(r"`(.+?)`", paragraph)) == {*REFUSED, f"{REFUSED_PREFIX}*"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ["x"] * 3, "n": 60}, "3 prompts times n=60 are 180 answers; at most 128 are"),
        ({"prompt": ["x"] * 129}, "129 prompts are too many; at most 128 are possible"),
        ({"n": 129}, "n: Input should be less than or equal to 128, not 129"),
        ({"temperature": 2.5}, "temperature: Input should be less than or equal to 2, not 2.5"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens=6 is above the 5 tokens to generate"),
    ],
)
def test_a_limit_is_named_together_with_the_value(api, body, message):
    assert message in error_of(api.complete(**body), 400)["message"]


def test_more_answers_than_the_queue_holds_are_refused_for_all_kinds_of_requests(make_api):
    api = make_api(max_waiting=2).load()
    for response in (api.complete(n=3), api.chat(n=3)):
        message = error_of(response, 400)["message"]
        assert message == "n=3 asks for 3 answers; at most 2 are possible"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b"prompt=x",
    ],
    ids=range(11),
)
def test_a_body_that_is_no_json_object_is_a_400(api, raw):
    headers = {"content-type": "application/json"}
    error_of(api.request("POST", "/v1/completions", content=raw, headers=headers), 400)


def test_another_content_type_is_a_400(api):
    response = api.request("POST", "/v1/completions", data={"prompt": "x"})
    assert "content type" in error_of(response, 400)["message"]


def test_lone_surrogates_and_control_characters_are_text(api):
    raw = rb'{"prompt": "a\ud800b \ud83d\ude42 \\ud800 \u0000\ufeff", "echo": true}'
    headers = {"content-type": "application/json"}
    response = api.request("POST", "/v1/completions", content=raw, headers=headers)
    text = response.json()["choices"][0]["text"]
    assert text.startswith("a\ufffdb 🙂 \\ud800 \x00\ufeff")


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_a_413(make_api, declared):
    api = make_api(max_body_bytes=1000).load()
    body = json.dumps({"prompt": "x" * 2000}).encode()

    async def pieces():
        yield body[:500]
        yield body[500:]

    headers = {"content-type": "application/json"}
    content = body if declared else pieces()
    response = api.request("POST", "/v1/completions", content=content, headers=headers)
    assert error_of(response, 413)["code"] == "body_too_large"


def test_prompts_that_do_not_fit_say_so_in_a_code(api):
    for body in ({"prompt": "x" * 256}, {"prompt": "x" * 200, "max_tokens": 100}):
        error = error_of(api.post("/v1/completions", body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "256" in error["message"]
    error = error_of(api.chat("x" * 300), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_an_unknown_model_is_a_404(api):
    error = error_of(api.complete(model="gpt"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    error_of(api.chat(model="gpt"), 404)
    error_of(api.get("/v1/models/gpt"), 404)


def test_unknown_paths_and_wrong_methods_have_json_bodies(api):
    error_of(api.get("/v1/embeddings"), 404)
    error_of(api.get("/"), 404)
    error_of(api.post("/v1/completions/", {"prompt": "x"}), 404)
    response = api.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_requests_get_a_503_with_retry_after_while_loading(make_api):
    api = make_api()
    for response in (api.complete(), api.chat(), api.get("/v1/models")):
        error_of(response, 503)
        assert int(response.headers["retry-after"]) > 0


def test_a_full_queue_is_a_503_and_nothing_of_the_request_stays(make_api):
    api = make_api(max_waiting=2).load()
    api.model.script.gate = threading.Event()
    handles = []
    from megakernel_serve.engine import Request

    for _ in range(3):
        handles.append(api.service.engine.submit(Request((1,) * 20, 1)))
    eventually(lambda: api.service.engine.status().running == 2)
    response = api.complete(n=2)
    error_of(response, 503)
    assert response.headers["retry-after"] == "1"
    assert api.service.engine.status().waiting == 1


def test_a_model_failure_is_a_500_without_a_traceback(api):
    api.model.script.fail_decode = RuntimeError("boom\n  File /secret/path")
    error = error_of(api.complete(), 500)
    assert error["message"] == "the model failed: boom"
    api.model.script.fail_decode = None
    assert api.complete().status_code == 200
    assert api.get("/health").status_code == 200


def test_a_failure_in_a_stream_is_an_error_event(api):
    api.model.script.fail_decode = RuntimeError("boom")
    response = api.complete(stream=True)
    assert response.status_code == 200
    *_, error, done, _ = response.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the model failed: boom"
    assert done == "data: [DONE]"


def test_an_engine_that_is_gone_shows_in_health(api):
    api.model.script.fail_decode = RuntimeError("boom")
    api.model.script.fail_init = RuntimeError("gone")
    error_of(api.complete(), 500)
    eventually(lambda: api.get("/health").status_code == 503)
    assert api.get("/health").json()["status"] == "failed"
    error_of(api.complete(), 500)


def test_an_unexpected_error_is_a_500_that_tells_nothing(api, monkeypatch):
    def broken(*_):
        raise KeyError("secret")

    monkeypatch.setattr(api.model.chat_format, "render", broken)
    assert "secret" not in error_of(api.chat(), 500)["message"]


def test_what_nests_too_deeply_for_the_format_is_a_400(api, monkeypatch):
    def endless(*arguments):
        return endless(*arguments)

    monkeypatch.setattr(api.model.chat_format, "render", endless)
    assert error_of(api.chat(), 400)["param"] == "messages"


VALUES = [None, True, False, 0, 1, -1, 2**70, 0.5, "", "x", [], ["x"], [1], {}, {"type": "text"}]
FIELDS = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "echo"),
    *("min_tokens", "stream", "stream_options", "tools", "tool_choice", "reasoning_effort"),
    *("chat_template_kwargs", "parallel_tool_calls", "response_format", "logprobs"),
    *("include_stop_str_in_output", "tokens", "return_token_strs", "add_special_tokens"),
]


@pytest.mark.parametrize("seed", range(4))
def test_no_mix_of_values_makes_the_server_fail(api, seed):
    """Random bodies: any answer but a 500, and the engine is free afterwards."""
    chosen = random.Random(seed)
    for _ in range(60):
        path = chosen.choice(["/v1/completions", "/v1/chat/completions", "/tokenize"])
        body = {"prompt": "x", "messages": [USER], "max_tokens": 3}
        body |= {name: chosen.choice(VALUES) for name in chosen.sample(FIELDS, 2)}
        response = api.post(path, body)
        assert response.status_code in (200, 400, 404), (path, body, response.text)
    eventually(lambda: api.service.engine.status().running == 0)


def test_a_draining_server_refuses_new_requests(api):
    api.service.begin_drain()
    error_of(api.complete(), 503)
    assert api.get("/health").json()["status"] == "draining"


def ask_asgi(app, body, receive_next, send):
    """One request through ASGI itself, where the test plays the HTTP server."""
    first = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
    messages = [first]

    async def receive():
        return messages.pop(0) if messages else await receive_next()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
        "server": ("test", 80),
        "client": ("test", 1),
        "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }

    async def go():
        await asyncio.wait_for(app(scope, receive, send), 10)

    asyncio.run(go())


ENDLESS = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_message_frees_the_engine(api, stream):
    api.model.script.decode_gate = threading.Event()

    async def receive_next():
        while api.service.engine.status().running == 0:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    ask_asgi(api.app, ENDLESS | {"stream": stream}, receive_next, send)
    api.model.script.decode_gate.set()
    eventually(lambda: api.service.engine.status().running == 0)
    assert sum(call[0] == "decode" for call in api.model.calls) < 50


@pytest.mark.parametrize("sent_before", [0, 2])
def test_a_send_that_fails_frees_the_engine(api, sent_before):
    api.model.script.step_seconds = 0.01
    sent = []

    async def send(message):
        if len(sent) == sent_before:
            raise OSError("the client has left")
        sent.append(message)

    async def receive_next():
        await asyncio.sleep(3600)

    ask_asgi(api.app, ENDLESS | {"stream": True}, receive_next, send)
    eventually(lambda: api.service.engine.status().running == 0)
    assert sum(call[0] == "decode" for call in api.model.calls) < 150
