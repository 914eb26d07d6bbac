"""The call grammar: leniencies, values by schema, and the way from history back to a call."""

import json

import pytest
from kda_mla_kernels.chat import CallArguments, CallEnd, CallStart, ChatOptions, ContentText
from megakernel_qwen.chat import QwenChatFormat
from megakernel_qwen.chat.answer import AnswerReader
from megakernel_qwen.chat.schema import SchemaTypes
from megakernel_qwen.embedded import folder
from megakernel_qwen.tokenizer import load_tokenizer

PARAMETERS = {
    "type": "object",
    "$defs": {"Point": {"type": "object", "properties": {}}, "a/b": {"type": "integer"}},
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "z": {"type": "null"},
        "o": {"type": "object"},
        "a": {"type": "array"},
        "s_null": {"type": ["string", "null"]},
        "s_int": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "i_null": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        "ref": {"$ref": "#/$defs/Point"},
        "ref_escaped": {"$ref": "#/$defs/a~1b"},
        "ref_lost": {"$ref": "#/$defs/none"},
        "enum": {"enum": [1, 2, "x"]},
        "const": {"const": True},
        "items": {"items": {"type": "string"}},
        "inner": {"properties": {}},
        "free": {},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
]
OPTIONS = ChatOptions(tools=TOOLS, thinking=False)
MESSAGES = [{"role": "user", "content": "hi"}]

TOKENIZER = load_tokenizer(folder())
FORMAT = QwenChatFormat(TOKENIZER)


def calls(text, options=OPTIONS):
    """Names and argument texts of all complete calls, and the content."""
    parser = FORMAT.parser(FORMAT.render(MESSAGES, options))
    events = []
    for token_id in TOKENIZER.tokenizer.encode(text).ids:
        events += parser.push([token_id])
    events += parser.finish("stop")
    names = {event.index: event.name for event in events if isinstance(event, CallStart)}
    ended = [event.index for event in events if isinstance(event, CallEnd)]
    assert ended == list(names)
    texts = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.index] += event.text
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    return [(names[index], texts[index]) for index in names], content


def argument(key, value):
    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n"
    ((name, arguments),), content = calls(text + "</tool_call>")
    assert (name, content) == ("f", "")
    return json.loads(arguments)[key]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("s", "plain", "plain"),
        ("s", "12", "12"),
        ("s", "null", "null"),
        ("s", '"quoted" \\ back', '"quoted" \\ back'),
        ("s", "", ""),
        ("s", "\n\n  def f():\n\n", "\n\n  def f():\n\n"),
        ("s", "a </param> b < c\n<x>\n</p", "a </param> b < c\n<x>\n</p"),
        ("s", "é \U0001f680 \u2028", "é \U0001f680 \u2028"),
        ("unknown", "12", "12"),
        ("free", "12", "12"),
        ("ref_lost", "12", "12"),
        ("i", "12", 12),
        ("i", " -3 ", -3),
        ("i", "5.0", 5),
        ("i", "5.5", "5.5"),
        ("i", "1" * 5000, "1" * 5000),
        ("i", "twelve", "twelve"),
        ("n", "2", 2),
        ("n", "2.5e3", 2500.0),
        ("n", "1e999", "1e999"),
        ("n", "NaN", "NaN"),
        ("b", "true", True),
        ("b", "False", False),
        ("b", "1", "1"),
        ("z", "None", None),
        ("o", '{"k": [1, "é"]}', {"k": [1, "é"]}),
        ("o", '{"k": ', '{"k": '),
        ("o", "[1]", "[1]"),
        ("o", "[" * 100_000, "[" * 100_000),
        ("a", '[1,\n "x"]', [1, "x"]),
        ("a", '["\\ud800"]', ["\ud800"]),
        ("s_null", "null", None),
        ("s_null", "nul", "nul"),
        ("s_null", "nullable", "nullable"),
        ("s_null", "", ""),
        ("s_int", "12", 12),
        ("s_int", "x", "x"),
        ("i_null", "null", None),
        ("i_null", "4", 4),
        ("i_null", "x", "x"),
        ("ref", "{}", {}),
        ("ref_escaped", "3", 3),
        ("enum", "2", 2),
        ("enum", "x", "x"),
        ("const", "true", True),
        ("items", '["a"]', ["a"]),
        ("inner", "{}", {}),
    ],
)
def test_values_are_converted_by_their_schema(key, text, value):
    found = argument(key, text)
    assert found == value
    assert type(found) is type(value)


def test_a_schema_that_refers_to_itself_ends():
    parameters = {"properties": {"x": {"$ref": "#/properties/x"}}}
    assert SchemaTypes(parameters).of("x") == {"string"}


