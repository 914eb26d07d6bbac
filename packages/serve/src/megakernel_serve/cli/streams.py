"""Standard input and output: what goes wrong there is one clear sentence."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn, TextIO, cast

from megakernel_serve.cli.main import UsageError

__all__ = ["OutputError", "output", "read_input", "utf8"]


class OutputError(RuntimeError):
    """The answer cannot be written."""


def output() -> TextIO:
    """Standard output, whose errors are :class:`OutputError`.

    Raises:
        OutputError: it is closed.
    """
    if sys.stdout is None:  # started with >&-
        raise OutputError("standard output is closed, so there is nowhere to write to")
    return cast("TextIO", _Output(sys.stdout))


def read_input() -> str:
    """All of standard input; empty if it is closed or a terminal.

    Raises:
        UsageError: it is not valid UTF-8.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return utf8(sys.stdin.read(), "standard input")
    except UnicodeDecodeError:
        raise UsageError("standard input is not valid UTF-8") from None


def utf8(text: str, place: str) -> str:
    """The text, unless it holds bytes that Python could not decode.

    Raises:
        UsageError: it does.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{place} is not valid UTF-8") from None
    return text


class _Output:
    """A stream in the same place."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            raise OutputError(
                f"standard output cannot show {text[error.start]!a}: its encoding is"
                f" {self._stream.encoding}, not UTF-8 (set PYTHONIOENCODING=utf-8)"
            ) from None
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        if isinstance(error, BrokenPipeError):
            raise error
        # What is still buffered would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        raise OutputError(f"cannot write to standard output: {error.strerror}") from None
