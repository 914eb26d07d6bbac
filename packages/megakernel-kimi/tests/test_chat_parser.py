"""Parsing answers: the grammar, the deviations of real answers, and properties of any input.

Answers are written as pieces; ‹name› stands for a control token, everything else for text.
"""

import json
import random

import pytest
from kda_mla_kernels.chat import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatOptions,
    ContentText,
    ReasoningText,
    Rendered,
)
from megakernel_kimi.chat import KimiChatFormat
from megakernel_kimi.chat.arguments import ArgumentText
from megakernel_kimi.chat.parser import MAX_TAG_BYTES, joined
from megakernel_kimi.chat.tags import Tag, read_tag

TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMES = {
    "‹open›": "<|open|>",
    "‹close›": "<|close|>",
    "‹sep›": "<|sep|>",
    "‹eom›": "<|end_of_msg|>",
}


@pytest.fixture(scope="module")
def chat(tokenizer):
    return KimiChatFormat(tokenizer)


@pytest.fixture(scope="module")
def spell(tokenizer):
    def ids(*pieces):
        result = []
        for piece in pieces:
            if isinstance(piece, int):
                result.append(piece)
            elif piece in NAMES:
                result.append(tokenizer.special_id(NAMES[piece]))
            else:
                result += tokenizer.encode_text(piece)
        return result

    return ids


@pytest.fixture(scope="module")
def parse(chat, spell):
    """Events of an answer, taken id by id; and once more at once, which must be the same."""

    def run(*pieces, thinking=True, finish="stop", **options):
        options = ChatOptions(tools=TOOLS, thinking=thinking, **options)
        rendered = chat.render([{"role": "user", "content": "hi"}], options)
        ids = spell(*pieces)
        one, whole = chat.parser(rendered), chat.parser(rendered)
        events = [event for token in ids for event in one.push([token])] + one.finish(finish)
        assert joined(events) == joined(whole.push(ids) + whole.finish(finish))
        return joined(events)

    return run


def opened(tag, **attributes):
    text = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return ["‹open›", tag + text, "‹sep›"]


def closed(tag):
    return ["‹close›", tag, "‹sep›"]


def element(tag, *body, **attributes):
    return [*opened(tag, **attributes), *body, *closed(tag)]


def argument(key, kind, text):
    return element("argument", text, key=key, type=kind)


def called(index, name, arguments):
    return [CallStart(index, name), CallArguments(index, arguments), CallEnd(index)]


END = [*closed("message"), "‹eom›"]
CALL = element("call", *argument("a", "number", "1"), tool="f", index="1")
CALLED = called(0, "f", '{"a":1}')


def test_a_whole_answer(parse):
    events = parse(
        "Let me see.",
        *closed("think"),
        *element("response", "It rains."),
        *element("tools", *CALL, *element("call", tool="g", index="2")),
        *END,
    )
    assert events == [
        ReasoningText("Let me see."),
        ContentText("It rains."),
        *CALLED,
        *called(1, "g", "{}"),
    ]


def test_without_thinking_the_answer_starts_inside_the_response(parse):
    yes = [ContentText("Yes.")]
    assert parse("Yes.", *closed("response"), *END, thinking=False) == yes
    assert parse("Yes.", *closed("response"), "\nmore", *END, thinking=False) == yes


def test_the_response_may_be_missing_when_tools_follow(parse):
    assert parse("So.", *closed("think"), *element("tools", *CALL), *END) == [
        ReasoningText("So."),
        *CALLED,
    ]


def test_reasoning_may_go_straight_to_the_response_or_the_tools(parse):
    assert parse("So.", *opened("response"), "Yes.", *END) == [
        ReasoningText("So."),
        ContentText("Yes."),
    ]
    assert parse("So.", *opened("tools"), *CALL, *END) == [ReasoningText("So."), *CALLED]
    assert parse("So.", *CALL, *END) == [ReasoningText("So."), *CALLED]


def test_the_message_may_end_inside_the_response(parse):
    assert parse("", *closed("think"), *opened("response"), "Yes.", *END) == [ContentText("Yes.")]
    assert parse(*opened("response"), "Yes.", "‹eom›") == [ContentText("Yes.")]
    assert parse(*opened("response"), "Yes.") == [ContentText("Yes.")]


