"""Shares of the positions: what ranks find in theirs merges to what one rank finds in all."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.attention.split import Split
from kda_mla_kernels.block import Block
from kda_mla_kernels.mla.kernel import MlaMemory, merge_packed
from kda_mla_kernels.numerics import BF16, F32
from mla_kernel_harness import Net, merged, where

RANKS = 3
SPLITS = {
    "tiles of one block": (Split(128, RANKS), 128),
    "tiles of two blocks": (Split(128, RANKS), 256),
    "blocks of two tiles": (Split(256, RANKS), 128),
}
NET = Net(slots=RANKS * 512, layers=1)
"""The cache in one piece."""


def rank_net(name, **changes):
    """The net of a rank."""
    split, tile = SPLITS[name]
    return replace(NET, slots=512, tile=tile, split=split, **changes)


def share_of(split, memory, rank):
    """The slots of a rank."""
    positions = np.arange(NET.slots)
    mine = positions[positions // split.block % RANKS == rank]
    return MlaMemory(memory.latent[..., mine, :], memory.shared[..., mine])


def in_shares(net, whole, block, inputs, at):
    """Packed outputs and records of every rank."""
    split = net.split
    memories = [share_of(split, whole, rank) for rank in range(RANKS)]
    stands = [split.where(at, rank) for rank in range(RANKS)]
    runs = [net.run(block, m, inputs, a) for m, a in zip(memories, stands)]
    return [out for out, _ in runs], [record for _, record in runs], memories, stands


@pytest.mark.parametrize("name", SPLITS)
def test_shares_merge_to_attention_over_all_positions(name):
    net, block = rank_net(name), Block(2, 4)
    # Where only some ranks hold anything, and at edges of blocks, of tiles and of periods.
    stands = [(2, 126), (254, 382), (765, 1532)]
    inputs = net.tokens(block.sequences, block.tokens)
    for positions in stands:
        at = where([2, 4], positions)
        parts, records, _, _ = in_shares(net, NET.memory, block, inputs, at)
        expected = NET.expected(NET.memory, inputs, at)
        expected = expected.reshape(net.layers, block.rows, net.heads, -1)
        used = [part[:, : block.rows] for part in parts]
        np.testing.assert_allclose(merged(used), expected, atol=3e-6)
        ours = np.asarray(merge_packed(parts, F32))
        np.testing.assert_allclose(ours[:, : block.rows], expected, atol=3e-6)
        assert not ours[:, block.rows :].any()
        for record in records[1:]:
            np.testing.assert_array_equal(record, records[0])


@pytest.mark.parametrize("position", [126, 382])
def test_a_block_over_two_ranks_has_the_bits_of_its_tokens_one_by_one(position):
    name, block, one = "tiles of two blocks", Block(1, 4), Block(1, 1)
    net = rank_net(name, numerics=BF16)
    whole = replace(NET, numerics=BF16)
    inputs, at = whole.tokens(1, 4), where([3], [position])
    parts, records, memories, stands = in_shares(net, whole.memory, block, inputs, at)
    committed = [
        net.commit(block, memory, record, stand, [4])
        for memory, record, stand in zip(memories, records, stands)
    ]
    for t in range(4):
        at = where([3], [position + t])
        token = type(inputs)(*(x[:, :, t : t + 1] for x in vars(inputs).values()))
        stands = [net.split.where(at, rank) for rank in range(RANKS)]
        for rank, stand in enumerate(stands):
            out, record = net.run(one, memories[rank], token, stand)
            np.testing.assert_array_equal(out[:, 0], parts[rank][:, t])
            memories[rank] = net.commit(one, memories[rank], record, stand, [1])
    for ours, expected in zip(memories, committed):
        np.testing.assert_array_equal(ours.latent, expected.latent)
        np.testing.assert_array_equal(ours.shared, expected.shared)


@pytest.mark.parametrize("accepted", [1, 3])
def test_each_accepted_token_is_written_by_the_one_rank_that_holds_it(accepted):
    net, block = rank_net("tiles of one block"), Block(2, 3)
    records = jnp.asarray(np.random.default_rng(5).normal(size=(1, 8, 48)), jnp.float32)
    for positions in [(126, 254), (1533, 765)]:
        at = where([3, 1], positions)
        whole = NET.commit(block, NET.memory, records, at, [accepted, accepted])
        for rank in range(RANKS):
            mine = share_of(net.split, NET.memory, rank)
            stand = net.split.where(at, rank)
            ours = net.commit(block, mine, records, stand, [accepted, accepted])
            expected = share_of(net.split, whole, rank)
            np.testing.assert_array_equal(ours.latent, expected.latent)
            np.testing.assert_array_equal(ours.shared, expected.shared)


def test_of_a_rank_without_a_visible_position_nothing_counts():
    net, block = rank_net("tiles of two blocks", numerics=BF16), Block(1, 1)
    memory = replace(NET, numerics=BF16).memory
    parts, _, _, _ = in_shares(net, memory, block, net.tokens(1, 1), where([0], [5]))
    for part in parts[1:]:
        assert (part[:, 0, :, -128:-64] < -3e38).all()
        assert not part[:, 0, :, :-128].any()
        assert not part[:, 0, :, -64:].any()
    np.testing.assert_array_equal(merge_packed(parts, BF16), merge_packed(parts[:1], BF16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Split(100, 2), "in blocks of a multiple of 128 over at least 2 ranks, not in bl"),
        (lambda: Split(128, 1), "not in blocks of 128 over 1"),
        (
            lambda: replace(NET, slots=384, split=Split(256, 2)).stage(Block(1, 1)),
            "384 slots in tiles of 128 do not hold whole blocks of 256 positions",
        ),
        (
            lambda: replace(NET, slots=1536, tile=384, split=Split(256, 2)).stage(Block(1, 1)),
            "1536 slots in tiles of 384 do not hold whole blocks of 256 positions",
        ),
    ],
)
def test_splits_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
