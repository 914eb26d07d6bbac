"""Parsing: channels by id, white space at their borders, forced calls, counts, robustness."""

import json
import random
import time

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
from megakernel_qwen.chat import QwenChatFormat
from megakernel_qwen.embedded import folder
from megakernel_qwen.tokenizer import load_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "mode": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]
MESSAGES = [{"role": "user", "content": "hi"}]
CLOCK = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"

TOKENIZER = load_tokenizer(folder())
FORMAT = QwenChatFormat(TOKENIZER)


def ids(text):
    """Markers in the text become control tokens."""
    return TOKENIZER.tokenizer.encode(text).ids


def parser(**options):
    return FORMAT.parser(FORMAT.render(MESSAGES, ChatOptions(**options)))


def parsed(token_ids, reason="stop", sizes=None, **options):
    """All events with neighbouring pieces joined, fed in chunks of the given sizes (1 each)."""
    reader, events, place = parser(**options), [], 0
    while place < len(token_ids):
        size = sizes() if sizes else 1
        events += reader.push(token_ids[place : place + size])
        place += size
    return joined(events + reader.finish(reason))


def joined(events):
    result = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ReasoningText | ContentText) and type(event) is type(last):
            result[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            assert event.index == last.index
            result[-1] = CallArguments(event.index, last.text + event.text)
        else:
            result.append(event)
    return result


def answer(text, reason="stop", **options):
    return parsed(ids(text), reason, **options)


def call(index, name, arguments):
    return [CallStart(index, name), CallArguments(index, arguments), CallEnd(index)]


def test_reasoning_comes_before_content_and_the_blank_lines_between_are_dropped():
    events = answer("hm\n</think>\n\nHello.\n")
    assert events == [ReasoningText("hm"), ContentText("Hello.\n")]


def test_only_the_breaks_of_the_format_are_dropped():
    events = answer("\nhm\n\n</think>\n\n\n  x\n")
    assert events == [ReasoningText("\nhm\n"), ContentText("\n  x\n")]


def test_without_thinking_everything_is_content_and_its_first_space_stays():
    assert answer(" Hello\n", thinking=False) == [ContentText(" Hello\n")]
    assert answer("\n\nHello", thinking=False) == [ContentText("\n\nHello")]


def test_the_prompt_says_where_the_answer_starts():
    prompt = Rendered((1,), thinking=False, options=ChatOptions())
    assert FORMAT.parser(prompt).push(ids("Hello")) == [ContentText("Hello")]


def test_reasoning_that_never_ends_stays_reasoning():
    assert answer("hm\n", "length") == [ReasoningText("hm\n")]


def test_a_call_ends_the_reasoning():
    events = answer(f"hm\n\n{CLOCK}", tools=TOOLS)
    assert events == [ReasoningText("hm"), *call(0, "clock", "{}")]


def test_repeated_markers_are_dropped():
    text = "<think>\nhm\n<think></think>\n</think>\n\nHello</think> <think>you</tool_call>"
    assert answer(text) == [ReasoningText("hm"), ContentText("Hello you")]


def test_a_repeated_think_marker_does_not_eat_later_breaks():
    assert answer("a<think>\nb</think>c") == [ReasoningText("a\nb"), ContentText("c")]


def test_markers_written_with_ordinary_tokens_are_text():
    token_ids = TOKENIZER.encode_text("use </think> and <tool_call>") + ids("</think>")
    token_ids += TOKENIZER.encode_text("a <tool_call> b")
    assert parsed(token_ids, tools=TOOLS) == [
        ReasoningText("use </think> and <tool_call>"),
        ContentText("a <tool_call> b"),
    ]


def test_a_function_tag_in_the_reasoning_is_text():
    assert answer("<function=clock>\n</function></think>x", tools=TOOLS) == [
        ReasoningText("<function=clock>\n</function>"),
        ContentText("x"),
    ]


def test_content_calls_and_more_content_come_in_order():
    events = answer(f"</think>\n\nLook.\n\n{CLOCK}\n{CLOCK}\n\nDone. ", tools=TOOLS)
    assert events == [
        ContentText("Look."),
        *call(0, "clock", "{}"),
        *call(1, "clock", "{}"),
        ContentText("\n\nDone."),
    ]


def test_content_that_begins_after_a_call_has_no_leading_white_space():
    events = answer(f"</think>\n\n{CLOCK}\n\nDone.", tools=TOOLS)
    assert events == [*call(0, "clock", "{}"), ContentText("Done.")]


def test_white_space_next_to_calls_is_no_content():
    events = answer(f" \n</think>\n\n \n{CLOCK}\n \n", tools=TOOLS)
    assert events == [ReasoningText(" "), *call(0, "clock", "{}")]


def test_white_space_without_calls_is_kept():
    assert answer("a  \n\n b \n", tools=TOOLS, thinking=False) == [ContentText("a  \n\n b \n")]
    assert answer(" \n", tools=TOOLS, thinking=False) == [ContentText(" \n")]


@pytest.mark.parametrize("tools", [{"tools": TOOLS, "tool_choice": "none"}, {}])
def test_calls_that_are_not_allowed_surface_nowhere(tools):
    assert answer(f"</think>\n\nLook.{CLOCK}Done.", **tools) == [ContentText("Look.Done.")]


def test_function_syntax_is_plain_text_where_no_tool_is_declared():
    text = "Write <function=clock>\n</function>."
    assert answer(text, thinking=False) == [ContentText(text)]


def test_text_between_the_call_markers_that_is_no_call_is_content():
    events = answer('<tool_call>\n{"name": "clock"}\n</tool_call>', tools=TOOLS, thinking=False)
    assert events == [ContentText('{"name": "clock"}')]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_forced_call_starts_inside_it(size):
    named = {"type": "function", "function": {"name": "write"}}
    token_ids = ids("<parameter=mode>\n3\n</parameter>\n</function>\n</tool_call>")
    events = parsed(token_ids, sizes=lambda: size, tools=TOOLS, tool_choice=named)
    assert events == call(0, "write", '{"mode": 3}')


def test_a_required_call_starts_at_its_name():
    events = answer("clock>\n</function>\n</tool_call>", tools=TOOLS, tool_choice="required")
    assert events == call(0, "clock", "{}")


def test_the_name_of_a_forced_call_is_reported_first():
    named = {"type": "function", "function": {"name": "write"}}
    reader = parser(tools=TOOLS, tool_choice=named)
    assert reader.push(ids("\n")) == [CallStart(0, "write")]


def test_string_arguments_stream_while_they_are_written():
    reader = parser(tools=TOOLS, thinking=False)
    reader.push(ids("<tool_call>\n<function=write>\n<parameter=path>\n"))
    assert reader.push(ids('say "hi" ')) == [CallArguments(0, '"say \\"hi\\" ')]
    assert reader.push(ids("now\n\tx")) == [CallArguments(0, "now\\n\\tx")]


def test_tags_are_held_back_until_they_are_known_to_be_text():
    reader = parser(tools=TOOLS, thinking=False)
    assert reader.push(TOKENIZER.encode_text("a <")) == [ContentText("a")]
    assert reader.push(TOKENIZER.encode_text("func")) == []
    assert reader.push(TOKENIZER.encode_text("y>")) == [ContentText(" <funcy>")]


def test_reasoning_tokens_count_ordinary_ids_inside_the_reasoning():
    reader = parser()
    inside = TOKENIZER.encode_text("some thoughts\n")
    reader.push(ids("<think>") + inside + ids("</think>") + TOKENIZER.encode_text("and words"))
    assert reader.reasoning_tokens == len(inside)


def test_an_emoji_over_several_tokens_comes_in_one_piece():
    token_ids = TOKENIZER.encode_text("\U0001f680")
    assert len(token_ids) > 1
    reader = parser(thinking=False)
    pieces = [reader.push([token_id]) for token_id in token_ids]
    assert pieces == [[]] * (len(token_ids) - 1) + [[ContentText("\U0001f680")]]


def test_an_incomplete_character_is_replaced_at_the_border_of_its_channel():
    first = TOKENIZER.encode_text("\U0001f680")[:1]
    assert parsed(first + ids("</think>a") + first) == [
        ReasoningText("\ufffd"),
        ContentText("a\ufffd"),
    ]


def test_other_control_tokens_and_unknown_ids_give_no_text():
    token_ids = [*ids("a<|vision_start|>b<|im_end|>"), 2047, 10**6, *ids("<tool_response>c")]
    assert parsed(token_ids, thinking=False) == [ContentText("abc")]


def test_a_length_stop_leaves_an_unfinished_call_open():
    text = "<tool_call>\n<function=write>\n<parameter=path>\nab"
    events = answer(f"</think>{CLOCK}\n{text}", "length", tools=TOOLS)
    assert events == [
        *call(0, "clock", "{}"),
        CallStart(1, "write"),
        CallArguments(1, '{"path": "ab'),
    ]


@pytest.mark.parametrize(
    "text", ["<tool_call>", "<tool_call>\n<func", "<tool_call>\n<function=clo"]
)
@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_a_call_without_a_complete_name_is_dropped(text, reason):
    assert answer(text, reason, tools=TOOLS, thinking=False) == []


def test_a_partial_tag_at_the_end_of_content_is_text():
    assert answer("a <func", tools=TOOLS, thinking=False) == [ContentText("a <func")]


def random_answer(draw):
    """Ids that often look like an answer: markers, grammar and odd bytes in any order."""
    pieces = [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"),
        *("<function=write>\n", "<function=clock>", "<function=odd>", "</function>", "<function="),
        *("<parameter=path>\n", "<parameter=mode>\n", "</parameter>\n", "<para", "<", "\n", "\n\n"),
        *("null", "12", ' "q\\"', "text", "é\U0001f680", "> ", CLOCK),
    ]
    token_ids = []
    for _ in range(draw.randrange(1, 40)):
        token_ids += ids(draw.choice(pieces))
        if draw.random() < 0.1:
            token_ids.append(draw.randrange(2100))
    return token_ids


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"tools": TOOLS, "thinking": False}])
def test_events_do_not_depend_on_how_the_ids_are_cut(seed, options):
    draw = random.Random(seed)
    for _ in range(60):
        token_ids = random_answer(draw)
        reason = draw.choice(["stop", "length"])
        whole = parsed(token_ids, reason, sizes=lambda: 10**6, **options)
        assert parsed(token_ids, reason, **options) == whole
        assert parsed(token_ids, reason, sizes=lambda: draw.randrange(0, 6), **options) == whole


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_generated_calls_are_well_formed_and_markers_never_show(seed):
    draw = random.Random(100 + seed)
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")
    for _ in range(100):
        events = parsed(random_answer(draw), tools=TOOLS)
        starts = [event.index for event in events if isinstance(event, CallStart)]
        ends = [event.index for event in events if isinstance(event, CallEnd)]
        assert starts == ends == list(range(len(starts)))
        for event in events:
            if isinstance(event, CallArguments):
                assert isinstance(json.loads(event.text), dict)
            if isinstance(event, ReasoningText | ContentText):
                assert event.text
                assert not any(marker in event.text for marker in markers)


@pytest.mark.parametrize(
    "unit", ["a ", " ", "\n", "<", "<function=", "<parameter=path>\n<", "\n</parameter", "null"]
)
@pytest.mark.parametrize("start", ["", "</think>", "</think><tool_call><function=write>\n"])
def test_time_is_linear_in_the_answer(start, unit):
    """Eight times the ids in far less than 64 times the time, which quadratic work would take."""

    def seconds(count):
        token_ids = ids(start) + TOKENIZER.encode_text(unit) * count
        reader = parser(tools=TOOLS)
        begin = time.perf_counter()
        for token_id in token_ids:
            reader.push([token_id])
        reader.finish()
        return time.perf_counter() - begin

    short, long = (min(seconds(count) for _ in range(2)) for count in (500, 4000))
    assert long < 30 * short + 0.05
