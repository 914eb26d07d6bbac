"""``/v1/completions`` in process."""

from __future__ import annotations

import pytest
from bigram import events


def test_a_prompt_is_continued_and_accounted_for(api):
    body = api.complete().json()
    (choice,) = body["choices"]
    end = api.model.tokenizer.token_to_id("<end>")
    length = len(api.model.tokenizer.encode("hello world").ids)
    assert choice["text"] == "hello world"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", end)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "bigram"
    usage = body["usage"]
    assert usage["prompt_tokens"] == 2
    assert usage["completion_tokens"] == length + 1  # the end id counts
    assert usage["total_tokens"] == 2 + length + 1
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_max_tokens_defaults_to_16(api):
    api.model.script.default = "x" * 40
    body = api.post("/v1/completions", {"prompt": "hi"}).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


def test_the_default_is_clipped_to_the_context(api):
    body = api.post("/v1/completions", {"prompt": "x" * 250, "ignore_eos": True})
    assert body.json()["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_are_answered_in_order(api, as_ids):
    api.model.script.replies = {"aaa": "hello a", "bbb": "hello b, later"}
    prompts = ["bbb", "aaa"]
    if as_ids:
        prompts = [api.model.tokenizer.encode(text).ids for text in prompts]
    body = api.complete(prompt=prompts, n=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == ["hello b, later"] * 2 + ["hello a"] * 2
    assert body["usage"]["prompt_tokens"] == 6  # each prompt once


def test_ids_are_a_prompt_of_their_own(api):
    body = api.complete(prompt=api.model.tokenizer.encode("hi").ids, echo=True).json()
    assert body["choices"][0]["text"] == "hihello world"


def test_echo_without_generation_returns_the_prompt(api):
    body = api.complete(prompt="some text", echo=True, max_tokens=0).json()
    assert body["choices"][0]["text"] == "some text"
    assert body["usage"]["completion_tokens"] == 0
    assert not api.model.calls


def test_a_stop_string_cuts_text_tokens_and_usage(api):
    body = api.complete(stop=["wor", "zzz"]).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "hello ",
        "stop",
        "wor",
    )
    length = len(api.model.tokenizer.encode("hello wor").ids)
    assert body["usage"]["completion_tokens"] == length


def test_the_stop_string_can_be_kept(api):
    body = api.complete(stop="wor", include_stop_str_in_output=True).json()
    assert body["choices"][0]["text"] == "hello wor"


def test_a_stop_string_never_matches_in_the_echoed_prompt(api):
    body = api.complete(prompt="zzz", echo=True, stop="zzz").json()
    assert body["choices"][0]["text"] == "zzzhello world"


def test_a_stream_carries_the_same_text_in_the_same_envelope(api):
    api.model.script.default = "hello 🙂 world"
    chunks = events(api.complete(stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello 🙂 world"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks)


def test_a_stream_ends_with_usage_if_asked(api):
    chunks = events(api.complete(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == api.complete().json()["usage"]


def test_a_stream_begins_with_the_echo(api):
    chunks = events(api.complete(stream=True, echo=True, prompt="hey"))
    assert chunks[0]["choices"][0]["text"] == "hey"


def test_streamed_choices_each_end_once_and_after_their_text(api):
    api.model.script.replies = {"aaa": "hello a", "bbb": "hello b, later"}
    chunks = events(api.complete(prompt=["aaa", "bbb"], n=2, stream=True))
    for index, text in enumerate(["hello a"] * 2 + ["hello b, later"] * 2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [bool(choice["finish_reason"]) for choice in own] == [False] * (len(own) - 1) + [
            True
        ]


def test_a_seed_makes_sampling_repeatable_and_choices_differ(api):
    import numpy as np

    flat = np.zeros(api.model.info.vocab_size, np.float32)
    api.model._logits = lambda seen: flat
    sampled = {"temperature": 1.5, "seed": -3, "n": 2, "max_tokens": 12, "ignore_eos": True}
    first = [choice["text"] for choice in api.complete(**sampled).json()["choices"]]
    again = [choice["text"] for choice in api.complete(**sampled).json()["choices"]]
    assert first == again
    assert first[0] != first[1]


def test_the_checkpoints_defaults_hold_below_the_servers_and_the_requests(make_api, monkeypatch):
    from dataclasses import replace

    from megakernel_serve.api.generation import engine_requests
    from megakernel_serve.api.schema import CompletionRequest

    api = make_api(defaults={"top_k": 5, "seed": 9}).load()
    api.model.generation = replace(api.model.generation, temperature=0.5, top_k=7, top_p=0.9)
    body = CompletionRequest(prompt="x", top_p=0.8, n=2)
    first, second = engine_requests(api.service, body, (1,), None, 16)
    chosen = first.sampling
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed) == (0.5, 5, 0.8, 9)
    assert second.sampling.seed == 10


def test_top_k_of_minus_one_keeps_all(api):
    assert api.complete(top_k=-1, temperature=0.5, seed=1).json()["choices"][0]["text"]


def test_padding_ids_can_be_sampled_without_harm(api):
    import numpy as np

    padding = np.zeros(api.model.info.vocab_size, np.float32)
    padding[-1] = 9.0
    api.model._logits = lambda seen: padding
    body = api.complete(max_tokens=5).json()
    assert body["choices"][0]["text"] == ""
    assert body["usage"]["completion_tokens"] == 5
