"""``megakernel chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megakernel_serve.cli.main import UsageError
from megakernel_serve.cli.streams import output, utf8

if TYPE_CHECKING:
    from kda_mla_kernels.chat import ChatEvent, ChatFormat, ChatOptions, Rendered

    from megakernel_serve.cli.main import Invocation
    from megakernel_serve.engine import Engine, Request

__all__ = ["run"]

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def run(invocation: Invocation) -> int:
    """Runs the command."""
    from kda_mla_kernels.chat import ChatOptions
    from kda_mla_kernels.errors import ConfigError

    from megakernel_serve.cli.terminal import status
    from megakernel_serve.engine import Engine
    from megakernel_serve.loading import choose, load

    output()  # tells before anything is loaded that it is closed
    settings = invocation.settings
    loaded = load(choose(invocation), settings, progress=status.is_terminal)
    if loaded.chat_format is None:
        raise ConfigError("this model has no chat format; try --chat-template auto")
    status.print(f"{loaded.model.info.name}. {HELP}", soft_wrap=True)
    options = ChatOptions(thinking=settings.thinking, effort=settings.effort)
    with Engine(loaded.model, max_waiting=1) as engine:
        engine.warm_up()  # so that the figures are of running, not of compiling
        _Conversation(engine, loaded.chat_format, options, invocation).run()
    return 0


@dataclass
class _Turn:
    """What an answer has brought so far."""

    reasoning: str = ""
    content: str = ""


class _Conversation:
    def __init__(
        self,
        engine: Engine,
        chat_format: ChatFormat,
        options: ChatOptions,
        invocation: Invocation,
    ) -> None:
        from rich.console import Console

        self._engine, self._format, self._options = engine, chat_format, options
        self._settings = invocation.settings
        self._out = Console(file=output(), highlight=False, markup=False, soft_wrap=True)
        self._messages: list[dict[str, Any]] = []
        self._reset()

    def run(self) -> None:
        """Reads lines until the end of input."""
        while (line := self._read()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                self._reset()
            elif line.startswith("/"):
                self._out.print(f"unknown command {line}: {HELP}")
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        if sys.stdin is None:
            return None
        try:
            return utf8(input("> " if sys.stdin.isatty() else "").strip(), "standard input")
        except UnicodeDecodeError:
            raise UsageError("standard input is not valid UTF-8") from None
        except EOFError:
            return None

    def _reset(self) -> None:
        system = self._settings.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def _answer(self, text: str) -> None:
        from kda_mla_kernels.chat import ChatError

        from megakernel_serve.cli.terminal import status
        from megakernel_serve.engine import EngineError

        asked = [*self._messages, {"role": "user", "content": text}]
        try:
            rendered = self._format.render(asked, self._options)
            turn = self._generate(rendered, self._request(rendered))
        except (ChatError, EngineError, ValueError) as error:
            status.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            return
        answer = {"role": "assistant", "content": turn.content}
        if turn.reasoning:
            answer["reasoning_content"] = turn.reasoning
        self._messages = [*asked, answer]

    def _request(self, rendered: Rendered) -> Request:
        from megakernel_serve.cli.terminal import sampling_params
        from megakernel_serve.engine import Request

        model = self._engine.model
        # With no room left one token is asked for, and the engine says why it cannot be.
        room = max(1, model.info.max_context - len(rendered.token_ids))
        return Request(
            rendered.token_ids,
            min(room, self._settings.max_tokens or room),
            sampling_params(self._settings, model.generation),
            stop_ids=self._format.stop_ids,
        )

    def _generate(self, rendered: Rendered, request: Request) -> _Turn:
        from megakernel_serve.cli.terminal import figures, status
        from megakernel_serve.text import ChatAnswer

        handle = self._engine.submit(request)
        answer, turn = ChatAnswer(self._format.parser(rendered)), _Turn()
        try:
            for delta in handle:
                self._show(answer.push(delta.token_ids), turn)
                if (finish := delta.finish) is not None:
                    self._show(answer.finish(finish.reason), turn)
                    line = figures(len(request.prompt), answer.tokens, finish)
        except KeyboardInterrupt:
            handle.cancel()
            line = "stopped"
        self._out.print()
        status.print(line, style="dim", markup=False, soft_wrap=True)
        return turn

    def _show(self, events: list[ChatEvent], turn: _Turn) -> None:
        from kda_mla_kernels.chat import (
            CallArguments,
            CallEnd,
            CallStart,
            ContentText,
            ReasoningText,
        )

        for event in events:
            match event:
                case ReasoningText(text):
                    turn.reasoning += text
                    self._out.print(text, end="", style="dim")
                case ContentText(text):
                    if turn.reasoning and not turn.content:
                        self._out.print("\n")
                    turn.content += text
                    self._out.print(text, end="")
                case CallStart(_, name):
                    self._out.print(f"\n[call of {name} ", end="", style="dim")
                case CallArguments(_, text):
                    self._out.print(text, end="", style="dim")
                case CallEnd():
                    self._out.print("]", end="", style="dim")
