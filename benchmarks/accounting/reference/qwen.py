"""The published Qwen round on 8 ranks: draft of 7 tokens, verify of 8 rows, choice of a snapshot.

Sizes, order and overlap are those of its description: one ring of 12 banks for all weights of the
target, which its exchanges leave running; a draft that loads a layer when it is reached. Core work
of which no figure is known (norms, convolution, rotary embedding, packing and local sums, address
arithmetic, glue) counts nothing, so the schedule is a lower bound of what the model can say.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.accounting.program import Program
from benchmarks.accounting.reference.builder import ScheduleWriter, product_cycles

__all__ = ["PUBLISHED_US", "draft", "select_snapshot", "verify"]

PUBLISHED_US = 3960.0
"""1,515 tokens a second at a forced acceptance length of 6."""
ROWS, PEERS, HIDDEN = 8, 7, 5120
LAYERS, FULL_EVERY = 64, 4
BANKS = 12
BF16, F32 = 2, 4

QKVZ = (10, 1024 * 1280)
QWKV = (10, 1024 * 1024)
OUT = (4, 768 * 1280)
GATE_UP = (20, 1024 * 1152)
DOWN = (12, 768 * 1280)
HEAD = (125, 1024 * 1280)
"""Tiles of each matrix, and weights of one."""

STATE_BYTES = 6 * 128 * 128 * F32
CONV_BYTES = 1280 * 4 * BF16
RECURRENCE_CYCLES = 2 * 2772
"""Eight rows of six heads; compiled for three."""
KEY_TILE = 128
KEY_TILE_BYTES = KEY_TILE * 256 * BF16
KEY_TILE_CYCLES = 2 * 240
"""Two dots, each with the fill and drain of the matrix unit."""

DRAFT_LAYERS, DRAFT_CHUNKS = 5, 17
DRAFT_ATTENTION = {"q": 512, "kv": 256, "o": 512}
DRAFT_CONV = 1280
DRAFT_MLP = 2176
DRAFT_HEAD = (25, HIDDEN * 1280)
TOP_K_CYCLES = 4725
"""16 arg-max rounds of eight rows; compiled for 896 columns."""


def verify(position: int) -> Program:
    """The target's kernel at 8 rows."""
    write = ScheduleWriter("published verify", BANKS)
    stream = _Stream(write)
    stream.prime()
    write.exchange(PEERS, 0)  # the entry barrier
    _all_reduce(write)
    for layer in range(LAYERS):
        if layer % FULL_EVERY == FULL_EVERY - 1:
            _attention(write, stream, position)
        else:
            _delta_net(write, stream)
        _all_reduce(write)
        stream.product("gate_up", *GATE_UP)
        stream.product("down", *DOWN)
        _all_reduce(write)
    stream.product("head", *HEAD)
    write.exchange(PEERS, ROWS * 2 * F32)
    return write.program()


