"""A chat format from a Jinja template, for checkpoints whose package has none of its own.

Templates are rendered as Hugging Face does: an immutable sandbox, trimmed blocks, ``tojson``
without HTML escaping, ``raise_exception``, ``strftime_now``, loop controls, ``generation`` tags.
Tools are shown to the model as the template says, but calls in the answer stay plain text; a
reasoning channel is recognised where the prompt ends with ``<think>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from kda_mla_kernels.chat import (
    ChatError,
    ChatEvent,
    ChatOptions,
    ContentText,
    Message,
    ReasoningText,
    Rendered,
)
from kda_mla_kernels.checkpoint import fetch_file, fetch_json
from kda_mla_kernels.errors import CheckpointError
from tokenizers import Tokenizer

from megakernel_serve.text import Detokenizer, StopScanner

__all__ = ["JinjaChatFormat", "template_format"]

THINK, END_THINK = "<think>", "</think>"


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class JinjaChatFormat:
    """Implements :class:`kda_mla_kernels.chat.ChatFormat` with a template.

    Args:
        template: Jinja source.
        tokenizer: encodes the rendered text, special tokens recognised.
        stop_ids: ids that end an answer.
        variables: what the template may read beside the messages, e.g. ``bos_token``.

    Raises:
        ChatError: the template is not valid Jinja.
    """

    def __init__(
        self,
        template: str,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.stop_ids = stop_ids
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise ChatError(f"the chat template is not valid: {error}", "chat_template") from None

    def render(self, messages: Sequence[Message], options: ChatOptions) -> Rendered:
        """Ids of a conversation. Raises :class:`ChatError` for what the template refuses."""
        try:
            text = self._template.render(
                self._variables
                | _arguments(options)
                | {
                    "messages": [_parsed(message) for message in messages],
                    "tools": list(options.tools) or None,
                    "add_generation_prompt": True,
                }
            )
        except ChatError:
            raise
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatError(f"the chat template failed: {error}") from None
        except RecursionError:
            raise ChatError("the chat template failed: the messages nest too deeply") from None
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return Rendered(ids, text.rstrip().endswith(THINK), options)

    def parser(self, rendered: Rendered) -> _TemplateParser:
        """A parser for one answer."""
        return _TemplateParser(self._tokenizer, rendered.thinking)


class _TemplateParser:
    """Text up to ``</think>`` is reasoning if the prompt opened it; the rest is content."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        self.reasoning_tokens = 0
        self._detokenizer = Detokenizer(tokenizer, keep=(END_THINK,))
        self._thinking: StopScanner | None = StopScanner([END_THINK], True) if thinking else None

    def push(self, token_ids: Sequence[int]) -> list[ChatEvent]:
        """Takes the next ids."""
        events: list[ChatEvent] = []
        for token in token_ids:
            if self._thinking is not None:
                self.reasoning_tokens += 1
            events += self._take(self._detokenizer.push(token))
        return events

    def finish(self, reason: str = "stop") -> list[ChatEvent]:
        """Flushes what waits."""
        events = self._take(self._detokenizer.finish())
        if self._thinking is not None and (rest := self._thinking.flush()):
            events.append(ReasoningText(rest))
        return events

    def _take(self, text: str) -> list[ChatEvent]:
        if self._thinking is None:
            return _content(text)
        passed = self._thinking.push(text)
        if self._thinking.matched is None:
            return [ReasoningText(passed)] if passed else []
        self._thinking = None
        self.reasoning_tokens -= 1  # the marker
        reasoning, _, content = passed.partition(END_THINK)
        return [*([ReasoningText(reasoning)] if reasoning else []), *_content(content)]


def _content(text: str) -> list[ChatEvent]:
    return [ContentText(text)] if text else []


def template_format(
    source: str,
    checkpoint: str | Path,
    revision: str | None,
    tokenizer: Tokenizer,
    stop_ids: frozenset[int],
) -> JinjaChatFormat:
    """The format that ``--chat-template`` names: a file, or ``auto`` for the checkpoint's own.

    Args:
        source: path of the template, or ``auto``.
        checkpoint, revision: as for :func:`kda_mla_kernels.checkpoint.open_checkpoint`; every
            template may name the checkpoint's special tokens.
        tokenizer, stop_ids: as for :class:`JinjaChatFormat`.

    Raises:
        CheckpointError: there is no such template.
        ChatError: it is not valid Jinja.
    """
    config = fetch_json(checkpoint, "tokenizer_config.json", revision) or {}
    template = _own_template(checkpoint, revision, config) if source == "auto" else _read(source)
    variables = {
        name: value["content"] if isinstance(value, dict) else value
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (value := config.get(name)) is not None
    }
    return JinjaChatFormat(template, tokenizer, stop_ids, variables)


def _own_template(checkpoint: str | Path, revision: str | None, config: Mapping[str, Any]) -> str:
    if (path := fetch_file(checkpoint, "chat_template.jinja", revision)) is not None:
        return _read(path)
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((one["template"] for one in found if one.get("name") == "default"), None)
    if not isinstance(found, str):
        raise CheckpointError(f"{checkpoint} ships no chat template")
    return found


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the chat template {path}: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise ChatError(str(message))


def _arguments(options: ChatOptions) -> dict[str, Any]:
    """What templates call thinking; a name is only defined if somebody set it."""
    values = dict(options.template_arguments)
    thinking = False if options.effort == "none" else options.thinking
    if thinking is not None:
        values |= {"enable_thinking": thinking, "thinking": thinking}
    if options.effort is not None:
        values["reasoning_effort"] = options.effort
    return values


def _parsed(message: Message) -> dict[str, Any]:
    """Templates iterate over the arguments of calls, so text is parsed."""
    copy = dict(message)
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            raise ChatError(f"the arguments of tool call {number} are not JSON") from None
        calls.append({**call, "function": {**call["function"], "arguments": parsed}})
    return copy | ({"tool_calls": calls} if calls else {})
