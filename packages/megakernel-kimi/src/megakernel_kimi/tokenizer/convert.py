"""Building ``tokenizers`` objects from ranks and control tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kda_mla_kernels.errors import CheckpointError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from megakernel_kimi.tokenizer.merges import recover_merges

__all__ = ["SPLIT", "control_tokenizer", "text_tokenizer"]

_HAN = r"[\p{Han}]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

SPLIT = "|".join(
    [
        _HAN,
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Cuts text into pieces that merging never crosses; a constant of the checkpoint's format."""


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies.

    Printable Latin-1 stands for itself; the others take the code points from 256 on, in order.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in itself}
    others = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def control_tokenizer(ranks: Mapping[bytes, int], specials: Mapping[int, str]) -> Tokenizer:
    """A tokenizer that recognises the names of control tokens in text.

    Raises:
        CheckpointError: a control token's name is spelled like a base token.
    """
    letters = _byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    for token, name in specials.items():
        if name in vocabulary:
            raise CheckpointError(
                f"control token {name!r} (id {token}) is spelled like base token {vocabulary[name]}"
            )
        # add_special_tokens gives the next free id unless the vocabulary knows the name.
        vocabulary[name] = token
    merges = [(spell(left), spell(right)) for left, right in recover_merges(ranks)]
    # ignore_merges: a piece that is a token as a whole is that token, also if merging cannot
    # reach it.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    # All as special, also those that the checkpoint does not mark so: otherwise decoding with
    # skip_special_tokens would show some of them.
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in specials.values()]
    )
    return tokenizer


def text_tokenizer(control: Tokenizer, specials: Mapping[int, str]) -> Tokenizer:
    """The same tokenizer without control tokens: their names in a text are ordinary text.

    An object of its own, since ``Tokenizer.encode_special_tokens`` is a flag that all users of an
    object share and that a saved file forgets.
    """
    content = json.loads(control.to_str())
    content["added_tokens"] = []
    for name in specials.values():
        del content["model"]["vocab"][name]
    return Tokenizer.from_str(json.dumps(content))
