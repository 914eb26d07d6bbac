"""Recovering the merges of a byte-pair encoding from its ranks.

A rank file lists tokens, not the pair each was merged from. But the pair is determined: encoding a
token's own bytes with only the tokens before it stops one merge short, at the pair.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["recover_merges"]


def recover_merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair behind every token that merging can reach, in rank order.

    A token whose bytes do not come down to two pieces has no pair: an encoder can only take it
    whole.
    """
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) < 2:
            continue
        pieces = _encode_below(token, ranks, rank)
        if len(pieces) == 2:
            pairs.append((pieces[0], pieces[1]))
    return pairs


def _encode_below(token: bytes, ranks: Mapping[bytes, int], limit: int) -> list[bytes]:
    """Byte-pair encoding with the ranks below ``limit``: lowest rank first, leftmost first."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        best, at = limit, -1
        for i in range(len(pieces) - 1):
            rank = ranks.get(pieces[i] + pieces[i + 1], limit)
            if rank < best:
                best, at = rank, i
        if at < 0:
            break
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces
