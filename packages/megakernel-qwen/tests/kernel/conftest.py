"""Models of the golden checkpoint on the kernel backend, shared by the tests of a process."""

from functools import cache

import jax
import pytest
from megakernel_qwen import package

ROWS = 8


@pytest.fixture(scope="session")
def load_kernel(tiny_folder):
    """Loads the golden checkpoint for the kernel; equal arguments give the same model."""

    @cache
    def load(ranks=1, numerics="f32", max_rows=ROWS, feature_layers=()):
        return package.load(
            tiny_folder,
            devices=jax.devices()[:ranks],
            backend="megakernel",
            numerics=numerics,
            max_rows=max_rows,
            max_context=256,
            feature_layers=feature_layers,
        )

    return load
