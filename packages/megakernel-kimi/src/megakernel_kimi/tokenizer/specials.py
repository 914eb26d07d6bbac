"""Control tokens: their names and exact ids, and names for the slots that have none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kda_mla_kernels.errors import CheckpointError

__all__ = ["RESERVED_SLOTS", "fill_slots", "read_specials"]

RESERVED_SLOTS = 256
"""Ids above the highest rank that the vocabulary keeps for control tokens."""


def read_specials(path: str | Path) -> dict[int, str]:
    """Names of the control tokens by id, from a ``tokenizer_config.json``.

    Raises:
        CheckpointError: the file is missing, or its ``added_tokens_decoder`` is malformed.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        added = config["added_tokens_decoder"]
        specials = {int(token): entry["content"] for token, entry in added.items()}
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} must hold added_tokens_decoder, an object of ids to objects with content"
        ) from error
    if not all(isinstance(name, str) and name for name in specials.values()):
        raise CheckpointError(f"{path}: every content of added_tokens_decoder must be a text")
    return specials


def fill_slots(
    specials: Mapping[int, str], ranks: Mapping[bytes, int], vocab_size: int | None
) -> dict[int, str]:
    """Gives every id above the highest rank a name: the known one, or a reserved one.

    Args:
        vocab_size: rows of the embedding; default: 256 above the highest rank.

    Raises:
        CheckpointError: a control token's id belongs to a base token or lies outside the
            vocabulary, or a name comes twice.
    """
    base = max(ranks.values()) + 1
    size = base + RESERVED_SLOTS if vocab_size is None else vocab_size
    if size < base:
        raise CheckpointError(f"the rank file has ids up to {base - 1}, the vocabulary {size} rows")
    tokens = {rank: token for token, rank in ranks.items()}
    for token, name in specials.items():
        if token in tokens:
            raise CheckpointError(
                f"control token {name!r} has id {token}, which is the base token {tokens[token]!r}"
            )
        if not 0 <= token < size:
            raise CheckpointError(
                f"control token {name!r} has id {token}, but the vocabulary has {size} rows"
            )
    reserved = {token: f"<|reserved_token_{token}|>" for token in range(base, size)}
    named = dict(sorted((reserved | dict(specials)).items()))
    if len(set(named.values())) != len(named):
        names = list(named.values())
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"the name {twice!r} belongs to two control tokens")
    return named
