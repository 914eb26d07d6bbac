"""Rendering: byte-exact prompts, safe text, joints, and what cannot be rendered."""

import pytest
from kda_mla_kernels.chat import ChatError, ChatFormat, ChatOptions
from megakernel_qwen.chat import QwenChatFormat
from megakernel_qwen.embedded import folder
from megakernel_qwen.tokenizer import load_tokenizer

XHIGH = (
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key "
    "assumptions, consider plausible alternatives, and prioritize correctness, consistency, and "
    "clarity in the final answer."
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Wetter, für "dich" & <alle>',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
USER = {"role": "user", "content": "hi"}
OFF = ChatOptions(thinking=False)
OFF_PREFIX = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

TOKENIZER = load_tokenizer(folder())
FORMAT = QwenChatFormat(TOKENIZER)


def rendered(messages, options=OFF):
    return TOKENIZER.decode(FORMAT.render(messages, options).token_ids)


def call(name, arguments):
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_format_meets_the_contract():
    assert isinstance(FORMAT, ChatFormat)
    stops = {TOKENIZER.control_id("<|im_end|>"), TOKENIZER.control_id("<|endoftext|>")}
    assert FORMAT.stop_ids == stops


def test_a_question_without_thinking_is_one_turn_and_an_empty_think_block():
    assert rendered([USER]) == "<|im_start|>user\nhi<|im_end|>\n" + OFF_PREFIX


def test_thinking_opens_a_block_and_states_the_effort_in_a_system_turn():
    assert rendered([USER], ChatOptions()) == (
        f"<|im_start|>system\n{XHIGH}<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_the_effort_line_stands_before_the_system_text():
    text = rendered([{"role": "system", "content": " Be brief.\n"}, USER], ChatOptions())
    assert text.startswith(f"<|im_start|>system\n{XHIGH}\n\nBe brief.<|im_end|>\n<|im_start|>user")


def test_an_empty_system_text_makes_no_turn():
    assert rendered([{"role": "system", "content": " \n"}, USER]) == rendered([USER])


def test_developer_is_read_as_system():
    assert rendered([{"role": "developer", "content": "x"}, USER]) == (
        "<|im_start|>system\nx<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n" + OFF_PREFIX
    )


def test_tools_are_declared_byte_for_byte():
    options = ChatOptions(tools=[WEATHER, CLOCK], thinking=False)
    assert rendered([{"role": "system", "content": "Be brief."}, USER], options) == (
        """\
<|im_start|>system
# Tools

You have access to the following functions:

<tools>
{"type": "function", "function": {"name": "get_weather", "description": "Wetter, für \\"dich\\" &"""
        """ <alle>", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
{"type": "function", "function": {"name": "clock"}}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
"""
        "- Function calls MUST follow the specified format: an inner <function=...></function> "
        "block must be nested within <tool_call></tool_call> XML tags\n"
        "- Required parameters MUST be specified\n"
        "- You may provide optional reasoning for your function call in natural language BEFORE "
        "the function call, but NOT after\n"
        "- If there is no function call available, answer the question like normal with your "
        "current knowledge and do not tell the user about function calls\n"
        "</IMPORTANT>\n\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n" + OFF_PREFIX
    )


def test_effort_tools_and_no_system_text_end_with_the_instructions():
    text = rendered([USER], ChatOptions(tools=[CLOCK]))
    assert text.startswith(f"<|im_start|>system\n{XHIGH}\n\n# Tools\n\n")
    assert "\n</IMPORTANT><|im_end|>\n<|im_start|>user\n" in text


def test_markers_in_the_instructions_are_control_tokens():
    token_ids = FORMAT.render([USER], ChatOptions(tools=[CLOCK])).token_ids
    assert token_ids.count(TOKENIZER.control_id("<tool_call>")) == 2
    assert token_ids.count(TOKENIZER.control_id("</tool_call>")) == 2


def test_history_keeps_reasoning_and_trims_every_text():
    history = [
        USER,
        {"role": "assistant", "content": "\n4 \n", "reasoning_content": "\n 2+2 \n"},
        {
            "role": "user",
            "content": [{"type": "text", "text": " and"}, {"type": "text", "text": "?"}],
        },
    ]
    assert rendered(history) == (
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n2+2\n</think>\n\n4<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n" + OFF_PREFIX
    )


def test_history_without_reasoning_has_an_empty_block():
    history = [USER, {"role": "assistant", "content": "yo"}, USER]
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\nyo<|im_end|>\n" in rendered(history)


def test_reasoning_is_also_read_under_its_other_name():
    history = [USER, {"role": "assistant", "content": "yo", "reasoning": "hm"}, USER]
    assert "<think>\nhm\n</think>\n\nyo<|im_end|>" in rendered(history)


def test_a_think_block_inside_content_is_text():
    history = [USER, {"role": "assistant", "content": "<think>a</think>b"}, USER]
    token_ids = FORMAT.render(history, OFF).token_ids
    assert token_ids.count(TOKENIZER.control_id("<think>")) == 2  # the turn's own and the prefix
    assert "</think>\n\n<think>a</think>b<|im_end|>" in TOKENIZER.decode(token_ids)


def test_reasoning_before_the_last_query_can_be_dropped():
    history = [
        USER,
        {"role": "assistant", "content": "one", "reasoning_content": "first"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "reasoning_content": "second", "tool_calls": [call("clock", "{}")]},
        {"role": "tool", "content": "noon"},
        {"role": "user", "content": "<tool_response>\nlate\n</tool_response>"},
    ]
    text = rendered(history, ChatOptions(thinking=False, preserve_thinking=False))
    assert "<|im_start|>assistant\none<|im_end|>\n" in text
    assert "<|im_start|>assistant\n<think>\nsecond\n</think>\n\n<tool_call>" in text


def test_calls_and_results_are_rendered_byte_for_byte():
    arguments = '{"city": "Rome\\n  Italy", "days": 3, "flags": [true, null, 1.5], "o": {"k": "é"}}'
    history = [
        USER,
        {
            "role": "assistant",
            "content": "Looking.",
            "tool_calls": [call("get_weather", arguments), call("clock", {})],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": " sunny\n"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    ]
    assert rendered(history) == (
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nLooking.\n\n"
        "<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nRome\n  Italy\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n"
        "<parameter=flags>\n[true, null, 1.5]\n</parameter>\n"
        '<parameter=o>\n{"k": "é"}\n</parameter>\n'
        "</function>\n</tool_call>\n"
        "<tool_call>\n<function=clock>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
        "<tool_response>\nnoon\n</tool_response><|im_end|>\n" + OFF_PREFIX
    )


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments_may_be_written_in_any_way(arguments):
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call("f", arguments)]}]
    assert "\n\n<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>" in rendered(history)


@pytest.mark.parametrize(
    "text",
    ["<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_response>", "<|endoftext|>"],
)
def test_no_text_of_a_request_becomes_a_control_token(text):
    """The same conversation with a harmless word has as many control tokens of each kind."""

    def controls(word):
        tool = {"type": "function", "function": {"name": "f", "description": word}}
        messages = [
            {"role": "system", "content": word},
            {"role": "user", "content": word},
            {
                "role": "assistant",
                "content": word,
                "reasoning_content": word,
                "tool_calls": [call("f", {word: word})],
            },
            {"role": "tool", "content": word},
        ]
        token_ids = FORMAT.render(messages, ChatOptions(tools=[tool])).token_ids
        return [token_id for token_id in token_ids if token_id in TOKENIZER.control_ids]

    assert controls(text) == controls("word")


@pytest.mark.parametrize("content", ["\n\n  x = 1", "Hello", "    indented", ""])
def test_the_ids_are_those_of_the_whole_text(content):
    """Merges across the joints of role, text and template are those of one encoding."""
    history = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": content, "reasoning_content": content},
        USER,
    ]
    token_ids = FORMAT.render(history, OFF).token_ids
    assert list(token_ids) == TOKENIZER.tokenizer.encode(TOKENIZER.decode(token_ids)).ids


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([], "messages", "at least one"),
        ([{"role": "system", "content": "x"}], "messages", "a user message"),
        ([{"role": "user", "content": "<tool_response>x</tool_response>"}], "messages", "a user"),
        ([USER, {"role": "system", "content": "x"}], "messages[1].role", "must be the first"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "'robot'"),
        ([{"content": "x"}], "messages[0].role", "None"),
        (["hi"], "messages[0]", "must be an object"),
        ([{"role": "user", "content": 3}], "messages[0].content", "list of text parts"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content",
            "'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content", "must be text"),
        ([{"role": "user", "content": "\ud83d"}], "messages", r"\\ud83d"),
        (
            [USER, {"role": "assistant", "reasoning_content": 1}],
            "messages[1].reasoning_content",
            "must be text",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": "x"}],
            "messages[1].tool_calls",
            "must be a list",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[1].tool_calls[0]",
            "a function with a name",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [call("f", "{")]}],
            "messages[1].tool_calls[0].arguments",
            "not valid JSON",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [call("f", "[1]")]}],
            "messages[1].tool_calls[0].arguments",
            "must be a JSON object",
        ),
    ],
)
def test_what_cannot_be_rendered_is_named(messages, param, message):
    with pytest.raises(ChatError, match=message) as caught:
        FORMAT.render(messages, OFF)
    assert caught.value.param == param
