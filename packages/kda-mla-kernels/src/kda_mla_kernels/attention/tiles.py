"""How the slots of a cache are cut: tiles that are loaded, groups that are written."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LANES", "Groups", "check_tile", "groups_of", "longest_tile"]

LANES = 128
ROWS = 16
"""Rows of a bf16 tile, and two tiles of f32: where a dynamic row offset may point."""
TILE_BYTES = 4 << 20
"""VMEM of a tile."""


def longest_tile(slots: int, token_bytes: int, most: int) -> int:
    """Slots per tile: the most that divide them, up to ``most`` and 4 MiB of VMEM.

    The tile is part of the rounding tree: results of different tiles may differ in the last bit.

    Args:
        slots: L, below 128 or a multiple of 128.
        token_bytes: what a token takes in VMEM.
    """
    if slots < LANES:
        return slots
    most = min(most, TILE_BYTES // token_bytes)
    tiles = [tile for tile in range(LANES, most + 1, LANES) if slots % tile == 0]
    return max(tiles, default=LANES)


def check_tile(tile: int, tokens: int, slots: int) -> None:
    """Checks what a pass over a cache needs.

    Raises:
        ValueError: a tile that does not divide the slots or is no multiple of 128, or more tokens
            than slots.
    """
    if tile < 1 or slots % tile:
        raise ValueError(f"a tile of {tile} keys does not divide {slots} slots")
    if tile % LANES and tile != slots:
        raise ValueError(f"a tile of {tile} keys; it must be a multiple of {LANES}")
    if tokens > slots:
        raise ValueError(f"{tokens} tokens do not fit into {slots} slots")


@dataclass(frozen=True)
class Groups:
    """Aligned runs of slots that a read-modify-write of T consecutive slots touches.

    Attributes:
        size: slots of a group.
        count: groups that T consecutive slots touch at most.
    """

    size: int
    count: int


def groups_of(tokens: int, slots: int) -> tuple[Groups, Groups]:
    """Groups of what lies along lanes, as columns, and of what lies along rows."""

    def groups(size: int) -> Groups:
        return Groups(size, min(slots // size, (tokens + size - 2) // size + 1))

    return groups(min(LANES, slots)), groups(ROWS if slots % ROWS == 0 else slots)
