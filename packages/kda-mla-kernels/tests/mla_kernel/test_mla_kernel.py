"""The latent attention stage and its commit against the references, in the interpreter.

Shares of the positions are in ``test_mla_kernel_split.py``, races and broken protocols in
``test_mla_kernel_races.py``, real sizes in ``test_mla_kernel_compile.py``.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels import mla
from kda_mla_kernels.block import Block
from kda_mla_kernels.mla.kernel import LatentCommit, MlaMemory, commit_latents, default_tile
from kda_mla_kernels.numerics import BF16, F32
from mla_kernel_harness import SMALL, Net, where

POLICIES = pytest.mark.parametrize("numerics", [F32, BF16], ids=["f32", "bf16"])
# Tiles are 128 slots: first and last ones, both sides of an edge, blocks over two tiles.
STANDS = [
    (Block(1, 1), [(0,), (126,), (127,), (128,), (383,)]),
    (Block(2, 4), [(126, 0), (254, 380)]),
]


def close(ours, expected, numerics):
    if numerics is F32:
        # Some dozen roundings of sums of up to 384 terms of size one.
        np.testing.assert_allclose(ours, expected, atol=3e-6)
    else:
        # A weight that rounds differently moves a result by one last bit of bf16.
        assert (ours == expected).mean() > 0.97
        np.testing.assert_allclose(ours, expected, rtol=2**-7, atol=2**-9)


STEPS = [(numerics, *stand) for numerics in (F32, BF16) for stand in STANDS]


@pytest.mark.parametrize(("numerics", "block", "stands"), STEPS)
def test_a_step_equals_the_references(numerics, block, stands):
    net = Net(numerics=numerics)
    inputs = net.tokens(block.sequences, block.tokens)
    for positions in stands:
        at = where([2, 4, 0][: block.sequences], positions)
        out, records = net.run(block, net.memory, inputs, at)
        expected = net.expected(net.memory, inputs, at)
        flat = (net.layers, block.rows)
        close(out[:, : block.rows], expected.reshape(*flat, net.heads, -1), numerics)
        assert not out[:, block.rows :].any()
        recorded = jnp.concatenate([inputs.latent, inputs.shared], axis=-1).reshape(*flat, -1)
        np.testing.assert_array_equal(records[:, : block.rows], recorded)


def test_latents_that_are_expanded_behind_the_stage_give_the_expanded_form():
    """From plain queries: absorbed in front of the kernel, expanded behind it."""
    net, block, position = Net(), Block(1, 4), 126
    draw = np.random.default_rng(6).normal
    q = jnp.asarray(draw(size=(net.layers, 4, net.heads, 32)), jnp.float32)
    own, shared = jnp.split(mla.absorb(q, net.up, F32), [SMALL.latent], axis=-1)
    inputs = replace(net.tokens(1, 4), q_latent=own[:, None], q_shared=shared[:, None])
    at = where([1], [position])
    out, records = net.run(block, net.memory, inputs, at)
    ours = jnp.einsum("nthc,hvc->nthv", out[:, :4], net.up.values)
    memory = net.commit(block, net.memory, records, at, [4])
    cache = net.cache_of(memory)[:, 1]
    positions = jnp.broadcast_to(position + jnp.arange(4), (net.layers, 4))
    expected = mla.expanded_attention(q, cache, net.up, positions, F32)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@POLICIES
@pytest.mark.parametrize("position", [0, 126, 380])
def test_a_block_has_the_bits_of_its_tokens_one_by_one(numerics, position):
    net, block, one = Net(numerics=numerics), Block(1, 4), Block(1, 1)
    inputs = net.tokens(1, 4)
    out, records = net.run(block, net.memory, inputs, where([3], [position]))
    memory = net.memory
    for t in range(4):
        at = where([3], [position + t])
        step, record = net.run(one, memory, pick(inputs, token=t), at)
        np.testing.assert_array_equal(step[:, 0], out[:, t])
        np.testing.assert_array_equal(record[:, 0], records[:, t])
        memory = net.commit(one, memory, record, at, [1])
    whole = net.commit(block, net.memory, records, where([3], [position]), [4])
    np.testing.assert_array_equal(whole.latent, memory.latent)
    np.testing.assert_array_equal(whole.shared, memory.shared)


def pick(inputs, sequence=None, token=None):
    """The inputs of one sequence or of one token of each."""
    rows = slice(None) if sequence is None else slice(sequence, sequence + 1)
    tokens = slice(None) if token is None else slice(token, token + 1)
    parts = inputs.q_latent, inputs.q_shared, inputs.latent, inputs.shared
    return type(inputs)(*(x[:, rows, tokens] for x in parts))


def test_a_sequence_has_the_same_bits_alone_and_beside_another():
    net = Net(numerics=BF16)
    inputs = net.tokens(2, 4)
    rows, positions = [1, 4], [300, 126]
    together, _ = net.run(Block(2, 4), net.memory, inputs, where(rows, positions))
    for s in range(2):
        at = where(rows[s : s + 1], positions[s : s + 1])
        alone, _ = net.run(Block(1, 4), net.memory, pick(inputs, sequence=s), at)
        np.testing.assert_array_equal(alone[:, :4], together[:, 4 * s : 4 * s + 4])


def test_what_lies_behind_the_position_has_no_influence():
    net = Net(numerics=BF16)
    inputs, at = net.tokens(1, 4), where([2], [125])
    clean, _ = net.run(Block(1, 4), net.memory, inputs, at)
    stale = MlaMemory(
        net.memory.latent.at[..., 125:, :].set(3e4), net.memory.shared.at[..., 125:].set(-3e4)
    )
    dirty, _ = net.run(Block(1, 4), stale, inputs, at)
    np.testing.assert_array_equal(clean, dirty)


def test_a_cache_held_wider_gives_the_results_of_a_narrow_one():
    block, at = Block(1, 4), where([2], [126])
    narrow, wide = Net(numerics=BF16), Net(numerics=BF16, wide=True)
    inputs = narrow.tokens(1, 4)
    ours, records = wide.run(block, wide.memory, inputs, at)
    assert records.dtype == jnp.float32
    close(ours, narrow.run(block, narrow.memory, inputs, at)[0], BF16)


def test_other_tiles_and_numbers_of_heads_give_the_same_results():
    net = Net(heads=9, tile=256, slots=512)
    inputs, at = net.tokens(1, 4), where([0], [254])
    out, _ = net.run(Block(1, 4), net.memory, inputs, at)
    close(out[:, :4], net.expected(net.memory, inputs, at)[:, 0], F32)


def test_a_cache_may_be_shorter_than_a_group_of_lanes():
    net, block = Net(tile=40, slots=40), Block(1, 4)
    inputs, at = net.tokens(1, 4), where([0], [35])
    out, records = net.run(block, net.memory, inputs, at)
    close(out[:, :4], net.expected(net.memory, inputs, at)[:, 0], F32)
    moved = net.commit(block, net.memory, records, at, [3])
    check_commit(net, block, moved, records, (at, [3]))


def check_commit(net, block, moved, records, stand):
    """Every bit of the memory: accepted tokens in their slots, the rest as before."""
    at, accepted = stand
    cache = np.array(net.cache_of(net.memory).astype(jnp.float32))
    for s, count in enumerate(accepted):
        row, position = int(at.rows[s]), int(at.positions[s])
        for t in range(min(count, net.slots - position)):
            record = records[:, s * block.tokens + t]
            cache[:, row, position + t] = np.asarray(record.astype(jnp.float32))
    np.testing.assert_array_equal(net.cache_of(moved).astype(jnp.float32), cache)


def records_of(net, block):
    size = (net.layers, block.padded, SMALL.latent + SMALL.shared_dim)
    return jnp.asarray(np.random.default_rng(5).normal(size=size), net.held)


@pytest.mark.parametrize(
    ("numerics", "block", "stands"),
    [
        (F32, Block(1, 4), [((p,), (n,)) for p in (126, 380) for n in (0, 1, 3, 4)]),
        (BF16, Block(3, 1), [((127, 0, 383), (1, 0, 1)), ((15, 16, 200), (0, 0, 0))]),
        (BF16, Block(2, 3), [((126, 254), (3, 1))]),
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


def test_the_default_tile_divides_the_slots_and_bounds_vmem():
    shape = mla.MlaShape(128, 64, 512)
    assert default_tile(shape, jnp.bfloat16, 32768) == 1024
    assert default_tile(shape, jnp.float32, 32768) == 1024
    assert default_tile(shape, jnp.bfloat16, 2048 + 128) == 128
    assert default_tile(SMALL, jnp.float32, 40) == 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Net(slots=200, tile=200).stage(Block(1, 1)), "a cache of 200 slots"),
        (lambda: Net(tile=256).stage(Block(1, 1)), "a tile of 256 keys does not divide 384"),
        (lambda: Net(tile=64).stage(Block(1, 1)), "a tile of 64 keys; it must be a multiple"),
        (lambda: Net().stage(Block(1, 129)), "129 tokens a sequence; attention takes at most 128"),
        (lambda: Net(slots=8, tile=8).stage(Block(1, 9)), "9 tokens do not fit into 8 slots"),
        (lambda: Net().commits(Block(1, 129)), "129 tokens a sequence"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_commit_of_other_shapes_or_types_is_refused():
    net, block, at = Net(), Block(1, 1), where([0], [0])
    records, one = records_of(net, block), jnp.ones(1, jnp.int32)
    narrow = LatentCommit(SMALL, block, jnp.dtype(jnp.bfloat16), net.slots)
    with pytest.raises(ValueError, match=r"latent is float32\[2, 5, 384, 32\], but must be bf"):
        commit_latents(narrow, net.memory, records, at, one)
    with pytest.raises(ValueError, match=r"records is float32\[1, 8, 48\], but must be"):
        commit_latents(net.commits(block), net.memory, records[:1], at, one)
