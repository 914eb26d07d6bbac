"""The attention stage and its commit against the references, in the interpreter.

Races and broken protocols are in ``test_gqa_kernel_races.py``, real sizes in
``test_gqa_kernel_compile.py``.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from gqa_kernel_harness import SMALL, Net, where
from kda_mla_kernels.block import Block
from kda_mla_kernels.gqa.kernel import GqaMemory, GqaShape, commit_keys, default_tile
from kda_mla_kernels.numerics import BF16, F32

POLICIES = pytest.mark.parametrize("numerics", [F32, BF16], ids=["f32", "bf16"])
# Tiles are 128 keys: first and last slots, both sides of an edge, blocks over two tiles.
STANDS = [
    (Block(1, 1), [(0,), (127,), (128,), (383,)]),
    (Block(3, 1), [(300, 0, 127), (128, 383, 5)]),
    (Block(1, 4), [(0,), (126,), (252,), (380,)]),
    (Block(2, 3), [(0, 254), (127, 9)]),
]


def close(ours, expected, numerics):
    if numerics is F32:
        # Some dozen roundings of sums of up to 384 terms of size one.
        np.testing.assert_allclose(ours, expected, atol=2e-6)
    else:
        # A weight that rounds differently moves a result by one last bit of bf16.
        assert (ours == expected).mean() > 0.97
        np.testing.assert_allclose(ours, expected, rtol=2**-7, atol=2**-9)


STEPS = [
    *((F32, *stand) for stand in STANDS),
    *((BF16, *stand) for stand in STANDS[:3]),
]


@pytest.mark.parametrize(("numerics", "block", "stands"), STEPS)
def test_a_step_equals_the_references(numerics, block, stands):
    net = Net(numerics=numerics)
    projected = net.tokens(block.sequences, block.tokens)
    for positions in stands:
        at = where([2, 4, 0][: block.sequences], positions)
        out, records = net.run(block, net.memory, projected, at)
        expected, recorded = net.expected(net.memory, projected, at)
        close(out[:, : block.rows], expected.reshape(net.layers, block.rows, -1), numerics)
        assert not out[:, block.rows :].any()
        ours = np.asarray(records[:, : block.rows].astype(jnp.float32))
        np.testing.assert_allclose(ours, recorded.reshape(ours.shape), atol=1e-6)


@POLICIES
@pytest.mark.parametrize("position", [0, 126, 124, 380])
def test_a_block_has_the_bits_of_its_tokens_one_by_one(numerics, position):
    net, block, one = Net(numerics=numerics), Block(1, 4), Block(1, 1)
    projected = net.tokens(1, 4)
    out, records = net.run(block, net.memory, projected, where([3], [position]))
    memory = net.memory
    for t in range(4):
        at = where([3], [position + t])
        step, record = net.run(one, memory, projected[:, :, t : t + 1], at)
        np.testing.assert_array_equal(step[:, 0], out[:, t])
        np.testing.assert_array_equal(record[:, 0], records[:, t])
        memory = net.commit(one, memory, record, at, [1])
    whole = net.commit(block, net.memory, records, where([3], [position]), [4])
    np.testing.assert_array_equal(whole.keys, memory.keys)
    np.testing.assert_array_equal(whole.values, memory.values)


@POLICIES
def test_a_sequence_has_the_same_bits_alone_and_beside_others(numerics):
    net = Net(numerics=numerics)
    projected = net.tokens(3, 1)
    rows, positions = [1, 4, 0], [300, 0, 127]
    together, _ = net.run(Block(3, 1), net.memory, projected, where(rows, positions))
    for s in range(3):
        at = where(rows[s : s + 1], positions[s : s + 1])
        alone, _ = net.run(Block(1, 1), net.memory, projected[:, s : s + 1], at)
        np.testing.assert_array_equal(alone[:, 0], together[:, s])


def test_what_lies_behind_the_position_has_no_influence():
    net = Net(numerics=BF16)
    projected, at = net.tokens(1, 4), where([2], [125])
    clean, _ = net.run(Block(1, 4), net.memory, projected, at)
    stale = GqaMemory(net.memory.keys.at[..., 125:].set(3e4), net.memory.values)
    stale = replace(stale, values=stale.values.at[..., 125:, :].set(-3e4))
    dirty, _ = net.run(Block(1, 4), stale, projected, at)
    np.testing.assert_array_equal(clean, dirty)


def test_a_cache_held_wider_gives_the_results_of_a_narrow_one():
    block, at = Block(3, 1), where([2, 4, 0], [300, 0, 127])
    narrow, wide = Net(numerics=BF16), Net(numerics=BF16, wide=True)
    projected = narrow.tokens(3, 1)
    ours, records = wide.run(block, wide.memory, projected, at)
    assert records.dtype == jnp.float32
    close(ours, narrow.run(block, narrow.memory, projected, at)[0], BF16)


def test_other_tiles_and_heads_that_turn_in_full_give_the_same_results():
    net = Net(shape=GqaShape(4, 1, 16, 16, 1e6), tile=256, slots=512)
    projected, at = net.tokens(1, 4), where([0], [254])
    out, _ = net.run(Block(1, 4), net.memory, projected, at)
    close(out[:, :4], net.expected(net.memory, projected, at)[0][:, 0], F32)


def test_a_cache_may_be_shorter_than_a_group_of_lanes():
    net, block = Net(tile=40, slots=40), Block(1, 4)
    projected, at = net.tokens(1, 4), where([0], [35])
    out, records = net.run(block, net.memory, projected, at)
    close(out[:, :4], net.expected(net.memory, projected, at)[0][:, 0], F32)
    moved = net.commit(block, net.memory, records, at, [3])
    check_commit(net, block, moved, records, (at, [3]))


def check_commit(net, block, moved, records, stand):
    """Every bit of the memory: accepted tokens in their slots, the rest as before."""
    at, accepted = stand
    keys, values = (np.array(x.astype(jnp.float32)) for x in (net.memory.keys, net.memory.values))
    heads = (net.layers, net.shape.kv_heads, net.shape.head_dim)
    records = np.asarray(records.astype(jnp.float32))
    for s, count in enumerate(accepted):
        row, position = int(at.rows[s]), int(at.positions[s])
        for t in range(min(count, net.slots - position)):
            k, v = np.split(records[:, s * block.tokens + t], 2, axis=-1)
            keys[:, row, :, :, position + t] = k.reshape(heads)
            values[:, row, :, position + t] = v.reshape(heads)
    np.testing.assert_array_equal(moved.keys.astype(jnp.float32), keys)
    np.testing.assert_array_equal(moved.values.astype(jnp.float32), values)


def records_of(net, block):
    size = (net.layers, block.padded, net.shape.record_width)
    return jnp.asarray(np.random.default_rng(5).normal(size=size), net.held)


@pytest.mark.parametrize(
    ("numerics", "block", "stands"),
    [
        (F32, Block(1, 4), [((p,), (n,)) for p in (126, 380) for n in range(5)]),
        (BF16, Block(3, 1), [((127, 0, 383), (1, 0, 1)), ((15, 16, 200), (0, 0, 0))]),
        (BF16, Block(2, 3), [((126, 254), (3, 1)), ((0, 382), (2, 3))]),
    ],
    ids=["1_4", "3_1", "2_3"],
)
def test_a_commit_writes_the_accepted_tokens_and_nothing_else(numerics, block, stands):
    net = Net(numerics=numerics)
    records = records_of(net, block)
    for positions, accepted in stands:
        at = where([3, 0, 2][: block.sequences], positions)
        moved = net.commit(block, net.memory, records, at, accepted)
        check_commit(net, block, moved, records, (at, accepted))


def test_a_long_block_is_written_over_many_groups_of_values():
    net, block = Net(numerics=BF16), Block(1, 40)
    records, at = records_of(net, block), where([1], [120])
    moved = net.commit(block, net.memory, records, at, [37])
    check_commit(net, block, moved, records, (at, [37]))


def test_sequences_that_accept_nothing_may_share_a_row_with_one_that_does():
    net, block = Net(numerics=BF16), Block(3, 1)
    records, at = records_of(net, block), where([2, 2, 2], [50, 51, 52])
    moved = net.commit(block, net.memory, records, at, [0, 1, 0])
    check_commit(net, block, moved, records, (at, [0, 1, 0]))


def test_the_default_tile_divides_the_slots_and_bounds_vmem():
    rank, core = GqaShape(3, 1, 256, 64, 1e7), GqaShape(24, 4, 256, 64, 1e7)
    assert default_tile(rank, jnp.bfloat16, 32768) == 2048
    assert default_tile(core, jnp.bfloat16, 32768) == 1024
    assert default_tile(core, jnp.float32, 32768) == 512
    assert default_tile(rank, jnp.bfloat16, 2048 + 128) == 128
    assert default_tile(rank, jnp.bfloat16, 1920) == 1920
    assert default_tile(SMALL, jnp.float32, 40) == 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GqaShape(6, 4, 32, 8, 1e4), "6 query heads cannot share 4 key/value heads"),
        (lambda: GqaShape(6, 2, 32, 7, 1e4), "rotary_dim 7 must be even"),
        (lambda: GqaShape(6, 2, 32, 34, 1e4), "rotary_dim 34 must be even and between 2 and"),
        (lambda: Net(slots=200, tile=200).stage(Block(1, 1)), "a cache of 200 slots"),
        (lambda: Net(tile=256).stage(Block(1, 1)), "a tile of 256 keys does not divide 384"),
        (lambda: Net(tile=64).stage(Block(1, 1)), "a tile of 64 keys; it must be a multiple"),
        (lambda: Net().stage(Block(1, 129)), "129 tokens a sequence; attention takes at most 128"),
        (lambda: Net(slots=8, tile=8).stage(Block(1, 9)), "9 tokens do not fit into 8 slots"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_commit_of_other_shapes_or_types_is_refused():
    net, block, at = Net(), Block(1, 1), where([0], [0])
    records, one = records_of(net, block), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=r"keys is float32\[2, 5, 2, 32, 384\], but must be bf"):
        commit_keys(SMALL, block, jnp.bfloat16, net.memory, records, at, one)
    with pytest.raises(ValueError, match=r"records is float32\[1, 8, 128\], but must be"):
        commit_keys(SMALL, block, jnp.float32, net.memory, records[:1], at, one)
