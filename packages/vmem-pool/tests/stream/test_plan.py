"""Plans of streams: what stands where, how much is padding, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from vmem_pool import PlanError
from vmem_pool.stream import Cut, Matrix, choose_slot_bytes, plan_stream, print_stream

KIB, MIB = 1 << 10, 1 << 20
WIDE = Matrix("wide", (5120, 4352), jnp.bfloat16)
DEEP = Matrix("deep", (2176, 5120), jnp.bfloat16)
NORM = Matrix("norm", (1, 5120), jnp.float32)


def _one(*matrices, slot_bytes, depth=4):
    return plan_stream({"s": matrices}, ["s"], slot_bytes=slot_bytes, depth=depth)


def _random_segments(seed):
    random = np.random.default_rng(seed)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4)
    return {
        kind: [
            Matrix(f"m{n}", tuple(random.integers(1, 700, 2).tolist()), random.choice(dtypes))
            for n in range(random.integers(1, 6))
        ]
        for kind in ("a", "b")
    }


@pytest.mark.parametrize("seed", range(40))
def test_tiles_cover_every_matrix_once_and_never_share_bytes(seed):
    segments = _random_segments(seed)
    planned = plan_stream(segments, ["a", "b", "a"], slot_bytes=512 * KIB, depth=2)
    for name, matrices in segments.items():
        segment = planned.segments[name]
        assert [m.name for m in segment.matrices] == [m.name for m in matrices]
        used = np.zeros((segment.num_slots, planned.slot_rows), bool)
        for matrix in matrices:
            covered = np.zeros(matrix.shape, int)
            for tile in segment.of(matrix.name):
                covered[
                    tile.rows.start : tile.rows.stop, tile.columns.start : tile.columns.stop
                ] += 1
                rows = slice(tile.byte_row, tile.byte_row + tile.bytes // 128)
                assert rows.stop <= planned.slot_rows
                assert tile.byte_row % 32 == 0
                assert not used[tile.slot, rows].any()
                used[tile.slot, rows] = True
            assert (covered == 1).all()
        assert used.any(axis=1).all(), "a slot without contents"


@pytest.mark.parametrize("seed", range(10))
def test_tiles_are_consumed_in_the_order_of_their_slots(seed):
    planned = plan_stream(_random_segments(seed), ["a", "b"], slot_bytes=512 * KIB, depth=2)
    for segment in planned.segments.values():
        at = [(tile.slot, tile.byte_row) for tile in segment.tiles]
        assert at == sorted(at)
        assert [t.alone for t in segment.tiles] == [
            segment.tiles_in_slot[t.slot] == 1 for t in segment.tiles
        ]


def test_a_matrix_that_divides_fills_its_slots():
    planned = _one(WIDE, slot_bytes=2560 * KIB)
    assert planned.bytes == planned.payload_bytes == 5120 * 4352 * 2
    assert {tile.shape for tile in planned.segments["s"].tiles} == {(5120, 256)}


def test_a_matrix_whose_columns_waste_space_is_cut_by_rows():
    planned = _one(DEEP, slot_bytes=2560 * KIB)
    tiles = planned.segments["s"].tiles
    assert {tile.cut for tile in tiles} == {Cut.ROWS}
    assert [tile.shape for tile in tiles] == [(256, 5120)] * 8 + [(128, 5120)]


def test_the_cut_can_be_demanded():
    deep = Matrix("deep", (2176, 5120), jnp.bfloat16, Cut.COLUMNS)
    planned = _one(deep, slot_bytes=2560 * KIB)
    assert planned.segments["s"].tiles[0].shape == (2176, 512)
    assert planned.bytes > _one(DEEP, slot_bytes=2560 * KIB).bytes


def test_a_matrix_begins_in_what_the_one_before_it_leaves():
    tiles = _one(DEEP, WIDE, slot_bytes=2560 * KIB).segments["s"].tiles
    shared = [tile.matrix.name for tile in tiles if tile.slot == 8]
    assert shared == ["deep", "wide"]


def test_small_matrices_share_a_slot():
    segment = _one(NORM, Matrix("bias", (1, 300), jnp.float32), slot_bytes=MIB).segments["s"]
    assert segment.num_slots == 1
    assert [tile.byte_row for tile in segment.tiles] == [0, 8 * 5120 * 4 // 128]


def test_positions_follow_the_order_of_the_segments():
    segments = {"a": [Matrix("m", (32, 128), jnp.bfloat16)], "b": [Matrix("m", (128, 256), "f4")]}
    planned = plan_stream(segments, ["a", "b", "b", "a"], slot_bytes=64 * KIB, depth=2)
    assert planned.starts == (0, 1, 3, 5)
    assert planned.positions("b") == (1, 3)
    assert planned.image_shape == (6, 512, 128)
    assert planned.bytes == 6 * 64 * KIB
    assert planned.ring_bytes == 128 * KIB
    assert not planned.saturates_hbm


def test_the_chosen_slot_size_wastes_least():
    segments = {"layer": [NORM, WIDE, DEEP]}
    order = ["layer"] * 4
    size = choose_slot_bytes(segments, order)
    chosen = plan_stream(segments, order, slot_bytes=size, depth=8)
    for other in (MIB + 512 * KIB, 2 * MIB, 3 * MIB):
        assert chosen.bytes <= plan_stream(segments, order, slot_bytes=other, depth=8).bytes
    assert chosen.bytes < 1.02 * chosen.payload_bytes


def test_the_printed_plan_has_tiles_slots_and_padding(capsys):
    print_stream(_one(DEEP, WIDE, slot_bytes=2560 * KIB, depth=8), Console(width=160))
    printed = " ".join(capsys.readouterr().out.split())
    assert "stream of 26 slots of 2.500 MiB" in printed
    assert "2176x5120 │ 8 of 256x5120, 1 of 128x5120 │ 0..8" in printed
    assert "ring of 8 slots with 20.0 MiB, enough to keep" in printed


SMALL = Matrix("m", (8, 128), jnp.float32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: _one(SMALL, slot_bytes=5000), "multiple of 4096 bytes, not 5000"),
        (lambda: _one(SMALL, slot_bytes=4096.0), "multiple of 4096 bytes, not 4096.0"),
        (lambda: _one(SMALL, slot_bytes=4096, depth=0), "at least 1, not 0"),
        (lambda: _one(SMALL, slot_bytes=4096, depth=1.5), "whole number of at least 1, not 1.5"),
        (
            lambda: plan_stream({"s": [SMALL]}, ["s"] * 16385, slot_bytes=4096, depth=1),
            "at most 16384 slots, not 16385",
        ),
        (lambda: _one(slot_bytes=4096), "segment s has no matrices"),
        (lambda: _one(SMALL, SMALL, slot_bytes=4096), "has matrix m twice"),
        (lambda: _one(WIDE, slot_bytes=MIB), r"wide \(5120, 4352\).* at least 1114112 bytes"),
        (lambda: choose_slot_bytes({"s": [WIDE]}, ["s"], 8192, 65536), "at least 1114112 bytes"),
        (
            lambda: plan_stream({"s": [SMALL]}, ["s", "t"], slot_bytes=4096, depth=1),
            r"names \['t'\] \(segments: s\)",
        ),
        (lambda: Matrix("", (8, 128), "f4"), "needs a name"),
        (lambda: Matrix("m", (2, 8, 128), "f4"), r"m is \[K, N\], not of shape"),
        (lambda: Matrix("m", (0, 128), "f4"), "matrix m: .* size below 1"),
        (lambda: Matrix("m", (8, 128), "f8"), "matrix m: .* 64 bits"),
        (lambda: _one(SMALL, slot_bytes=4096).segments["s"].of("x"), r"no matrix 'x' .*: m\)"),
    ],
)
def test_impossible_plans_are_refused(wrong, message):
    with pytest.raises(PlanError, match=message):
        wrong()


@pytest.mark.parametrize("depth", [1, 3, 7, 12, 14, 16, 61])
@pytest.mark.parametrize("num_slots", [5, 2780, 16384])
def test_a_traced_position_has_the_ring_slot_of_a_known_one(depth, num_slots):
    planned = plan_stream({"s": [SMALL]}, ["s"] * num_slots, slot_bytes=4096, depth=depth)
    every = np.arange(num_slots, dtype=np.int32)
    traced = planned.ring_slot(jnp.asarray(every))
    assert traced.dtype == jnp.int32
    np.testing.assert_array_equal(traced, every % depth)
    assert planned.ring_slot(num_slots - 1) == (num_slots - 1) % depth
