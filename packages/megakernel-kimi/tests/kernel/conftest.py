"""The golden checkpoint on the kernel backend, shared by the tests of a process."""

from dataclasses import replace
from functools import cache

import pytest
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture(scope="session")
def load_kernel(load_tiny):
    """Loads the golden checkpoint for the kernel; equal arguments give the same model.

    One rank too goes through the interpreter that simulates memory and transfers: its programs
    compile in half the time.
    """

    @cache
    def load(ranks=1, **options):
        options = {"max_rows": 8, "max_context": 128, **options}
        model = load_tiny(ranks, backend="megakernel", **options)
        programs = replace(model.programs, interpret=pltpu.InterpretParams())
        return replace(model, programs=programs)

    return load
