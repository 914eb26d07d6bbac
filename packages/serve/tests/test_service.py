"""Health, models, tokenising, keys, CORS, request ids: in process."""

from __future__ import annotations

import threading

import pytest
from bigram import eventually
from megakernel_serve.loading import LoadedModel


def test_health_is_503_until_the_model_is_loaded(make_api):
    api = make_api()
    assert api.get("/health").status_code == 503
    assert api.get("/health").json() == {"status": "loading"}
    api.load()
    response = api.get("/health")
    assert response.status_code == 200
    assert response.json()["status"] == "ok"


def test_loading_happens_in_a_thread_and_its_failure_is_kept(make_api):
    api = make_api()
    go, ready, failed = threading.Event(), threading.Event(), threading.Event()

    def load():
        assert go.wait(10)
        return LoadedModel(api.model, api.model.tokenizer, api.model.chat_format)

    api.service.load_in_background(load, ready.set, failed.set)
    assert api.get("/health").json() == {"status": "loading"}
    go.set()
    assert ready.wait(10)
    assert api.complete().status_code == 200

    def broken():
        raise ValueError("no such file")

    other = make_api()
    other.service.load_in_background(broken, ready.set, failed.set)
    assert failed.wait(10)
    assert str(other.service.load_error) == "no such file"
    assert other.get("/health").json() == {"status": "failed"}
    assert other.complete().json()["error"]["code"] == "load_failed"


def test_a_model_that_fails_its_first_run_is_never_ready(make_api):
    api = make_api()
    api.model.script.fail_decode = RuntimeError("boom")
    failed = threading.Event()
    loaded = LoadedModel(api.model, api.model.tokenizer, None)
    api.service.load_in_background(lambda: loaded, failed=failed.set)
    assert failed.wait(10)
    assert "boom" in str(api.service.load_error)
    assert api.get("/health").json() == {"status": "failed"}


def test_health_notices_a_call_that_hangs(api, monkeypatch):
    from megakernel_serve.api import service

    monkeypatch.setattr(service, "STALL_SECONDS", 0.05)
    api.model.script.gate = threading.Event()
    from megakernel_serve.engine import Request

    handle = api.service.engine.submit(Request((1,), 1))
    eventually(lambda: api.get("/health").json()["status"] == "stalled")
    assert api.get("/health").status_code == 503
    api.model.script.gate.set()
    handle.result()
    eventually(lambda: api.get("/health").status_code == 200)


def test_health_counts_what_runs_and_waits(api):
    api.model.script.gate = threading.Event()
    from megakernel_serve.engine import Request

    for _ in range(3):
        api.service.engine.submit(Request((1,), 1))
    eventually(lambda: api.get("/health").json()["running"] == 2)
    assert api.get("/health").json()["waiting"] == 1


def test_a_model_that_arrives_after_shutdown_is_not_started(make_api):
    api = make_api()
    api.service.shutdown(1)
    api.load()
    assert api.get("/health").json()["status"] == "draining"
    assert api.complete().status_code == 503


def test_every_served_name_is_a_model(make_api):
    api = make_api(model_names=("org/main", "alias")).load()
    listed = api.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["org/main", "alias"]
    one = api.get("/v1/models/org/main").json()
    assert one == listed["data"][0]
    assert one["max_model_len"] == 256
    assert api.complete(model="alias").json()["model"] == "alias"
    assert api.complete().json()["model"] == "org/main"
    assert api.complete(model="bigram").status_code == 404


def test_the_version_is_told(api):
    from megakernel_serve import __version__

    assert api.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("root", ["", "/v1"])
def test_text_and_ids_round_trip(api, root):
    body = api.post(f"{root}/tokenize", {"prompt": "hello 🙂", "return_token_strs": True}).json()
    assert body["tokens"] == api.model.tokenizer.encode("hello 🙂").ids
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 256
    back = api.post(f"{root}/detokenize", {"tokens": body["tokens"]}).json()
    assert back == {"prompt": "hello 🙂"}


def test_a_conversation_can_be_tokenised(api):
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "chat_template_kwargs": {"thinking": True}}
    tokens = api.post("/tokenize", body).json()["tokens"]
    assert api.model.tokenizer.decode(tokens, skip_special_tokens=False) == "<user>hello<think>"


def test_bad_tokenise_requests_are_refused(api):
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
        assert api.post("/tokenize", body).status_code == 400
    messages = [{"role": "user", "content": "x"}]
    refused = api.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert refused.json()["error"]["code"] == "unsupported_parameter"
    for tokens in ([-1], ["x"], "x", [1.5], None):
        assert api.post("/detokenize", {"tokens": tokens}).status_code == 400
    assert api.post("/detokenize", {"tokens": [10**12]}).json() == {"prompt": ""}


def test_keys_guard_everything_but_health_version_and_preflight(make_api):
    api = make_api(api_keys=("first", "second")).load()
    for response in (api.get("/v1/models"), api.complete(), api.post("/tokenize", {})):
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    for value in ("Bearer wrong", "Basic first", "first", "Bearer", "Bearer \xe9"):
        headers = {"authorization": value.encode("latin-1")}
        assert api.get("/v1/models", headers=headers).status_code == 401
    for value in ("Bearer first", "bearer second"):
        assert api.get("/v1/models", headers={"authorization": value}).status_code == 200
    assert api.get("/health").status_code == 200
    assert api.get("/version").status_code == 200
    preflight = {"origin": "http://page", "access-control-request-method": "POST"}
    assert api.request("OPTIONS", "/v1/completions", headers=preflight).status_code == 200


def test_pages_of_allowed_origins_may_read_answers_and_errors(make_api):
    api = make_api(cors_origins=("http://page",)).load()
    for response in (
        api.get("/v1/models", headers={"origin": "http://page"}),
        api.get("/nope", headers={"origin": "http://page"}),
    ):
        assert response.headers["access-control-allow-origin"] == "http://page"
    other = api.get("/v1/models", headers={"origin": "http://other"})
    assert "access-control-allow-origin" not in other.headers


def test_request_ids_are_kept_if_they_are_fit_for_a_log(api):
    assert api.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("a b", "x" * 200, "é".encode("latin-1"), ""):
        given = api.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert len(given) == 32
    first, second = api.get("/health"), api.get("/health")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


def test_a_model_without_a_chat_format_still_completes(make_api):
    api = make_api()
    api.service.attach(LoadedModel(api.model, api.model.tokenizer, None))
    response = api.chat()
    assert response.status_code == 400
    assert "no chat format" in response.json()["error"]["message"]
    assert api.complete().status_code == 200
