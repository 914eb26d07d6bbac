"""The golden checkpoint on the kernel backend, shared by the tests of a process."""

from dataclasses import replace
from functools import cache

import pytest
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels.testing import recompiled
from tpu_collectives.testing import quick_options


@pytest.fixture(scope="session")
def load_kernel(load_tiny):
    """Loads the golden checkpoint for the kernel; equal arguments give the same model.

    One rank too goes through the interpreter that simulates memory and transfers: its programs
    compile in half the time.
    """

    @cache
    def load(ranks=1, exact_bits=False, **options):
        options = {"max_rows": 8, "max_context": 128, **options}
        model = load_tiny(ranks, backend="megakernel", **options)
        options = quick_options(same_bits=exact_bits)
        return recompiled(model, options, interpret=pltpu.InterpretParams())

    return load


@pytest.fixture(scope="session")
def trace_kernel(load_kernel):
    """Makes a model of one rank whose kernel is traced when it runs, with what is patched then."""

    def made():
        model = load_kernel(1)
        # Another instance has programs of its own.
        return replace(model, programs=replace(model.programs))

    return made
