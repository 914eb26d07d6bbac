"""The arg-max over ranks: ties, infinities and NaN, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from tpu_collectives import ArgMax, Barrier, CollectiveError, Topology, reference
from tpu_collectives.testing import RankProgram

USES = 3


def run(collective, values, indices):
    """Best pairs [ranks, uses, rows] of the pairs [ranks, uses, rows] of all ranks."""
    barrier = Barrier(collective.topology)

    def kernel(values_ref, indices_ref, best_ref, at_ref, refs):
        barrier.signal()
        barrier.wait()

        @pl.loop(0, USES)
        def _(use):
            handle = collective.start(refs, values_ref[use], indices_ref[use], use)
            best_ref[use], at_ref[use] = collective.finish(handle)

    shape = (USES, collective.rows, 1)
    outputs = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)]
    program = RankProgram(kernel, collective.topology, outputs, (collective.scratch(),))
    best, at = program.interpret(values[..., None], indices[..., None]).check()
    return best[..., 0], at[..., 0]


def pairs(ranks, rows, candidates):
    """Few distinct values, so that most maxima are tied, and all kinds of special ones."""
    random = np.random.default_rng(0)
    values = random.integers(0, 3, (ranks, USES, rows)).astype(np.float32)
    values[random.random(values.shape) < 0.2] = np.nan
    values[:, 0, 0] = -np.inf
    values[:, 1, 0] = np.nan
    indices = random.permutation(candidates)[: values.size].reshape(values.shape)
    return values, indices.astype(np.int32)


@pytest.mark.parametrize(
    ("topology", "tree"),
    [
        (Topology.virtual(1), ("all",)),
        (Topology.virtual(4), ("all",)),
        (Topology.virtual(4, cores_per_chip=2, chips_per_host=1), ("host", "lane")),
        pytest.param(Topology.virtual(8), ("all",), marks=pytest.mark.slow),
    ],
)
def test_the_lowest_index_wins_a_tie_on_every_rank(topology, tree):
    candidates = 1 << 20
    values, indices = pairs(topology.ranks, 3, candidates)
    indices[-1, -1, -1] = candidates - 1
    best, at = run(ArgMax(topology, 3, candidates, tree), values, indices)
    for use in range(USES):
        wanted_best, wanted_at = reference.arg_max(values[:, use], indices[:, use])
        for rank in range(topology.ranks):
            assert np.array_equal(best[rank, use], wanted_best)
            assert np.array_equal(at[rank, use], wanted_at)


def test_more_candidates_than_f32_counts_are_refused():
    with pytest.raises(CollectiveError, match="16777217 candidates are more than 16777216"):
        ArgMax(Topology.virtual(2), 1, (1 << 24) + 1)