PARAMETER = "<parameter=s>\nv\n</parameter>\n"


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n<function=f>\n{PARAMETER}</function>\n</tool_call>",
        f"<tool_call><function=f>{PARAMETER}</function></tool_call>",
        "<tool_call><function=f><parameter=s>v</parameter></function></tool_call>",
        f"<function=f>\n{PARAMETER}</function>",
        f"<function=f>\n{PARAMETER}</function>\n</tool_call>",
        f"<function=f>\n{PARAMETER}",
        "<tool_call>\n<function=f>\n<parameter=s>\nv\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=s>\nv\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=s>\nv\n</para",
        "<tool_call>\n<function=f>\n<parameter=s>\nv",
        f"<tool_call>\n<function=f>\n{PARAMETER}</tool_call>",
        f"<tool_call>\n<function=f>\n{PARAMETER}</func",
        f"<tool_call>\n<function=f>\n{PARAMETER}<parameter=",
        f"<tool_call>\n<function=f\n{PARAMETER}</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=s\nv\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>\n<function= f >\nnoise {PARAMETER} noise </function>\n</tool_call>",
        f"<tool_call>\n<function=f>\n{PARAMETER}<parameter=s>\nagain\n</parameter>\n</function>",
    ],
)
def test_incomplete_and_untidy_calls_are_understood(text):
    assert calls(text) == ([("f", '{"s": "v"}')], "")


def test_a_value_ends_at_the_next_parameter():
    text = "<tool_call><function=f><parameter=s>v\n<parameter=i>3</function></tool_call>"
    assert calls(text) == ([("f", '{"s": "v", "i": 3}')], "")


def test_several_functions_may_share_a_tool_call():
    text = (
        f"<tool_call>\n<function=g>\n</function>\n<function=f>\n{PARAMETER}<function=g></tool_call>"
    )
    assert calls(text) == ([("g", "{}"), ("f", '{"s": "v"}'), ("g", "{}")], "")


def test_a_second_tool_call_ends_an_unfinished_one():
    text = (
        f"<tool_call>\n<function=f>\n{PARAMETER}<tool_call>\n<function=g>\n</function></tool_call>"
    )
    assert calls(text) == ([("f", '{"s": "v"}'), ("g", "{}")], "")


def test_outside_a_tool_call_only_declared_functions_are_calls():
    text = "Use <function=other>\n</function> and <function=g>\n</function> ok"
    assert calls(text) == ([("g", "{}")], "Use <function=other>\n</function> and ok")


def test_text_that_arrives_in_one_piece_is_read_like_text_in_many():
    events = []
    reader = AnswerReader({"g": SchemaTypes({})}, events)
    reader.push("Use <function=other>\n</function> and <function=g></function>")
    reader.finish(complete=True)
    text = "".join(event.text for event in events if isinstance(event, ContentText))
    assert text == "Use <function=other>\n</function> and"
    assert [event.name for event in events if isinstance(event, CallStart)] == ["g"]


def test_inside_a_tool_call_any_name_is_a_call():
    text = (
        "<tool_call>\n<function=other>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    )
    assert calls(text) == ([("other", '{"x": "1"}')], "")


def test_a_name_without_end_is_text():
    text = "<function=" + "f" * 300
    assert calls(f"<tool_call>{text}</tool_call>") == ([], text)


def test_a_key_without_end_is_skipped():
    text = f"<tool_call><function=f><parameter={'k' * 300}>x</parameter>{PARAMETER}</function>"
    assert calls(text) == ([("f", '{"s": "v"}')], "")


def test_keys_are_escaped():
    text = '<tool_call><function=g><parameter=a"b>\nx\n</parameter></function></tool_call>'
    ((_, arguments),), _ = calls(text)
    assert json.loads(arguments) == {'a"b': "x"}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"s": "two\nlines\n", "i": 3, "b": True, "n": 0.5},
        {"o": {"k": [1, None, "é"]}, "a": [[], {}], "s_null": None, "z": None},
        {"s": "  leading, trailing  ", "s_null": "text", "free": "<b>&amp;</b>"},
        {"s": "\n"},
    ],
)
def test_a_call_of_the_history_comes_back_as_it_was(arguments):
    """What the model would have had to write to make this history is read as the same call."""
    function = {"name": "f", "arguments": json.dumps(arguments)}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "Look.", "tool_calls": [{"function": function}]},
    ]
    before = FORMAT.render(MESSAGES, OPTIONS)
    after = FORMAT.render(history, OPTIONS).token_ids
    assert after[: len(before.token_ids)] == before.token_ids
    end = after.index(TOKENIZER.control_id("<|im_end|>"), len(before.token_ids))
    parser = FORMAT.parser(before)
    events = parser.push(after[len(before.token_ids) : end]) + parser.finish()
    text = json.dumps(arguments, ensure_ascii=False)
    assert events == [ContentText("Look."), CallStart(0, "f"), CallArguments(0, text), CallEnd(0)]
