"""Rendering: expected prompts are spelled piece by piece, each piece encoded on its own.

The pieces follow the published rules of the format. No prompt of the checkpoint's own code is
compared, since that code is not part of this project.
"""

import json

import pytest
from kda_mla_kernels.chat import ChatError, ChatFormat, ChatOptions
from megakernel_kimi.chat import KimiChatFormat

OFF = ChatOptions(thinking=False)
MAX = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the"
    " response channel), supported values include `low`, `medium`, `high`, and `max`.\nNow the"
    " system is invoked with `thinking_effort=max`."
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Grüße & more",
        "parameters": {"type": "object", "properties": {"b": {"default": None}, "a": {}}},
    },
}
WEATHER_JSON = (
    '[{"function":{"description":"Grüße & more","name":"weather","parameters":{"properties":'
    '{"a":{},"b":{"default":null}},"type":"object"}},"type":"function"}]'
)


@pytest.fixture(scope="module")
def chat(tokenizer):
    return KimiChatFormat(tokenizer)


@pytest.fixture(scope="module")
def spell(tokenizer):
    """Ids of pieces; ‹name› stands for a control token."""
    controls = {
        "‹open›": "<|open|>",
        "‹close›": "<|close|>",
        "‹sep›": "<|sep|>",
        "‹eom›": "<|end_of_msg|>",
    }

    def ids(*pieces):
        result = []
        for piece in pieces:
            if piece in controls:
                result.append(tokenizer.special_id(controls[piece]))
            else:
                result += tokenizer.text.encode(piece).ids
        return tuple(result)

    return ids


def opened(tag, *attributes):
    pieces = ["‹open›", tag]
    for key, value in attributes:
        pieces += [f" {key}", '="', value, '"']
    return [*pieces, "‹sep›"]


def closed(tag):
    return ["‹close›", tag, "‹sep›"]


def message(role, *body, extra=()):
    return [*opened("message", ("role", role), *extra), *body, *closed("message"), "‹eom›"]


def internal(kind, body):
    return message("system", body, extra=[("type", kind)])


RESPONSE = [*opened("message", ("role", "assistant")), *opened("response")]
THINK = [*opened("message", ("role", "assistant")), *opened("think")]
USER = {"role": "user", "content": "hi"}


def test_the_format_fulfils_the_contract(chat, tokenizer):
    assert isinstance(chat, ChatFormat)
    stops = {tokenizer.special_id("<|end_of_msg|>"), tokenizer.special_id("[EOS]")}
    assert chat.stop_ids == stops


def test_a_user_turn_without_thinking_is_the_published_example(chat, spell):
    rendered = chat.render([USER], OFF)
    pieces = ["‹open›", "message", " role", '="', "user", '"', "‹sep›", "hi", "‹close›", "message"]
    pieces += ["‹sep›", "‹eom›", "‹open›", "message", " role", '="', "assistant", '"', "‹sep›"]
    assert rendered.token_ids == spell(*pieces, "‹open›", "response", "‹sep›")
    assert not rendered.thinking


def test_thinking_is_on_by_default_with_the_highest_effort(chat, spell):
    rendered = chat.render([USER], ChatOptions())
    expected = [*internal("thinking-effort", MAX), *message("user", "hi"), *THINK]
    assert rendered.token_ids == spell(*expected)
    assert rendered.thinking


def test_pieces_are_encoded_one_by_one(chat, spell):
    # The rank table merges across the border of these pieces.
    assert spell('="<x"') != spell('="', "<x", '"')
    rendered = chat.render([USER | {"name": "<x"}], OFF)
    expected = [*message("user", "hi", extra=[("name", "<x")]), *RESPONSE]
    assert rendered.token_ids == spell(*expected)


def test_parts_of_a_content_are_encoded_one_by_one_without_separator(chat, spell):
    content = [{"type": "text", "text": "mess"}, {"type": "text", "text": "age"}]
    rendered = chat.render([{"role": "user", "content": content}], OFF)
    assert rendered.token_ids == spell(*message("user", "mess", "age"), *RESPONSE)
    assert spell("message") != spell("mess", "age")


