"""The whole kernel on several ranks: every access is ordered, and nothing is left in flight.

A model of four layers, two of each kind, passes every transfer of a larger one: loads for the next
layer of a kind run beside the rest of this one.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from megakernel_qwen import package
from tpu_collectives.testing import simulator, watch

from ..small import random_tensors, small_config, write

TOKENS = [[3, 41]]


@pytest.fixture(scope="module")
def load(tmp_path_factory, compiled_quickly):
    config = small_config(num_hidden_layers=4)
    folder = write(tmp_path_factory.mktemp("races") / "model", config, random_tensors(config))
    options = {"backend": "megakernel", "numerics": "f32", "max_rows": 2, "max_context": 128}
    return lambda devices: compiled_quickly(package.load(folder, devices=devices, **options))


def step_and_commit(load, ranks, dma):
    """Logits and state after two tokens, of kernels without faults."""
    model = load(jax.devices()[:ranks])
    model = replace(model, programs=replace(model.programs, interpret=simulator(dma)))
    state = model.init_state()
    out = watch(lambda: model.verify(state, [1], TOKENS, [0])).check()
    moved = watch(lambda: model.commit(out.state, [2])).check()
    return [np.asarray(out.logits), *map(np.asarray, jax.tree.leaves(moved.caches))]


@pytest.mark.parametrize("ranks", [2, 8])
def test_no_race_and_the_same_values_however_late_copies_happen(load, ranks):
    late, early = (step_and_commit(load, ranks, dma) for dma in ("on_wait", "eager"))
    for ours, other in zip(late, early):
        np.testing.assert_array_equal(ours, other)
    assert np.isfinite(late[0]).all()
