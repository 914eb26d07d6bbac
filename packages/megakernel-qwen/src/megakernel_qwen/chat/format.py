"""Rendering of a conversation, and the pairing of a prompt with its parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kda_mla_kernels.chat import ChatOptions, Message, Rendered

from megakernel_qwen.chat.dialect import QWEN3_8, Dialect
from megakernel_qwen.chat.markers import Markers
from megakernel_qwen.chat.messages import Call, Turn, last_query, read_messages
from megakernel_qwen.chat.parser import QwenChatParser
from megakernel_qwen.chat.prompt import PromptBuilder
from megakernel_qwen.chat.settings import Settings, resolve
from megakernel_qwen.chat.template import TOOL_INSTRUCTIONS, TOOLS_FOOTER, TOOLS_HEADER
from megakernel_qwen.tokenizer import QwenTokenizer

__all__ = ["QwenChatFormat"]


class QwenChatFormat:
    """The Qwen3.8 chat format, a :class:`kda_mla_kernels.chat.ChatFormat`.

    Texts of a request never become control tokens, whatever they spell. ``tool_choice`` of
    ``"required"`` or a named function ends the prompt inside a call and turns thinking off;
    ``"none"`` leaves the tools out of the prompt, and no call is reported.

    Args:
        tokenizer: the checkpoint's tokenizer.
        dialect: the generation's defaults, see :func:`megakernel_qwen.chat.read_dialect`.

    Raises:
        CheckpointError: the tokenizer lacks a control token of the format.
    """

    stop_ids: frozenset[int]
    """End of turn and end of text."""

    def __init__(self, tokenizer: QwenTokenizer, dialect: Dialect = QWEN3_8) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._markers = Markers.of(tokenizer)
        self.stop_ids = frozenset({self._markers.turn_end, self._markers.end_of_text})

    def render(self, messages: Sequence[Message], options: ChatOptions) -> Rendered:
        """Token ids of a conversation and of the prefix that starts the next answer.

        Raises:
            ChatError: the conversation or an option cannot be expressed; ``param`` names it.
        """
        settings = resolve(options, self._dialect)
        turns = read_messages(messages)
        query = last_query(turns)
        prompt = PromptBuilder(self._tokenizer, self._markers)
        system = turns[0].text if turns[0].role == "system" else ""
        _add_system(prompt, system, settings)
        for place, turn in enumerate(turns):
            if turn.role == "user":
                _add_turn(prompt, "user", turn.text)
            elif turn.role == "assistant":
                _add_answer(prompt, turn, settings.preserve_thinking or place > query)
            elif turn.role == "tool":
                _add_result(prompt, turns, place)
        _add_answer_prefix(prompt, settings)
        return Rendered(prompt.token_ids(), settings.thinking, options)

    def parser(self, rendered: Rendered) -> QwenChatParser:
        """A parser for one answer to ``rendered``."""
        settings = resolve(rendered.options, self._dialect)
        settings = replace(settings, thinking=rendered.thinking)
        return QwenChatParser(self._tokenizer, self._markers, settings)


def _add_turn(prompt: PromptBuilder, role: str, text: str) -> None:
    prompt.fixed(f"<|im_start|>{role}\n")
    prompt.given(text)
    prompt.fixed("<|im_end|>\n")


def _add_system(prompt: PromptBuilder, text: str, settings: Settings) -> None:
    if not (text or settings.tools or settings.effort_line):
        return
    prompt.fixed("<|im_start|>system\n")
    prompt.fixed(settings.effort_line)
    if settings.effort_line and (text or settings.tools):
        prompt.fixed("\n\n")
    if settings.tools:
        _add_tools(prompt, settings.tools)
        prompt.fixed("\n\n" if text else "")
    prompt.given(text)
    prompt.fixed("<|im_end|>\n")


def _add_tools(prompt: PromptBuilder, tools: Sequence[Mapping[str, Any]]) -> None:
    prompt.fixed(TOOLS_HEADER)
    for tool in tools:
        prompt.given("\n" + json.dumps(tool, ensure_ascii=False))
    prompt.fixed(TOOLS_FOOTER + "\n\n" + TOOL_INSTRUCTIONS)


def _add_answer(prompt: PromptBuilder, turn: Turn, with_reasoning: bool) -> None:
    prompt.fixed("<|im_start|>assistant\n")
    if with_reasoning:
        prompt.fixed("<think>\n")
        prompt.given(turn.reasoning)
        prompt.fixed("\n</think>\n\n")
    prompt.given(turn.text)
    for place, call in enumerate(turn.calls):
        if place > 0:
            prompt.fixed("\n")
        elif turn.text:
            prompt.fixed("\n\n")
        _add_call(prompt, call)
    prompt.fixed("<|im_end|>\n")


def _add_call(prompt: PromptBuilder, call: Call) -> None:
    prompt.fixed("<tool_call>\n")
    prompt.given(f"<function={call.name}>\n")
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        prompt.given(f"<parameter={key}>\n{text}\n</parameter>\n")
    prompt.fixed("</function>\n</tool_call>")


def _add_result(prompt: PromptBuilder, turns: Sequence[Turn], place: int) -> None:
    first = turns[place - 1].role != "tool" if place > 0 else True
    last = turns[place + 1].role != "tool" if place + 1 < len(turns) else True
    if first:
        prompt.fixed("<|im_start|>user")
    prompt.fixed("\n<tool_response>\n")
    prompt.given(turns[place].text)
    prompt.fixed("\n</tool_response>")
    if last:
        prompt.fixed("<|im_end|>\n")


def _add_answer_prefix(prompt: PromptBuilder, settings: Settings) -> None:
    prompt.fixed("<|im_start|>assistant\n<think>\n")
    if settings.thinking:
        return
    prompt.fixed("\n</think>\n\n")
    if settings.forced_call:
        prompt.fixed("<tool_call>\n")
        prompt.given(settings.forced_call)
