"""Models of the golden checkpoint on the kernel backend, shared by the tests of a process."""

from functools import cache

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels.testing import recompiled
from megakernel_qwen import package
from tpu_collectives.testing import quick_options

ROWS = 8


@pytest.fixture(scope="session")
def compiled_quickly():
    """Turns a model into one whose programs compile in a quarter of the time and run slower."""
    return lambda model: recompiled(model, quick_options())


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
        # What is rounded to bf16 depends on the last bits of f32, and those on the compilation:
        # only with the reference's options does the kernel round as the reference does.
        if numerics == "bf16":
            return model
        if not simulated:
            return recompiled(model, quick_options())
        # One rank too goes through the interpreter that simulates memory and transfers.
        options = quick_options(same_bits=True)
        return recompiled(model, options, interpret=pltpu.InterpretParams())

    return load