def test_what_looks_like_a_marker_in_a_text_is_ordinary_text(chat, tokenizer):
    text = "<|close|>message<|sep|><|end_of_msg|>[EOS]"
    rendered = chat.render([{"role": "user", "content": text}], OFF)
    plain = chat.render([USER], OFF)
    for name in ("<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]"):
        marker = tokenizer.special_id(name)
        assert rendered.token_ids.count(marker) == plain.token_ids.count(marker)


def test_attribute_values_are_escaped_and_bodies_are_not(chat, spell):
    rendered = chat.render([{"role": "user", "name": 'a&"<b>', "content": 'a&"<b>'}], OFF)
    expected = message("user", 'a&"<b>', extra=[("name", "a&amp;&quot;<b>")])
    assert rendered.token_ids == spell(*expected, *RESPONSE)


def test_a_developer_speaks_as_the_system_and_nothing_is_trimmed(chat, spell):
    messages = [
        {"role": "developer", "content": " a "},
        {"role": "system", "content": "\n"},
        {"role": "user", "content": ""},
    ]
    expected = [*message("system", " a "), *message("system", "\n"), *message("user"), *RESPONSE]
    assert chat.render(messages, OFF).token_ids == spell(*expected)


def test_tools_are_declared_first_with_sorted_compact_json(chat, spell):
    body = (
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
        f"```json\n{WEATHER_JSON}\n```"
    )
    rendered = chat.render([USER], ChatOptions(tools=[WEATHER]))
    expected = [*internal("tool-declare", body), *internal("thinking-effort", MAX)]
    assert rendered.token_ids == spell(*expected, *message("user", "hi"), *THINK)


def test_strict_is_declared_if_given_and_other_keys_are_not(chat, spell):
    tool = {"type": "function", "function": {"name": "f", "strict": True, "other": 1}, "x": 2}
    payload = '[{"function":{"name":"f","parameters":null,"strict":true},"type":"function"}]'
    body = (
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
        f"```json\n{payload}\n```"
    )
    rendered = chat.render([USER], ChatOptions(tools=[tool], thinking=False))
    expected = [*internal("tool-declare", body), *message("user", "hi"), *RESPONSE]
    assert rendered.token_ids == spell(*expected)


@pytest.mark.parametrize("text", [None, "", "Use it."])
def test_tools_may_be_added_in_the_middle_of_a_conversation(chat, spell, text):
    body = (
        "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        f"Here are the specs for the extended tools.\n\n```json\n{WEATHER_JSON}\n```"
    )
    added = {"role": "developer", "tools": [WEATHER], "content": text}
    rendered = chat.render([USER, added], OFF)
    expected = [*message("user", "hi"), *internal("tool-declare", body)]
    expected += message("system", text) if text else []
    assert rendered.token_ids == spell(*expected, *RESPONSE)
    assert rendered.start.calls


CHOICE = {
    "required": (
        "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next"
        " message."
    ),
    "none": (
        "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next"
        " message."
    ),
}


@pytest.mark.parametrize("choice", ["required", "none"])
def test_a_tool_choice_is_said_after_the_conversation(chat, spell, choice):
    options = ChatOptions(tools=[WEATHER], tool_choice=choice, thinking=False)
    plain = chat.render([USER], ChatOptions(tools=[WEATHER], thinking=False)).token_ids
    head = plain[: len(plain) - len(spell(*RESPONSE))]
    expected = head + spell(*internal("tool-choice", CHOICE[choice]), *RESPONSE)
    assert chat.render([USER], options).token_ids == expected


def test_a_choice_of_none_is_only_said_where_tools_are_declared(chat, spell):
    options = ChatOptions(tool_choice="none", thinking=False)
    assert chat.render([USER], options).token_ids == chat.render([USER], OFF).token_ids
    later = [USER, {"role": "system", "tools": [WEATHER]}]
    tail = spell(*internal("tool-choice", CHOICE["none"]), *RESPONSE)
    assert chat.render(later, options).token_ids[-len(tail) :] == tail


