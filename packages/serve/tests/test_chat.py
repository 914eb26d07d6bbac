"""``/v1/chat/completions`` in process."""

from __future__ import annotations

import json

import pytest
from bigram import events

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<call>look{"at":"sky"}</call>'


def message(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def test_a_conversation_is_answered(api):
    body = api.chat().json()
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hello world",
        "reasoning_content": None,
        "reasoning": None,
    }
    assert choice["finish_reason"] == "stop"
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")


def test_all_of_the_context_may_be_used_by_default(api):
    body = api.chat(ignore_eos=True).json()
    assert body["usage"]["total_tokens"] == api.model.info.max_context


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
    ],
)
def test_the_newer_limit_wins(api, fields, tokens):
    assert api.chat(**fields).json()["usage"]["completion_tokens"] == tokens


def test_reasoning_is_reported_under_both_names_and_counted(api):
    api.model.script.default = "hmm.</think>hello"
    body = api.chat(chat_template_kwargs={"enable_thinking": True}).json()
    answer = body["choices"][0]["message"]
    assert answer["reasoning_content"] == answer["reasoning"] == "hmm."
    assert answer["content"] == "hello"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_an_answer_that_is_all_reasoning_has_null_content(api):
    api.model.script.default = "hmm"
    assert message(api.chat(chat_template_kwargs={"thinking": True}))["content"] is None


def test_the_servers_thinking_default_can_be_overruled(make_api):
    api = make_api(thinking=True).load()
    api.model.script.default = "hello"
    assert message(api.chat())["reasoning"] == "hello"
    assert message(api.chat(chat_template_kwargs={"thinking": False}))["reasoning"] is None
    assert message(api.chat(reasoning_effort="none"))["reasoning"] is None


def test_calls_become_tool_calls(api):
    api.model.script.default = CALL
    response = api.chat(tools=TOOLS)
    answer = message(response)
    (call,) = answer["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "look", "arguments": '{"at":"sky"}'}
    assert answer["content"] is None
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_was_cut_off_is_left_out_and_length_wins(api):
    api.model.script.default = CALL * 2
    length = len(api.model.tokenizer.encode(CALL).ids)
    response = api.chat(tools=TOOLS, max_tokens=length + 8)
    assert len(message(response)["tool_calls"]) == 1
    assert response.json()["choices"][0]["finish_reason"] == "length"


def test_only_the_first_call_is_kept_without_parallel_calls(api):
    api.model.script.default = CALL * 2
    assert len(message(api.chat(tools=TOOLS))["tool_calls"]) == 2
    answer = message(api.chat(tools=TOOLS, parallel_tool_calls=False))
    assert len(answer["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_calls_that_nobody_asked_for_do_not_surface(api, fields):
    api.model.script.default = "hello" + CALL
    response = api.chat(**fields)
    assert "tool_calls" not in message(response)
    assert message(response)["content"] == "hello"
    assert response.json()["choices"][0]["finish_reason"] == "stop"


def test_a_named_choice_finishes_with_stop(api):
    api.model.script.default = CALL
    choice = {"type": "function", "function": {"name": "look"}}
    response = api.chat(tools=TOOLS, tool_choice=choice)
    assert message(response)["tool_calls"]
    assert response.json()["choices"][0]["finish_reason"] == "stop"


def test_a_stream_starts_with_the_role_and_ends_with_the_reason(api):
    chunks = events(api.chat(stream=True))
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in middle) == "hello world"
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_streamed_reasoning_comes_before_content(api):
    api.model.script.default = "hmm.</think>hello"
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(api.chat(chat_template_kwargs={"thinking": True}, **fields))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:-2]]
    reasoning = [delta for delta in deltas if "reasoning" in delta]
    assert deltas[: len(reasoning)] == reasoning
    assert "".join(delta["reasoning_content"] for delta in reasoning) == "hmm."
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_streamed_calls_send_the_name_first_and_arguments_in_pieces(api):
    api.model.script.default = CALL * 2
    chunks = events(api.chat(tools=TOOLS, stream=True))
    deltas = [
        chunk["choices"][0]["delta"]["tool_calls"][0]
        for chunk in chunks
        if "tool_calls" in chunk["choices"][0]["delta"]
    ]
    for index in (0, 1):
        first, *rest = [delta for delta in deltas if delta["index"] == index]
        assert first["function"] == {"name": "look", "arguments": ""}
        assert first["id"]
        assert len(rest) > 2
        assert all(set(delta) == {"index", "function"} for delta in rest)
        assert json.loads("".join(delta["function"]["arguments"] for delta in rest)) == {
            "at": "sky"
        }
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_messages_reach_the_format_in_its_own_terms(api, monkeypatch):
    seen = {}
    original = api.model.chat_format.render

    def render(messages, options):
        seen.update(messages=messages, options=options)
        return original(messages, options)

    monkeypatch.setattr(api.model.chat_format, "render", render)
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sky"},
    ]
    body = {"messages": messages, "tools": TOOLS, "reasoning_effort": "low", "unknown": 1}
    response = api.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    system, user, assistant, tool = seen["messages"]
    assert system == {"role": "system", "content": "be brief"}
    assert user["content"] == [{"type": "text", "text": "look"}]
    assert assistant["content"] == ""
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert tool["tool_call_id"] == "1"
    assert list(seen["options"].tools) == TOOLS
    assert seen["options"].effort == "low"


def test_what_the_format_refuses_is_a_400_with_its_field(api):
    response = api.chat(reasoning_effort="xhigh")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reasoning_effort"
    body = {"messages": [{"role": "assistant", "content": "x"}]}
    response = api.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
