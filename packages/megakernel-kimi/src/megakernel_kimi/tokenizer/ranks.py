"""Reading a tiktoken rank file: one token per line, base64 of its bytes, a space, its rank."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from kda_mla_kernels.errors import CheckpointError

__all__ = ["read_ranks"]


def read_ranks(path: str | Path) -> dict[bytes, int]:
    """Rank (which is the token id) of every base token. Ranks may have holes.

    Raises:
        CheckpointError: the file is missing, a line is malformed, a token or rank comes twice, or
            one of the 256 single bytes is missing, without which some text could not be encoded.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        token, rank = _parse(line, f"{path}, line {number}")
        if token in ranks:
            raise CheckpointError(f"{path}, line {number}: token {token!r} comes twice")
        if rank in taken:
            raise CheckpointError(f"{path}, line {number}: rank {rank} comes twice")
        ranks[token] = rank
        taken.add(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of the 256 single bytes have no rank, first {missing[0]:#04x}"
        )
    return ranks


def _parse(line: bytes, place: str) -> tuple[bytes, int]:
    parts = line.split()
    try:
        if len(parts) != 2:
            raise ValueError
        token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        if not token or rank < 0:
            raise ValueError
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(
            f"{place} is {line[:80]!r}; it must be base64 bytes, a space and a rank"
        ) from error
    return token, rank