def test_a_repeated_opening_think_tag_is_dropped(parse):
    assert parse(*opened("think"), "So.", *closed("think"), *element("response", "Yes.")) == [
        ReasoningText("So."),
        ContentText("Yes."),
    ]


def test_reasoning_may_be_opened_where_it_was_turned_off(parse):
    ids = [*opened("think"), "So.", *closed("think"), *element("response", "Yes.")]
    assert parse(*ids, thinking=False) == [ReasoningText("So."), ContentText("Yes.")]


def test_an_answer_may_begin_without_its_opening_tag(parse):
    for answer in ("Yes.", "\n Yes.", " the"):
        assert parse("So.", *closed("think"), "\n", answer, *END) == [
            ReasoningText("So."),
            ContentText(answer.strip()),
        ]


def test_text_between_and_after_the_channels_is_dropped(parse):
    events = parse(
        "So.",
        *[*closed("think"), "\n", *element("response", "Yes."), " \n x"],
        *[*opened("tools"), "\n", *opened("call", tool="f", index="1"), "\n"],
        *[*argument("a", "number", "1"), "\n", *closed("call"), "x", *closed("tools"), "x", *END],
    )
    assert events == [ReasoningText("So."), ContentText("Yes."), *CALLED]


def test_everything_after_the_end_of_the_message_is_dropped(parse, tokenizer):
    more = ["more", *element("response", "more"), *element("tools", *CALL)]
    for end in (["‹eom›"], closed("message"), [tokenizer.special_id("[EOS]")]):
        assert parse(*opened("response"), "Yes.", *end, *more) == [ContentText("Yes.")]


def test_white_space_next_to_calls_is_no_content(parse):
    assert parse(*opened("response"), " \n", "\n", *element("tools", *CALL)) == CALLED
    assert parse(*element("response", "\n"), *CALL) == CALLED
    events = parse(*element("response", "\n", "\n", "a", "\n"), *CALL)
    assert events == [ContentText("\n\na\n"), *CALLED]


def test_an_answer_of_white_space_alone_is_content(parse):
    assert parse(*opened("response"), " \n", "\n", *END) == [ContentText(" \n\n")]
    assert parse(" ", thinking=False, finish="length") == [ContentText(" ")]


@pytest.mark.parametrize("choice", ["none", "undeclared"])
def test_calls_that_are_not_allowed_surface_neither_as_calls_nor_as_text(chat, spell, choice):
    none = {"tools": TOOLS, "tool_choice": "none"}
    options = ChatOptions(**(none if choice == "none" else {}))
    rendered = chat.render([{"role": "user", "content": "hi"}], options)
    for given in (rendered, Rendered(rendered.token_ids, True, options)):
        parser = chat.parser(given)
        events = parser.push(spell("So.", *opened("tools"), *CALL, *opened("response"), "Yes."))
        assert events + parser.finish() == [ReasoningText("So."), ContentText("Yes.")]


def test_a_plain_rendered_prompt_can_be_parsed(chat, spell):
    options = ChatOptions(tools=TOOLS)
    parser = chat.parser(Rendered((), True, options))
    assert parser.push(spell("So.", *CALL)) == [ReasoningText("So."), *CALLED]


def test_a_forced_call_has_begun_before_the_first_id(parse):
    choice = {"type": "function", "function": {"name": "f"}}
    ids = [*argument("a", "number", "1"), *closed("call"), *closed("tools"), *END]
    assert parse(*ids, tool_choice=choice) == CALLED
    assert parse(*ids, tool_choice=choice, thinking=False) == CALLED
    assert parse(tool_choice=choice) == [CallStart(0, "f")]


def test_calls_are_numbered_as_they_appear(parse):
    two = element("call", tool="a", index="7") + element("call", tool="b", index="x")
    assert parse(*element("tools", *two)) == [*called(0, "a", "{}"), *called(1, "b", "{}")]


def test_a_call_without_a_name_is_dropped(parse):
    bad = element("call", *argument("a", "number", "1"), index="1")
    assert parse(*element("tools", *bad, *CALL)) == CALLED