@pytest.mark.parametrize("thinking", [True, False])
def test_a_named_function_is_forced_by_beginning_its_call(chat, spell, thinking):
    choice = {"type": "function", "function": {"name": "weather"}}
    options = ChatOptions(tools=[WEATHER], tool_choice=choice, thinking=thinking)
    plain = chat.render([USER], ChatOptions(tools=[WEATHER], thinking=thinking)).token_ids
    prefix = THINK if thinking else RESPONSE
    expected = opened("message", ("role", "assistant"))
    expected += [*opened("think"), *closed("think")] if thinking else []
    expected += [*opened("tools"), *opened("call", ("tool", "weather"), ("index", "1"))]
    rendered = chat.render([USER], options)
    assert rendered.token_ids == plain[: len(plain) - len(spell(*prefix))] + spell(*expected)
    assert not rendered.thinking


RAW = (
    "\nYour response must be raw JSON data without markdown code blocks (```json) or any"
    " additional formatting."
)


@pytest.mark.parametrize(
    ("wanted", "body"),
    [
        ({"type": "json_object"}, "`response_format=json_object`." + RAW),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 1, "a": "ü"}}},
            f"`response_format=json_schema`.{RAW}\nThe JSON data must match the following schema:"
            '\n```json\n{"a":"ü","b":1}\n```',
        ),
        (
            {"type": "json_schema", "json_schema": {"type": "object"}},
            f"`response_format=json_schema`.{RAW}\nThe JSON data must match the following schema:"
            '\n```json\n{"type":"object"}\n```',
        ),
    ],
)
def test_a_response_format_is_said_last(chat, spell, wanted, body):
    options = ChatOptions(
        tools=[WEATHER], tool_choice="none", response_format=wanted, thinking=False
    )
    tail = internal("tool-choice", CHOICE["none"])
    tail += internal("response-format", "The system is invoked with " + body)
    expected = spell(*tail, *RESPONSE)
    assert chat.render([USER], options).token_ids[-len(expected) :] == expected


def test_a_response_format_of_text_says_nothing(chat):
    options = ChatOptions(response_format={"type": "text"}, thinking=False)
    assert chat.render([USER], options).token_ids == chat.render([USER], OFF).token_ids


def call(name, arguments, id=None):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("reasoning", [None, "  \n", "I see. "])
def test_earlier_reasoning_is_kept_and_its_channel_is_there_even_if_empty(
    chat, spell, thinking, reasoning
):
    answer = {"role": "assistant", "content": "yes", "reasoning_content": reasoning}
    rendered = chat.render([USER, answer, USER], ChatOptions(thinking=thinking))
    think = [reasoning] if reasoning and reasoning.strip() else []
    body = [*opened("think"), *think, *closed("think")] if thinking else []
    body += [*opened("response"), "yes", *closed("response")]
    expected = internal("thinking-effort", MAX) if thinking else []
    expected += [*message("user", "hi"), *message("assistant", *body), *message("user", "hi")]
    assert rendered.token_ids == spell(*expected, *(THINK if thinking else RESPONSE))


def test_reasoning_is_read_under_either_of_its_names(chat):
    one, other = (
        chat.render([USER, {"role": "assistant", "content": "a", name: "because"}], ChatOptions())
        for name in ("reasoning", "reasoning_content")
    )
    assert one.token_ids == other.token_ids


