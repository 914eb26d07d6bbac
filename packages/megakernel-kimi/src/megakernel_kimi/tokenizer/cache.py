"""Keeping a converted tokenizer on disk, since recovering its merges takes a while."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import Tokenizer

__all__ = ["cached"]

_FORMAT = 1
"""Counts changes of the conversion, so that none reads an older one's file."""


def cached(
    folder: Path,
    ranks: Mapping[bytes, int],
    specials: Mapping[int, str],
    convert: Callable[[], Tokenizer],
) -> Tokenizer:
    """The converted tokenizer from ``folder``, or a new one that is then kept there.

    A file that does not load is replaced. The name holds a digest of everything that the
    conversion reads.
    """
    path = folder / f"kimi-{_digest(ranks, specials)}.tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # tokenizers raises bare Exception for a missing or damaged file
        tokenizer = convert()
    folder.mkdir(parents=True, exist_ok=True)
    # Written aside and moved, so that a second process never reads half a file.
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(tokenizer.to_str())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return tokenizer


def _digest(ranks: Mapping[bytes, int], specials: Mapping[int, str]) -> str:
    digest = hashlib.sha256(f"format {_FORMAT}\n".encode())
    for token, rank in ranks.items():
        digest.update(b"%s %d\n" % (token.hex().encode(), rank))
    digest.update(json.dumps(sorted(specials.items())).encode())
    return digest.hexdigest()[:32]