def draft(position: int) -> Program:
    """The drafter's kernel: 13 exchanges, weights of a layer loaded when it begins."""
    write = ScheduleWriter("published draft")
    row_block = ROWS * HIDDEN * BF16
    _streamed(write, "fold", 50, 64 * HIDDEN * BF16)
    write.exchange(PEERS, row_block)
    write.exchange(PEERS, 0)  # the entry barrier
    write.exchange(PEERS, row_block)
    for _ in range(DRAFT_LAYERS):
        weights = {
            name: HIDDEN * columns * BF16
            for name, columns in {**DRAFT_ATTENTION, "conv": DRAFT_CONV}.items()
        }
        for name, size in weights.items():
            write.load(name, size, "weights")
        for name in ("conv", "q", "kv"):
            write.wait(name, weights[name], "weights")
            write.work(product_cycles(weights[name]), name)
        _streamed(write, "context", -(-position // KEY_TILE), KEY_TILE * HIDDEN * BF16)
        write.wait("o", weights["o"], "weights")
        write.work(product_cycles(weights["o"]), "o")
        write.exchange(PEERS, row_block)
        write.load("mlp_conv", weights["conv"], "weights")
        write.wait("mlp_conv", weights["conv"], "weights")
        write.work(product_cycles(weights["conv"]), "conv")
        _streamed(write, "mlp", DRAFT_CHUNKS, 3 * DRAFT_MLP * HIDDEN * BF16 / DRAFT_CHUNKS)
        write.exchange(PEERS, row_block)
    _streamed(write, "head", DRAFT_HEAD[0], DRAFT_HEAD[1] * BF16, TOP_K_CYCLES)
    write.exchange(PEERS, ROWS * 16 * 2 * F32)
    write.work(TOP_K_CYCLES, "top k")
    return write.program()


def select_snapshot() -> Program:
    """XLA's copy of the chosen state: read and write of one snapshot of all linear layers."""
    write = ScheduleWriter("published selection")
    size = (LAYERS - LAYERS // FULL_EVERY) * STATE_BYTES
    write.load("read", size, "state")
    write.store("written", size, "state")
    return write.program()


class _Stream:
    """The ring: bank g mod 12 holds tile g, and is loaded with tile g + 12 after its use."""

    def __init__(self, write: ScheduleWriter) -> None:
        self.write = write
        self.tiles = list(_tile_bytes())
        self.next = 0

    def prime(self) -> None:
        for number in range(BANKS):
            self._load(number)

    def product(self, name: str, tiles: int, weights: int) -> None:
        for _ in range(tiles):
            number, self.next = self.next, self.next + 1
            self.write.wait("ring", self.tiles[number], "weights", number % BANKS)
            self.write.work(product_cycles(weights * BF16), name)
            if number + BANKS < len(self.tiles):
                self._load(number + BANKS)

    def _load(self, number: int) -> None:
        self.write.load("ring", self.tiles[number], "weights", number % BANKS)


def _tile_bytes() -> Iterator[int]:
    """Of all tiles in order."""
    for layer in range(LAYERS):
        full = layer % FULL_EVERY == FULL_EVERY - 1
        for tiles, weights in (QWKV if full else QKVZ, OUT, GATE_UP, DOWN):
            yield from [weights * BF16] * tiles
    yield from [HEAD[1] * BF16] * HEAD[0]


def _all_reduce(write: ScheduleWriter) -> None:
    """Reduce-scatter in f32, all-gather in bf16, 640 columns of 8 rows to each of 7 peers."""
    columns = HIDDEN // (PEERS + 1)
    write.exchange(PEERS, ROWS * columns * F32)
    write.exchange(PEERS, ROWS * columns * BF16)


def _delta_net(write: ScheduleWriter, stream: _Stream) -> None:
    """The state loads beside the input product; each row's state goes to a snapshot."""
    write.load("state", STATE_BYTES + CONV_BYTES, "state")
    stream.product("qkvz", *QKVZ)
    write.wait("state", STATE_BYTES + CONV_BYTES, "state")
    for _ in range(ROWS):
        write.work(RECURRENCE_CYCLES // ROWS, "delta rule")
        write.store("snapshot", STATE_BYTES, "state")
    write.wait("snapshot", ROWS * STATE_BYTES, "state")
    write.store("last", STATE_BYTES, "state")
    stream.product("outw", *OUT)
    write.wait("last", STATE_BYTES, "state")


def _attention(write: ScheduleWriter, stream: _Stream, position: int) -> None:
    """Keys and values in double-buffered tiles, from the start of attention on."""
    stream.product("qwkv", *QWKV)
    tiles = -(-(position + ROWS) // KEY_TILE)
    _streamed(write, "keys", tiles, 2 * KEY_TILE_BYTES, KEY_TILE_CYCLES, "cache")
    write.store("keys written", 2 * KEY_TILE_BYTES, "cache")
    stream.product("ow", *OUT)
    write.wait("keys written", 2 * KEY_TILE_BYTES, "cache")


def _streamed(
    write: ScheduleWriter,
    name: str,
    tiles: int,
    tile_bytes: float,
    more_cycles: int | None = None,
    kind: str = "weights",
) -> None:
    """Tiles through two buffers: a tile is loaded when the one before the last has been used."""
    work = product_cycles(tile_bytes) if kind == "weights" else 0
    for number in range(min(2, tiles)):
        write.load(name, tile_bytes, kind, number)
    for number in range(tiles):
        write.wait(name, tile_bytes, kind, number % 2)
        write.work(work + (more_cycles or 0), name)
        if number + 2 < tiles:
            write.load(name, tile_bytes, kind, number % 2)
