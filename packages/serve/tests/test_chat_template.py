"""Chat formats from Jinja templates."""

from __future__ import annotations

import json

import pytest
from bigram import build_tokenizer
from kda_mla_kernels.chat import ChatError, ChatOptions, ContentText, ReasoningText
from kda_mla_kernels.errors import CheckpointError
from megakernel_serve.chat_template import JinjaChatFormat, template_format

USER = [{"role": "user", "content": "a <b> & 'c'"}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def render(tokenizer):
    def make(template, messages=USER, variables=None, **options):
        chat = JinjaChatFormat(template, tokenizer, frozenset(), variables)
        ids = chat.render(messages, ChatOptions(**options)).token_ids
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return make


def test_messages_and_variables_reach_the_template_without_html_escaping(render):
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    text = render(template, variables={"bos_token": "<user>"})
    assert text == "<user>user: a <b> & 'c'"


def test_blocks_are_trimmed(render):
    template = "{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n"
    assert render(template) == "x\n"


def test_tojson_keeps_characters_and_takes_arguments(render):
    assert render("{{ messages[0].content | tojson }}") == "\"a <b> & 'c'\""
    template = "{{ {'b': 1, 'a': 'é'} | tojson(indent=1) }}"
    assert render(template) == json.dumps({"b": 1, "a": "é"}, indent=1, ensure_ascii=False)


def test_loop_controls_generation_tags_and_the_time_exist(render):
    template = (
        "{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}x{% endgeneration %}{{ strftime_now('%Y') | length }}"
    )
    assert render(template) == "01x4"


def test_thinking_tools_and_own_arguments_are_variables(render):
    template = (
        "{{ enable_thinking is defined }}{{ enable_thinking }}{{ reasoning_effort }}"
        "{{ tools[0].function.name }}{{ mine }}{{ add_generation_prompt }}"
    )
    tools = [{"type": "function", "function": {"name": "look"}}]
    options = {"thinking": True, "effort": "low", "tools": tools}
    text = render(template, template_arguments={"mine": 5, "messages": "x"}, **options)
    assert text == "TrueTruelowlook5True"
    assert render("{{ enable_thinking is defined }}{{ tools is none }}") == "FalseTrue"
    assert render("{{ enable_thinking }}", effort="none") == "False"


def test_arguments_of_calls_arrive_as_objects(render):
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments.x + 1 }}"
    assert render(template, messages) == "2"
    call["function"]["arguments"] = "{"
    with pytest.raises(ChatError, match="tool call 0 are not JSON"):
        render(template, messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only one system message') }}", "only one system message"),
        ("{{ nothing.at.all }}", "the chat template failed: 'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "the chat template failed"),
        ("{{ messages.append(1) }}", "the chat template failed"),
        ("{{ 1 / 0 }}", "division"),
        ("{% if %}", "the chat template is not valid"),
    ],
)
def test_what_a_template_cannot_do_is_a_chat_error(render, template, message):
    with pytest.raises(ChatError, match=message):
        render(template)


def parse(tokenizer, prompt, answer):
    chat = JinjaChatFormat(prompt, tokenizer, frozenset())
    rendered = chat.render(USER, ChatOptions())
    parser = chat.parser(rendered)
    events = [event for token in tokenizer.encode(answer).ids for event in parser.push([token])]
    events += parser.finish()
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    return reasoning, content, parser.reasoning_tokens


def test_an_answer_is_content_unless_the_prompt_opens_the_reasoning(tokenizer):
    assert parse(tokenizer, "x", "a</think>b 🙂") == ("", "a</think>b 🙂", 0)
    assert parse(tokenizer, "x<think>\n", "abc</think>d 🙂") == ("abc", "d 🙂", 3)
    assert parse(tokenizer, "<think>", "abc </thi") == ("abc </thi", "", 9)


def test_a_reasoning_end_that_is_a_special_token_is_still_seen(tokenizer):
    from tokenizers import AddedToken

    special = build_tokenizer()
    special.add_special_tokens([AddedToken("</think>", special=True)])
    assert parse(special, "<think>", "abc</think>d")[:2] == ("abc", "d")


def test_a_checkpoint_brings_its_own_template(model, tmp_path):
    with pytest.raises(CheckpointError, match="ships no chat template"):
        own_format(model, tmp_path)
    config = {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "E"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert text_of(own_format(model, tmp_path), model) == "config E"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert text_of(own_format(model, tmp_path), model) == "file E"
    named = [{"name": "tool", "template": "a"}, {"name": "default", "template": "b"}]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert text_of(own_format(model, tmp_path), model) == "b"


def test_a_template_may_be_any_file(model, tmp_path):
    (tmp_path / "mine.jinja").write_text("mine")
    chat = own_format(model, tmp_path, str(tmp_path / "mine.jinja"))
    assert text_of(chat, model) == "mine"
    assert chat.stop_ids == model.generation.stop_ids
    with pytest.raises(CheckpointError, match="cannot read the chat template"):
        own_format(model, tmp_path, str(tmp_path / "other.jinja"))


def own_format(model, folder, source="auto"):
    return template_format(source, folder, None, model.tokenizer, model.generation.stop_ids)


def text_of(chat, model):
    ids = chat.render(USER, ChatOptions()).token_ids
    return model.tokenizer.decode(list(ids), skip_special_tokens=False)
