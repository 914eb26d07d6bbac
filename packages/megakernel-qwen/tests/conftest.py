"""Eight virtual devices, the golden checkpoint, and loaded models that tests share."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from kda_mla_kernels.checkpoint import open_checkpoint
from kda_mla_kernels.numerics import BF16
from kda_mla_kernels.testing import Sequence, recompiled
from megakernel_qwen import package, reference
from megakernel_qwen.config import QwenConfig
from tpu_collectives.testing import quick_options, virtual_devices

jax.config.update("jax_platforms", "cpu")
virtual_devices(8)

TINY = Path(__file__).parent / "golden" / "qwen_tiny"


@pytest.fixture(scope="session")
def golden():
    with np.load(TINY / "golden.npz") as data:
        return dict(data)


@pytest.fixture(scope="session")
def tiny_folder():
    return TINY


@pytest.fixture(scope="session")
def tiny_config():
    return QwenConfig.from_json(open_checkpoint(TINY).config)


@pytest.fixture(scope="session")
def tiny_tensors():
    checkpoint = open_checkpoint(TINY)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.fixture(scope="session")
def bf16_logits(golden, tiny_config, tiny_tensors):
    """Logits of the 70-token prompt by our reference under the bf16 policy."""
    # Without the option XLA would keep intermediates in f32.
    forward = jax.jit(
        lambda tokens: reference.forward(tiny_config, BF16, tiny_tensors, tokens)[0],
        compiler_options={"xla_allow_excess_precision": False},
    )
    return np.asarray(forward(golden["len70/input_ids"]))


@pytest.fixture(scope="session")
def load_tiny():
    """Loads the golden checkpoint; equal arguments give the same model. A rough compilation is for
    what holds to a tolerance."""

    @cache
    def load(ranks=1, rough=False, numerics="f32", feature_layers=(), stack_layers=True, **options):
        model = package.load(
            TINY,
            devices=jax.devices()[:ranks],
            numerics=numerics,
            feature_layers=feature_layers,
            stack_layers=stack_layers,
            **{"max_context": 256, **options},
        )
        return recompiled(model, quick_options()) if rough else model

    return load


@pytest.fixture(scope="session")
def sequence():
    return Sequence


def row_state(state, row, positions):
    """One row's recurrent state and the keys and values of its first positions, as numpy."""
    caches = state.caches
    # Cut to the positions by numpy: jax compiles a program for each shape.
    tail, delta, keys, values = (
        np.asarray(part[:, :, row])
        for part in (caches.tail, caches.delta, caches.keys, caches.values)
    )
    return {
        "tail": tail[:, :, :3],
        "delta": delta,
        "keys": keys[..., :positions],
        "values": values[..., :positions, :],
    }


@pytest.fixture(scope="session")
def state_of_row():
    return row_state


def joined_channels(layout, tail):
    """[ranks, layers, 3, channels of a rank] -> [layers, 3, all queries, keys, values]."""
    cuts = [layout.key_width, 2 * layout.key_width]
    parts = np.split(np.moveaxis(tail, 0, 2), cuts, axis=-1)
    return np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=-1)


@pytest.fixture(scope="session")
def channels_of_all_ranks():
    return joined_channels