def test_a_call_in_which_generation_ends_has_no_end(parse):
    start = [*opened("tools"), *CALL, *opened("call", tool="g", index="2")]
    for body, text in (
        ([], None),
        (opened("argument", key="k", type="string"), '{"k":"'),
        ([*opened("argument", key="k", type="string"), "ab"], '{"k":"ab'),
        ([*opened("argument", key="k", type="number"), "1"], '{"k":'),
        ([*argument("k", "number", "1")], '{"k":1'),
        (["‹open›", "argument key="], None),
    ):
        expected = [*CALLED, CallStart(1, "g")]
        expected += [CallArguments(1, text)] if text else []
        assert parse(*start, *body, finish="length") == expected
        assert parse(*start, *body, "‹eom›") == expected


@pytest.mark.parametrize("missing", ["argument", "call", "tools"])
def test_closing_tags_may_be_missing_inside_the_tools(parse, missing):
    ids = [*opened("tools"), *opened("call", tool="f", index="1")]
    ids += [*opened("argument", key="a", type="string"), "x"]
    for tag in ("argument", "call", "tools"):
        ids += closed(tag) if tag != missing else []
    assert parse(*ids, *END) == called(0, "f", '{"a":"x"}')


def test_a_new_argument_or_call_ends_the_one_before(parse):
    ids = [*opened("call", tool="f", index="1"), *opened("argument", key="a", type="string"), "x"]
    ids += [*opened("argument", key="b", type="number"), "2"]
    ids += [*opened("call", tool="g", index="2"), *closed("call")]
    assert parse(*ids) == [*called(0, "f", '{"a":"x","b":2}'), *called(1, "g", "{}")]


def test_the_arguments_may_be_one_json_object(parse):
    for text in ('{"a": [1, "<|close|>"]}', " {} "):
        call = element("call", *element("json", text, type="object"), tool="f", index="1")
        assert parse(*call) == called(0, "f", text)
    empty = element("call", *element("json", type="object"), tool="f", index="1")
    assert parse(*empty) == called(0, "f", "{}")


@pytest.mark.parametrize("text", ['{"a": ', "[1]", '{"a": NaN}', "no"])
def test_a_json_argument_that_is_no_object_has_no_end(parse, text):
    call = element("call", *element("json", text, type="object"), tool="f", index="1")
    assert parse(*call) == [CallStart(0, "f"), CallArguments(0, text)]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("string", 'a "b" \\ \n\t\x01 ü 😀 <|close|>', 'a "b" \\ \n\t\x01 ü 😀 <|close|>'),
        ("string", "", ""),
        ("string", "1", "1"),
        ("number", " 1.5e3\n", 1500.0),
        ("number", "one", "one"),
        ("number", "NaN", "NaN"),
        ("boolean", "true", True),
        ("boolean", "True", "True"),
        ("null", "null", None),
        ("object", '{"a": {"b": []}}', {"a": {"b": []}}),
        ("object", '{"a": ', '{"a": '),
        ("array", "[" * 100_000, "[" * 100_000),
        ("array", '["ü"]', ["ü"]),
        ("other", "7", 7),
        ("", "", ""),
    ],
)
def test_argument_values_become_json(parse, kind, text, expected):
    call = element("call", *argument("k", kind, text), tool="f", index="1")
    start, arguments, end = parse(*call)
    assert (start, end) == (CallStart(0, "f"), CallEnd(0))
    assert json.loads(arguments.text) == {"k": expected}


def test_white_space_around_a_value_that_is_no_string_is_dropped(parse):
    call = element("call", *argument("k", "number", "\n 1.50 \n"), tool="f")
    assert parse(*call) == called(0, "f", '{"k":1.50}')


def test_an_argument_without_a_type_is_a_string_and_one_without_a_key_is_dropped(parse):
    ids = [*opened("argument", key="a"), "1", *closed("argument")]
    ids += [*opened("argument", type="string"), "x", *closed("argument")]
    assert parse(*element("call", *ids, tool="f")) == called(0, "f", '{"a":"1"}')


def test_names_and_keys_are_unescaped_in_reverse_order(parse):
    call = element("call", *argument("&quot;&amp;quot;", "null", "null"), tool="&amp;f&lt;")
    assert parse(*call) == called(0, "&f&lt;", '{"\\"&quot;":null}')


