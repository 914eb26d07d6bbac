"""Collectives that move blocks: gather, scatter, all-to-all, pairs, broadcast.

Each is used three times in a row, so that areas are reused, on virtual devices with race detection.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from tpu_collectives import (
    AllGather,
    AllToAll,
    Broadcast,
    CollectiveError,
    PairExchange,
    ReduceScatter,
    Topology,
    reference,
)
from tpu_collectives.testing import repeated, wide_range

USES = 3
PAIR = Topology.virtual(2)
FOUR = Topology.virtual(4, cores_per_chip=2, chips_per_host=1)  # two hosts of one chip
EIGHT = Topology.virtual(8, cores_per_chip=2, chips_per_host=2)  # two hosts of two chips


def run(collective, closing_barrier=False):
    """Inputs [ranks, uses, ...] of random numbers and the outputs of the same form."""
    shape = (collective.topology.ranks, USES, *collective.input.shape)
    data = np.asarray(wide_range(shape)).astype(collective.input.dtype)
    (outputs,) = repeated(collective, USES, closing_barrier).interpret(data).check()
    return data, outputs


def side_by_side(data, members):
    return np.concatenate([data[member] for member in members], axis=-1)


@pytest.mark.parametrize(
    ("topology", "within", "dtype"),
    [
        (FOUR, ("all",), jnp.bfloat16),
        (FOUR, ("host", "lane"), jnp.float32),
        (Topology.virtual(1), ("all",), jnp.int32),
        (Topology.virtual(3, cores_per_chip=1), ("all",), jnp.int32),
        pytest.param(EIGHT, ("chip", "core", "lane"), jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_all_gather_lays_the_blocks_of_all_ranks_side_by_side(topology, within, dtype):
    data, gathered = run(AllGather(topology, 3, 128, dtype, within))
    for held in gathered:
        assert np.array_equal(held, side_by_side(data, range(topology.ranks)))


def test_all_gather_within_hosts_stays_within_hosts():
    data, gathered = run(AllGather(FOUR, 1, 128, within=("host",)), closing_barrier=True)
    for rank, held in enumerate(gathered):
        assert np.array_equal(held, side_by_side(data, FOUR.group(rank, "host")))


@pytest.mark.parametrize(
    ("topology", "tree"),
    [
        (Topology.virtual(2), None),
        (FOUR, None),
        pytest.param(EIGHT, ("all",), marks=pytest.mark.slow),
        pytest.param(EIGHT, ("chip", "core", "lane"), marks=pytest.mark.slow),
    ],
)
def test_reduce_scatter_gives_each_rank_its_columns_of_the_all_reduce(topology, tree):
    collective = ReduceScatter(topology, 2, 128 * topology.ranks, tree=tree)
    data, parts = run(collective)
    for use in range(USES):
        total = reference.all_reduce(topology, data[:, use], jnp.bfloat16, tree)
        for rank in range(topology.ranks):
            assert np.array_equal(parts[rank, use], total[:, 128 * rank : 128 * rank + 128])


@pytest.mark.parametrize(
    ("topology", "within"),
    [(FOUR, "all"), (FOUR, "host"), pytest.param(EIGHT, "all", marks=pytest.mark.slow)],
)
def test_all_to_all_transposes_senders_and_receivers(topology, within):
    data, received = run(AllToAll(topology, 2, 100, within=within), closing_barrier=True)
    for rank in range(topology.ranks):
        group = topology.group(rank, within)
        mine = group.index(rank)
        wanted = np.stack([data[sender][:, mine] for sender in group], axis=1)
        assert np.array_equal(received[rank], wanted)


@pytest.mark.parametrize("within", ["chip", "lane"])
def test_pairs_swap_their_blocks(within):
    data, received = run(PairExchange(FOUR, 2, 100, jnp.float32, within), closing_barrier=True)
    for rank in range(4):
        (partner,) = set(FOUR.group(rank, within)) - {rank}
        assert np.array_equal(received[rank], data[partner])


@pytest.mark.parametrize(
    ("topology", "root"),
    [
        (Topology.virtual(1), 0),
        (FOUR, 0),
        (Topology.virtual(3, cores_per_chip=1), 2),
        pytest.param(EIGHT, 5, marks=pytest.mark.slow),
    ],
)
def test_broadcast_gives_every_rank_the_block_of_the_root(topology, root):
    data, received = run(Broadcast(topology, 2, 100, jnp.int32, root), closing_barrier=True)
    for held in received:
        assert np.array_equal(held, data[root])


@pytest.mark.parametrize(
    "collective",
    [
        AllGather(PAIR, 1, 128),
        ReduceScatter(PAIR, 1, 256),
        AllToAll(PAIR, 1, 128),
        PairExchange(PAIR, 1, 128),
        Broadcast(PAIR, 1, 128),
    ],
    ids=lambda collective: type(collective).__name__,
)
def test_every_copy_is_waited_for(collective):
    data = np.ones((2, 1, *collective.input.shape), collective.input.dtype)
    program = repeated(collective, 1, closing_barrier=True)
    program.interpret(data, dma="eager").check()  # leftovers of copies show in this mode only


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: AllGather(FOUR, 1, 64),
            "64 columns is not a multiple of 128 lanes; pad it to 128",
        ),
        (lambda: AllGather(FOUR, 1, 128, within=("lane", "host")), "innermost partition first"),
        (lambda: AllGather(FOUR, 1, 128, jnp.int8), "float32 or int32, not int8"),
        (lambda: ReduceScatter(FOUR, 1, 130), "do not divide among 4 ranks; pad them to 512"),
        (lambda: ReduceScatter(FOUR, 1, 4 * 64), "a rank's part of 64 columns"),
        (lambda: PairExchange(EIGHT, 1, 128, within="host"), "has 4 ranks, so they are no pairs"),
        (lambda: Broadcast(FOUR, 1, 128, root=4), r"root 4 is not a rank .* use 0\.\.3"),
        (lambda: AllToAll(FOUR, 0, 128), "rows must be at least 1, not 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(build, message):
    with pytest.raises(CollectiveError, match=message):
        build()
