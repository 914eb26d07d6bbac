"""Writing tags and text as token ids.

Every piece is encoded on its own, as the model saw it in training: encoding joined pieces at once
merges letters across their borders and gives other ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kda_mla_kernels.chat import ChatError

from megakernel_kimi.chat.markers import Markers
from megakernel_kimi.tokenizer import KimiTokenizer

__all__ = ["Writer"]


class Writer:
    """Collects the ids of a prompt."""

    def __init__(self, tokenizer: KimiTokenizer, markers: Markers) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._markers = markers

    def text(self, text: str) -> None:
        """One ordinary text.

        Raises:
            ChatError: it has half of a surrogate pair, which no encoding can express.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ChatError(
                f"a text holds the lone surrogate U+{ord(text[error.start]):04X}, which is not a"
                " character"
            ) from error
        self.ids += self._tokenizer.encode_text(text)

    def open(self, tag: str, **attributes: str | None) -> None:
        """An opening tag with its attributes in order; those that are None are left out."""
        self.ids.append(self._markers.open)
        self.text(tag)
        for key, value in attributes.items():
            if value is not None:
                self.text(f" {key}")
                self.text('="')
                self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
                self.text('"')
        self.ids.append(self._markers.sep)

    def close(self, tag: str) -> None:
        """A closing tag."""
        self.ids.append(self._markers.close)
        self.text(tag)
        self.ids.append(self._markers.sep)

    @contextmanager
    def element(self, tag: str, **attributes: str | None) -> Iterator[None]:
        """A tag around what is written inside."""
        self.open(tag, **attributes)
        yield
        self.close(tag)

    @contextmanager
    def message(self, role: str, **attributes: str | None) -> Iterator[None]:
        """A message around what is written inside."""
        with self.element("message", role=role, **attributes):
            yield
        self.ids.append(self._markers.end_of_message)