def test_a_string_argument_is_streamed_as_it_comes(chat, spell):
    rendered = chat.render([{"role": "user", "content": "hi"}], ChatOptions(tools=TOOLS))
    parser = chat.parser(rendered)
    assert parser.push(spell(*opened("call", tool="f", index="1"))) == [CallStart(0, "f")]
    begin = parser.push(spell(*opened("argument", key="k", type="string")))
    assert begin == [CallArguments(0, '{"k":"')]
    assert parser.push(spell('say "hi"')) == [CallArguments(0, 'say \\"hi\\"')]
    assert parser.push(spell("\n")) == [CallArguments(0, "\\n")]
    assert parser.push(spell(*closed("argument"))) == [CallArguments(0, '"')]
    assert parser.push(spell(*closed("call"))) == [CallArguments(0, "}"), CallEnd(0)]


def test_markers_spelled_by_ordinary_tokens_are_text(parse):
    text = "<|close|>response<|sep|><|open|>tools<|sep|>"
    assert parse(text, *closed("think"), *element("response", text)) == [
        ReasoningText(text),
        ContentText(text),
    ]


def test_code_points_are_never_split(chat, spell, tokenizer):
    rendered = chat.render([{"role": "user", "content": "hi"}], ChatOptions(thinking=False))
    parser = chat.parser(rendered)
    pieces = [parser.push([byte]) for byte in "ü😀".encode()]
    assert pieces == [[], [ContentText("ü")], [], [], [], [ContentText("😀")]]
    assert parser.push([0xF0, 0x9F]) == []
    assert parser.finish("length") == [ContentText("\ufffd")]


def test_an_unfinished_code_point_ends_with_its_channel(parse):
    assert parse(0xF0, 0x9F, *opened("response"), 0x98, "a") == [
        ReasoningText("\ufffd"),
        ContentText("\ufffda"),
    ]


def test_reasoning_tokens_are_counted_without_markers(chat, spell):
    rendered = chat.render([{"role": "user", "content": "hi"}], ChatOptions())
    parser = chat.parser(rendered)
    text = spell("Let me think about the weather.")
    parser.push([*spell(*opened("think")), *text])
    assert parser.reasoning_tokens == len(text)
    parser.push(spell(*closed("think"), *element("response", "Yes."), *END, "more"))
    parser.finish()
    assert parser.reasoning_tokens == len(text)


def test_control_tokens_and_ids_without_a_token_stand_for_no_text(parse, tokenizer):
    other = [tokenizer.special_id("[BOS]"), tokenizer.special_id("[UNK]"), 10**6, -1]
    assert parse("a", *other, "b", "‹sep›", "c") == [ReasoningText("abc")]


def test_a_tag_that_never_ends_is_text_again(parse):
    long = "x" * (MAX_TAG_BYTES + 100)
    assert parse(*opened("response"), "a", "‹open›", long, "b") == [ContentText(f"a{long}b")]


def test_a_tag_cut_by_another_marker_or_the_end_is_dropped(parse):
    assert parse("a", "‹open›", "resp", *opened("response"), "b") == [
        ReasoningText("a"),
        ContentText("b"),
    ]
    assert parse("a", "‹open›", "response") == [ReasoningText("a")]
    assert parse("a", "‹open›", "response", "‹eom›") == [ReasoningText("a")]


def test_unknown_tags_vanish_and_their_text_stays(parse):
    body = ["a ", *element("b", "bold"), " c", *closed("tools"), *closed("call")]
    assert parse(*element("response", *body)) == [ContentText("a bold c")]


def test_finishing_twice_changes_nothing(chat):
    parser = chat.parser(chat.render([{"role": "user", "content": "x"}], ChatOptions()))
    parser.push([0xF0])
    assert parser.finish() == [ReasoningText("\ufffd")]
    assert parser.finish() == []


def test_a_rendered_answer_parses_back_to_itself(chat):
    arguments = {"s": 'x "y" <|open|>\n', "n": -2.5, "o": {"a": [None, True]}, "e": ""}
    answer = {
        "role": "assistant",
        "reasoning_content": "Because…",
        "content": "Grüße 😀",
        "tool_calls": [
            {"function": {"name": 'f&"', "arguments": json.dumps(arguments)}},
            {"function": {"name": "g", "arguments": "{}"}},
        ],
    }
    user = {"role": "user", "content": "hi"}
    options = ChatOptions(tools=TOOLS)
    before = chat.render([user], options)
    after = chat.render([user, answer], options)
    length = len(before.token_ids)
    assert after.token_ids[:length] == before.token_ids
    parser = chat.parser(before)
    events = parser.push(after.token_ids[length:])
    reasoning, content, start, text, end, *rest = events
    assert (reasoning, content) == (ReasoningText("Because…"), ContentText("Grüße 😀"))
    assert (start, end) == (CallStart(0, 'f&"'), CallEnd(0))
    assert json.loads(text.text) == arguments
    assert rest == called(1, "g", "{}")