def test_call_arguments_become_typed_elements_in_the_given_order(chat, spell):
    arguments = {
        "z": ' a "quoted" & <b>\n',
        "n": -1.5,
        "i": 12345678901234567890,
        "t": True,
        "u": None,
        "o": {"b": "ü", "a": [1, 2]},
        "a": [],
        'k"&': "",
    }
    answer = {"role": "assistant", "content": None, "tool_calls": [call("weather", arguments)]}
    as_text = {**answer, "tool_calls": [call("weather", json.dumps(arguments))]}
    elements = [
        ("z", "string", ' a "quoted" & <b>\n'),
        ("n", "number", "-1.5"),
        ("i", "number", "12345678901234567890"),
        ("t", "boolean", "true"),
        ("u", "null", "null"),
        ("o", "object", '{"b":"ü","a":[1,2]}'),
        ("a", "array", "[]"),
        ("k&quot;&amp;", "string", ""),
    ]
    body = [*opened("response"), *closed("response"), *opened("tools")]
    body += opened("call", ("tool", "weather"), ("index", "1"))
    for key, kind, text in elements:
        body += opened("argument", ("key", key), ("type", kind))
        body += [text, *closed("argument")] if text else closed("argument")
    body += [*closed("call"), *closed("tools")]
    expected = spell(*message("user", "hi"), *message("assistant", *body), *RESPONSE)
    assert chat.render([USER, answer], OFF).token_ids == expected
    assert chat.render([USER, as_text], OFF).token_ids == expected


@pytest.mark.parametrize(
    ("arguments", "inner"),
    [
        ("", []),
        ("{}", []),
        (None, []),
        ('{"a": NaN}', [*opened("json", ("type", "object")), '{"a": NaN}', *closed("json")]),
        ('{"a": ', [*opened("json", ("type", "object")), '{"a": ', *closed("json")]),
    ],
)
def test_empty_arguments_have_no_elements_and_broken_ones_stay_text(chat, spell, arguments, inner):
    answer = {"role": "assistant", "tool_calls": [call("f", "{}"), call("f", arguments)]}
    body = [*opened("response"), *closed("response"), *opened("tools")]
    body += [*opened("call", ("tool", "f"), ("index", "1")), *closed("call")]
    body += [*opened("call", ("tool", "f"), ("index", "2")), *inner, *closed("call")]
    expected = message("user", "hi") + message("assistant", *body, *closed("tools"))
    assert chat.render([USER, answer], OFF).token_ids == spell(*expected, *RESPONSE)


def results_of(chat, spell, results):
    calls = [call("f", "{}", "id-a"), call("g", "{}", "id-b"), call("f", "{}", "id-c")]
    head = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    before = chat.render(head, OFF).token_ids
    tail = spell(*RESPONSE)
    after = chat.render([*head, *results], OFF).token_ids
    cut = len(before) - len(tail)
    assert after[:cut] == before[:cut]
    return after[cut : len(after) - len(tail)]


def result(id, text, **more):
    return {"role": "tool", "tool_call_id": id, "content": text, **more}


def shown(name, index, text):
    return message("tool", text, extra=[("tool", name), ("index", str(index))])


def test_tool_results_are_put_in_the_order_of_their_calls(chat, spell):
    given = [result("id-c", "three"), result("id-a", "one"), result("g:1", "two")]
    expected = [*shown("f", 1, "one"), *shown("g", 2, "two"), *shown("f", 3, "three")]
    assert results_of(chat, spell, given) == spell(*expected)


def test_tool_results_stay_as_they_are_if_one_names_no_call(chat, spell):
    given = [result("id-c", "three"), result("x", "who", name="h"), result("id-a", "one")]
    expected = [*shown("f", 3, "three"), *shown("h", 2, "who"), *shown("f", 1, "one")]
    assert results_of(chat, spell, given) == spell(*expected)


def test_a_tool_result_without_call_and_name_is_refused(chat, spell):
    with pytest.raises(ChatError, match="tool_call_id 'x', which is no call of the answer before"):
        results_of(chat, spell, [result("x", "who")])
    with pytest.raises(ChatError, match="no call of the answer before"):
        results_of(chat, spell, [USER, result("id-a", "late")])


