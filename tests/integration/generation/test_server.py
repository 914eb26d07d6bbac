"""A real server with the embedded model, asked by the usual client library."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "Tell me about lists."}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


def chat(client, **fields):
    fields = {"temperature": 0, "max_tokens": 12} | fields
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)


def complete(client, prompt="import os", **fields):
    fields = {"temperature": 0, "max_tokens": 12} | fields
    answer = client.completions.create(model="tiny", prompt=prompt, **fields)
    return answer.choices[0]


def test_the_model_is_listed_under_its_name(client):
    (model,) = client.models.list()
    assert (model.id, model.max_model_len) == ("tiny", 512)
    assert client.models.retrieve("tiny").root == "embedded"


@pytest.mark.parametrize("thinking", [True, False])
def test_a_streamed_answer_is_the_plain_one(client, thinking):
    extra = {"chat_template_kwargs": {"enable_thinking": thinking}}
    plain = chat(client, extra_body=extra)
    chunks = list(chat(client, extra_body=extra, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    streamed = ["".join(getattr(d, name, None) or "" for d in deltas) for name in CHANNELS]
    message = plain.choices[0].message
    assert streamed == [getattr(message, name, None) or "" for name in CHANNELS]
    assert bool(streamed[0]) == thinking
    assert "".join(streamed)
    assert plain.usage.completion_tokens == 12


CHANNELS = ("reasoning_content", "content")


def test_a_prompt_of_ids_is_the_prompt_of_its_text(client, server):
    ids = httpx.post(f"{server}/tokenize", json={"prompt": "import os"}, timeout=60).json()
    by_text, by_ids = complete(client), complete(client, ids["tokens"])
    assert by_ids.text == by_text.text != ""
    stream = client.completions.create(
        model="tiny", prompt=ids["tokens"], temperature=0, max_tokens=12, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == by_text.text


def test_the_command_line_gives_the_servers_text(client, megakernel):
    done = megakernel("generate", "import os", "--max-tokens", 12, "--temperature", 0)
    assert done.stdout == f"import os{complete(client).text}\n"


def test_requests_in_company_get_the_answers_they_get_alone(client):
    def ask(number):
        prompt = f"for i in range({number}):" * (1 + number % 3)
        return complete(client, prompt, temperature=1, seed=number, max_tokens=8 + number).text

    numbers = range(7)  # more than rows
    alone = [ask(number) for number in numbers]
    assert len(set(alone)) == len(alone)
    with ThreadPoolExecutor(len(numbers)) as pool:
        assert list(pool.map(ask, numbers)) == alone


def test_a_stop_string_cuts_the_text_before_it(client):
    whole = complete(client).text
    stop = whole[5:9]
    assert whole.find(stop) <= 5
    choice = complete(client, stop=[stop])
    assert choice.text == whole[: whole.find(stop)]
    assert choice.finish_reason == "stop"
    assert complete(client, stop=["no such text"]).text == whole


def test_a_client_that_leaves_stops_its_request(client, server):
    def running():
        return httpx.get(f"{server}/health", timeout=60).json()["running"]

    stream = client.completions.create(
        model="tiny",
        prompt="while True:",
        max_tokens=400,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    before = running()
    stream.close()
    left = time.monotonic()
    while running() and time.monotonic() < left + 30:
        time.sleep(0.02)
    assert (before, running()) == (1, 0)
    # Other rows are free for others at once.
    assert complete(client).text == complete(client).text


def test_tools_reach_the_model_and_its_answer_is_read(client):
    without, with_tools = chat(client), chat(client, tools=[LOOK])
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens
    assert with_tools.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_forced_tool_is_called_by_name(client):
    forced = {"type": "function", "function": {"name": "look"}}
    answer = chat(client, tools=[LOOK], tool_choice=forced, stream=True)
    names = [
        call.function.name
        for chunk in answer
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
        if call.function and call.function.name
    ]
    assert names == ["look"]
