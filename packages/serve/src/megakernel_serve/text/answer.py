"""One answer while it grows: ids in, presentable pieces out, stop strings applied on the way.

Ids are taken one by one, so that the token that completes a stop string is known even if a step
brought several; those behind it are neither shown nor counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Literal, TypeVar

from kda_mla_kernels.chat import ChatEvent, ChatParser, ContentText
from tokenizers import Tokenizer

from megakernel_serve.text.detokenizer import Detokenizer
from megakernel_serve.text.stop_strings import StopScanner

__all__ = ["Answer", "ChatAnswer", "TextAnswer"]

Piece = TypeVar("Piece")


class Answer(Generic[Piece]):
    """What both kinds of answers share: counting, and when stop strings count.

    Args:
        stops: stop strings; they are searched in text that begins after ``min_tokens`` tokens.
    """

    def __init__(self, stops: Sequence[str], min_tokens: int, include_stop: bool) -> None:
        self._scanner = StopScanner(stops, include_stop)
        self._min_tokens = min_tokens
        self.tokens = 0
        """Ids taken, up to the one that completed a stop string."""

    @property
    def matched(self) -> str | None:
        """The stop string that ended this answer."""
        return self._scanner.matched

    def push(self, token_ids: Iterable[int]) -> list[Piece]:
        """Takes the next ids, without an end id."""
        pieces: list[Piece] = []
        for token in token_ids:
            if self.matched is not None:
                break
            self.tokens += 1
            pieces += self._take(token)
        return pieces

    def _scan(self, text: str) -> str:
        return text if self.tokens <= self._min_tokens else self._scanner.push(text)

    def _take(self, token: int) -> list[Piece]:
        raise NotImplementedError


class TextAnswer(Answer[str]):
    """Plain text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        super().__init__(stops, min_tokens, include_stop)
        self._detokenizer = Detokenizer(tokenizer)

    def finish(self, reason: Literal["stop", "length", "abort"]) -> list[str]:
        """Everything that was still held back."""
        if self.matched is not None:
            return []
        return _present(self._scan(self._detokenizer.finish()) + self._scanner.flush())

    def _take(self, token: int) -> list[str]:
        return _present(self._scan(self._detokenizer.push(token)))


class ChatAnswer(Answer[ChatEvent]):
    """Events of a chat format. Stop strings apply to content: not to reasoning, not to calls."""

    def __init__(
        self,
        parser: ChatParser,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        super().__init__(stops, min_tokens, include_stop)
        self._parser = parser

    @property
    def reasoning_tokens(self) -> int:
        """Ids of the reasoning channel, markers not counted."""
        return self._parser.reasoning_tokens

    def finish(self, reason: Literal["stop", "length", "abort"]) -> list[ChatEvent]:
        """Everything that was still held back."""
        if self.matched is not None:
            return []
        events = self._filter(self._parser.finish(reason))
        return events + [ContentText(text) for text in _present(self._scanner.flush())]

    def _take(self, token: int) -> list[ChatEvent]:
        return self._filter(self._parser.push([token]))

    def _filter(self, events: Iterable[ChatEvent]) -> list[ChatEvent]:
        passed: list[ChatEvent] = []
        for event in events:
            if self.matched is not None:
                break
            if isinstance(event, ContentText):
                text = self._scan(event.text)
            else:  # content that follows a call does not continue the content before it
                text = self._scanner.flush()
            passed += [ContentText(text) for text in _present(text)]
            if not isinstance(event, ContentText):
                passed.append(event)
        return passed


def _present(text: str) -> list[str]:
    return [text] if text else []