@pytest.mark.parametrize(
    ("options", "effort"),
    [
        (ChatOptions(effort="low"), "low"),
        (ChatOptions(effort="high"), "high"),
        (ChatOptions(effort="none"), None),
        (ChatOptions(effort="none", thinking=True), "max"),
        (ChatOptions(effort="low", thinking=False), None),
        (ChatOptions(template_arguments={"enable_thinking": False}), None),
        (ChatOptions(template_arguments={"thinking": False}), None),
        (ChatOptions(template_arguments={"thinking": False}, thinking=True), "max"),
        (ChatOptions(template_arguments={"reasoning_effort": "low"}), "low"),
        (ChatOptions(preserve_thinking=True), "max"),
    ],
)
def test_thinking_controls(chat, spell, options, effort):
    rendered = chat.render([USER], options)
    assert rendered.thinking == (effort is not None)
    body = MAX.replace("thinking_effort=max", f"thinking_effort={effort}")
    expected = internal("thinking-effort", body) if effort else []
    prefix = THINK if effort else RESPONSE
    assert rendered.token_ids == spell(*expected, *message("user", "hi"), *prefix)


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (["hi"], "a message has role None"),
        ([{"role": "function", "content": "x"}], "role 'function'; supported are"),
        ([{"role": "user"}], "content of a user message must be a text"),
        ([{"role": "user", "content": 3}], "must be a text or a list"),
        ([{"role": "user", "content": [IMAGE]}], "type 'image_url'; only 'text'"),
        ([{"role": "user", "content": ["x"]}], "type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must hold a text"),
        ([{"role": "user", "content": "x", "name": 3}], "name must be a text"),
        ([{"role": "user", "content": "a\ud800"}], r"lone surrogate U\+D800"),
        ([{"role": "system", "tools": {"a": 1}}], "tools must be a list"),
        ([{"role": "system", "tools": ["a"]}], "a tool must be"),
        ([{"role": "assistant", "reasoning": 3}], "reasoning must be a text, not int"),
        ([{"role": "assistant", "function_call": {}}], "use tool_calls"),
        ([{"role": "assistant", "tool_calls": {}}], "must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], "a tool call must be"),
        ([{"role": "assistant", "tool_calls": [call("", "")]}], "must be a text, not ''"),
        ([{"role": "assistant", "tool_calls": [call("f", "[1]")]}], "must be a JSON object"),
        ([{"role": "assistant", "tool_calls": [call("f", "3")]}], "must be a JSON object"),
        ([{"role": "assistant", "tool_calls": [call("f", {"a": float("inf")})]}], "as JSON"),
    ],
)
def test_a_message_that_cannot_be_expressed_is_refused(chat, messages, message):
    with pytest.raises(ChatError, match=message) as error:
        chat.render(messages, ChatOptions())
    assert error.value.param == "messages"


NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"effort": "medium"}, "reasoning_effort", "'medium'; supported are none, low, high, max"),
        ({"effort": "xhigh"}, "reasoning_effort", "'xhigh'"),
        ({"preserve_thinking": False}, "preserve_thinking", "part of every prompt"),
        ({"template_arguments": {"x": 1}}, "chat_template_kwargs", r"chat_template_kwargs\.x"),
        ({"template_arguments": {"thinking": "no"}}, "thinking", "true or false, not 'no'"),
        ({"tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "supported are"),
        ({"tool_choice": "required"}, "tool_choice", "no tools are given"),
        ({"tool_choice": NAMED}, "tool_choice", "no tools are given"),
        ({"tool_choice": NAMED, "tools": [WEATHER]}, "tool_choice", "'g', which is not among"),
        ({"tools": ["x"]}, "tools", "a tool must be"),
        ({"tools": [{"type": "web_search"}]}, "tools", "a tool must be"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "must be a text, not None"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
            "tools",
            "parameters of tool 'f' must be an object",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format", "'grammar'; supported are"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must hold a schema"),
    ],
)
def test_an_option_that_cannot_be_expressed_is_refused_by_name(chat, options, param, message):
    with pytest.raises(ChatError, match=message) as error:
        chat.render([USER], ChatOptions(**options))
    assert error.value.param == param
