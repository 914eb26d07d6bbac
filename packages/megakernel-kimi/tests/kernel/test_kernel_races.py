"""The whole kernel on several ranks: every access is ordered, and nothing is left in flight."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tpu_collectives.testing import simulator, watch


def step_and_commit(model, dma):
    """Logits and state after two tokens, of kernels without faults."""
    model = replace(model, programs=replace(model.programs, interpret=simulator(dma)))
    state = model.init_state()
    out = watch(lambda: model.verify(state, [1], [[3, 41]], [0])).check()
    moved = watch(lambda: model.commit(out.state, [2])).check()
    return [np.asarray(out.logits), *map(np.asarray, jax.tree.leaves(moved.caches))]


# Whether positions are dealt out to ranks or not, all other exchanges are the same.
@pytest.mark.parametrize(
    ("ranks", "holders"),
    [(2, 1), (8, 8), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(2, 2), (8, 1)])],
)
def test_no_race(load_kernel, ranks, holders):
    model = load_kernel(ranks, max_rows=2, holders=holders)
    assert np.isfinite(step_and_commit(model, "on_wait")[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "holders"), [(2, 2), (8, 1)])
def test_the_same_values_however_late_copies_happen(load_kernel, ranks, holders):
    model = load_kernel(ranks, max_rows=2, holders=holders)
    late, early = (step_and_commit(model, dma) for dma in ("on_wait", "eager"))
    for ours, other in zip(late, early):
        np.testing.assert_array_equal(ours, other)
