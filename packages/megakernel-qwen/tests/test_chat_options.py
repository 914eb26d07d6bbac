"""Options: thinking, effort, tool choice, response format, and the generations' defaults."""

import json

import pytest
from kda_mla_kernels.chat import ChatError, ChatOptions
from kda_mla_kernels.errors import CheckpointError
from megakernel_qwen.chat import QWEN3_8, Dialect, QwenChatFormat, read_dialect
from megakernel_qwen.embedded import folder
from megakernel_qwen.tokenizer import load_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "lamp"}},
]
MESSAGES = [{"role": "user", "content": "hi"}]
CLOSED = "<think>\n\n</think>\n\n"

TOKENIZER = load_tokenizer(folder())
FORMAT = QwenChatFormat(TOKENIZER)


def rendered(dialect=QWEN3_8, **options):
    found = QwenChatFormat(TOKENIZER, dialect).render(MESSAGES, ChatOptions(**options))
    text = TOKENIZER.decode(found.token_ids)
    assert found.thinking == text.endswith("<|im_start|>assistant\n<think>\n")
    return text


@pytest.mark.parametrize(
    ("effort", "line"),
    [
        ("minimal", "Reasoning effort is set to low. Keep your thinking brief and focused, moving"),
        ("low", "Reasoning effort is set to low. Keep your thinking brief and focused, moving"),
        ("medium", None),
        ("high", "Reasoning effort is set to xhigh. Please think carefully"),
        ("xhigh", "Reasoning effort is set to xhigh. Please think carefully"),
        ("max", "Reasoning effort is set to xhigh. Please think carefully"),
        (None, "Reasoning effort is set to xhigh. Please think carefully"),
    ],
)
def test_efforts_map_to_the_three_that_the_model_knows(effort, line):
    text = rendered(effort=effort)
    assert text.endswith("assistant\n<think>\n")
    if line is None:
        assert text.startswith("<|im_start|>user")
    else:
        assert text.startswith(f"<|im_start|>system\n{line}")


@pytest.mark.parametrize(
    "options",
    [
        {"effort": "none"},
        {"thinking": False},
        {"thinking": False, "effort": "high"},
        {"template_arguments": {"enable_thinking": False}},
        {"template_arguments": {"thinking": False}},
        {"template_arguments": {"reasoning_effort": "none"}},
    ],
)
def test_thinking_can_be_switched_off_in_every_way(options):
    text = rendered(**options)
    assert text.endswith(CLOSED)
    assert "Reasoning effort" not in text


@pytest.mark.parametrize(
    "options",
    [
        {"thinking": True, "effort": "none"},
        {"thinking": True, "template_arguments": {"enable_thinking": False}},
        {"effort": "low", "template_arguments": {"reasoning_effort": "none"}},
        {"template_arguments": {"enable_thinking": True, "reasoning_effort": "none"}},
        {"template_arguments": {"unknown": 1}},
    ],
)
def test_the_stronger_switch_wins(options):
    assert rendered(**options).endswith("assistant\n<think>\n")


def test_preserve_thinking_is_also_a_template_argument():
    history = [
        MESSAGES[0],
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        MESSAGES[0],
    ]
    kept = FORMAT.render(history, ChatOptions())
    dropped = FORMAT.render(history, ChatOptions(template_arguments={"preserve_thinking": False}))
    assert "hm" in TOKENIZER.decode(kept.token_ids)
    assert "hm" not in TOKENIZER.decode(dropped.token_ids)


@pytest.mark.parametrize(
    ("choice", "prefix"),
    [
        ("required", "<tool_call>\n<function="),
        (
            {"type": "function", "function": {"name": "lamp"}},
            "<tool_call>\n<function=lamp>\n",
        ),
    ],
)
def test_a_forced_call_ends_the_prompt_inside_it(choice, prefix):
    text = rendered(tools=TOOLS, tool_choice=choice)
    assert text.endswith("<|im_start|>assistant\n" + CLOSED + prefix)
    assert "Reasoning effort" not in text


def test_required_with_one_tool_names_it():
    assert rendered(tools=TOOLS[:1], tool_choice="required").endswith("<function=clock>\n")


def test_tool_choice_none_leaves_the_tools_out():
    assert rendered(tools=TOOLS, tool_choice="none") == rendered()


def test_response_format_text_changes_nothing():
    assert rendered(response_format={"type": "text"}) == rendered()


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"effort": "huge"}, "reasoning_effort", "none, minimal, low, medium, high, xhigh, max"),
        ({"template_arguments": {"reasoning_effort": 3}}, "reasoning_effort", "not 3"),
        ({"template_arguments": {"thinking": "no"}}, "chat_template_kwargs", "true or false"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported yet"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "not supported yet"),
        ({"tools": [3]}, "tools", r"tools\[0\] must be an object"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools", "type 'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "must be a name"),
        ({"tools": [{"type": "function", "function": {"name": "a>b"}}]}, "tools", "'a>b'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools",
            "JSON schema",
        ),
        ({"tool_choice": "required"}, "tool_choice", "at least one tool"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", "'any'"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "must be 'auto'"),
        (
            {"tool_choice": {"function": {"name": "x"}}, "tools": TOOLS},
            "tool_choice",
            r"'x', which is not among the tools \(clock, lamp\)",
        ),
        (
            {"tool_choice": "required", "tools": TOOLS, "thinking": True},
            "tool_choice",
            "turn thinking off",
        ),
        (
            {"tool_choice": "required", "tools": TOOLS, "effort": "high"},
            "tool_choice",
            "turn thinking off",
        ),
    ],
)
def test_options_that_cannot_be_expressed_are_named(options, param, message):
    with pytest.raises(ChatError, match=message) as caught:
        FORMAT.render(MESSAGES, ChatOptions(**options))
    assert caught.value.param == param


def test_an_older_generation_has_no_effort_line_and_forgets_reasoning():
    older = Dialect(effort_lines=False, thinks_by_default=False, keeps_reasoning=False)
    assert rendered(older).startswith("<|im_start|>user")
    assert rendered(older).endswith(CLOSED)
    assert rendered(older, thinking=True).endswith("assistant\n<think>\n")
    history = [MESSAGES[0], {"role": "assistant", "content": "a", "reasoning": "hm"}, MESSAGES[0]]
    found = QwenChatFormat(TOKENIZER, older).render(history, ChatOptions())
    assert "hm" not in TOKENIZER.decode(found.token_ids)


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("... Reasoning effort is set to low. ... enable_thinking is false", Dialect()),
        ("{% if enable_thinking is false %}", Dialect(False, True, False)),
        ("{% if enable_thinking is true %}", Dialect(False, False, False)),
    ],
)
def test_the_generation_is_told_from_the_template(tmp_path, template, dialect):
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": template}))
    assert read_dialect(tmp_path) == dialect
    config.write_text("{}")
    assert read_dialect(tmp_path) == QWEN3_8
    (tmp_path / "chat_template.jinja").write_text(template)
    assert read_dialect(tmp_path) == dialect


def test_a_folder_without_a_template_gets_the_newest_rules(tmp_path):
    assert read_dialect(tmp_path) == QWEN3_8
    assert read_dialect(folder()) == QWEN3_8


@pytest.mark.parametrize("contents", ["{", "[]"])
def test_a_damaged_template_file_is_refused(tmp_path, contents):
    (tmp_path / "tokenizer_config.json").write_text(contents)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_dialect(tmp_path)
