"""The tokenizer that rendering, parsing and serving use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kda_mla_kernels.errors import CheckpointError
from tokenizers import Tokenizer

from megakernel_kimi.tokenizer.cache import cached
from megakernel_kimi.tokenizer.convert import control_tokenizer, text_tokenizer
from megakernel_kimi.tokenizer.limits import cut
from megakernel_kimi.tokenizer.ranks import read_ranks
from megakernel_kimi.tokenizer.specials import fill_slots, read_specials

__all__ = ["KimiTokenizer", "load_tokenizer"]


class KimiTokenizer:
    """Text to ids and ids to bytes.

    Args:
        ranks: id of every base token.
        specials: names of control tokens by id; ids above the highest rank that it does not name
            become ``<|reserved_token_ID|>``.
        vocab_size: rows of the embedding; default: 256 above the highest rank.
        cache: folder that keeps the converted tokenizer; default: convert each time.

    Raises:
        CheckpointError: ids or names collide or lie outside the vocabulary.
    """

    control: Tokenizer
    """Recognises the names of control tokens in text. For trusted text only."""
    text: Tokenizer
    """Reads everything as ordinary text."""

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        specials: Mapping[int, str],
        vocab_size: int | None = None,
        cache: str | Path | None = None,
    ) -> None:
        names = fill_slots(specials, ranks, vocab_size)
        if cache is None:
            self.control = control_tokenizer(ranks, names)
        else:
            self.control = cached(
                Path(cache), ranks, names, lambda: control_tokenizer(ranks, names)
            )
        self.text = text_tokenizer(self.control, names)
        self.vocab_size = max(max(names, default=0), max(ranks.values())) + 1
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._ids = {name: token for token, name in names.items()}

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token, whatever it looks like.

        Texts with very long runs are cut first, as the checkpoint's own tokenizer does.
        """
        ids: list[int] = []
        for piece in cut(text):
            ids += self.text.encode(piece, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for: none for control tokens and ids without a token."""
        return self._bytes.get(token, b"")

    def is_text(self, token: int) -> bool:
        """Whether an id is a base token (and not a control token, a hole or out of range)."""
        return token in self._bytes

    def special_id(self, name: str) -> int:
        """Id of a control token.

        Raises:
            CheckpointError: there is none of this name.
        """
        if name not in self._ids:
            raise CheckpointError(f"the tokenizer has no control token named {name!r}")
        return self._ids[name]


def load_tokenizer(
    folder: str | Path, *, vocab_size: int | None = None, cache: str | Path | None = None
) -> KimiTokenizer:
    """Reads ``tiktoken.model`` and ``tokenizer_config.json`` of a checkpoint's folder.

    No code of the checkpoint is run. Arguments as for :class:`KimiTokenizer`.

    Raises:
        CheckpointError: a file is missing or malformed, or ids do not fit together.
    """
    folder = Path(folder)
    ranks = read_ranks(folder / "tiktoken.model")
    specials = read_specials(folder / "tokenizer_config.json")
    return KimiTokenizer(ranks, specials, vocab_size, cache)
