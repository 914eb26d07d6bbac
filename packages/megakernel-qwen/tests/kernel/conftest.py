"""Models of the golden checkpoint on the kernel backend, shared by the tests of a process."""

from dataclasses import replace
from functools import cache

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from megakernel_qwen import package

ROWS = 8


@pytest.fixture(scope="session")
def load_kernel(tiny_folder):
    """Loads the golden checkpoint for the kernel; equal arguments give the same model."""

    @cache
    def load(ranks=1, numerics="f32", max_rows=ROWS, feature_layers=(), simulated=False):
        model = package.load(
            tiny_folder,
            devices=jax.devices()[:ranks],
            backend="megakernel",
            numerics=numerics,
            max_rows=max_rows,
            max_context=256,
            feature_layers=feature_layers,
        )
        if not simulated:
            return model
        # One rank too goes through the interpreter that simulates memory and transfers.
        programs = replace(model.programs, interpret=pltpu.InterpretParams())
        return replace(model, programs=programs)

    return load