def random_answer(rng, spell, tokenizer):
    tags = ["think", "response", "tools", "message", "call", 'call tool="f"', "argument", "json"]
    tags += ['argument key="k" type="string"', 'argument key="k" type="number"', ' x y="', ""]
    texts = ["a", " ", "\n", '"', "12", "{", "}", '{"a":1}', "ü😀", "true", "the message"]
    ids = []
    for _ in range(rng.randrange(60)):
        kind = rng.randrange(8)
        if kind < 3:
            ids += spell(rng.choice(["‹open›", "‹close›"]), rng.choice(tags), "‹sep›")
        elif kind < 6:
            ids += spell(rng.choice(texts))
        elif kind == 6:
            ids.append(rng.choice([0xF0, 0x9F, 0x98, 0x80, 0xFF, 10**6]))
        elif rng.random() < 0.4:
            ids += spell(rng.choice(["‹open›", "‹close›", "‹sep›"]))
        elif rng.random() < 0.05:
            ids += spell("‹eom›")
    return ids


def check_calls(events):
    """What a client relies on: order, numbering, and valid JSON where a call ended."""
    texts, ended = {}, set()
    for event in events:
        match event:
            case CallStart(index, name):
                assert index == len(texts)
                assert name
                texts[index] = ""
            case CallArguments(index, text):
                assert index == len(texts) - 1
                assert index not in ended
                assert text
                texts[index] += text
            case CallEnd(index):
                assert index not in ended
                ended.add(index)
                assert isinstance(json.loads(texts[index]), dict)
            case ReasoningText(text) | ContentText(text):
                assert text


@pytest.mark.parametrize("seed", range(20))
def test_any_ids_in_any_chunks_give_the_same_events(chat, spell, tokenizer, seed):
    rng = random.Random(seed)
    for _ in range(40):
        options = ChatOptions(
            tools=TOOLS,
            thinking=rng.random() < 0.5,
            tool_choice=rng.choice(["auto", "auto", "none", TOOLS[0]]),
        )
        rendered = chat.render([{"role": "user", "content": "hi"}], options)
        ids = random_answer(rng, spell, tokenizer)
        whole, parts = chat.parser(rendered), chat.parser(rendered)
        expected = joined(whole.push(ids) + whole.finish())
        events, at = [], 0
        while at < len(ids):
            size = rng.randrange(0, 6)
            events += parts.push(ids[at : at + size])
            at += size
        events += parts.finish("length")
        assert joined(events) == expected
        assert parts.reasoning_tokens == whole.reasoning_tokens <= len(ids)
        check_calls(expected)


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("think", Tag("think", {})),
        ('  call  tool="a b"\nindex="1"', Tag("call", {"tool": "a b", "index": "1"})),
        ('call tool="" x', Tag("call", {"tool": ""})),
        ('call tool="a"index="1"', Tag("call", {"tool": "a"})),
        ('call tool="a" tool="b"', Tag("call", {"tool": "a"})),
        ("call tool=a", Tag("call", {})),
        ("", Tag("", {})),
        (' ="x"', Tag("", {})),
        ("a" * 4000 + " " * 4000, Tag("a" * 4000, {})),
    ],
)
def test_tags_are_read_up_to_the_first_thing_that_is_no_attribute(text, tag):
    assert read_tag(text) == tag


def test_argument_text_pieces_make_an_object_however_they_are_cut():
    arguments = ArgumentText()
    pieces = [arguments.open_member('k"', "string")]
    pieces += [arguments.text(letter) for letter in 'a"\n']
    pieces += [arguments.open_member("n", "number"), arguments.text("1"), arguments.text("2")]
    last, complete = arguments.finish()
    assert complete
    assert "".join(pieces) + last == '{"k\\"":"a\\"\\n","n":12}'
