"""Matrices that XLA takes out of an image are those that were packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from vmem_pool.stream import Matrix, image, plan_stream, unpack_matrix


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("shape", [(96, 300), (640, 128), (40, 16)])
def test_unpacked_matrices_are_those_that_were_packed(dtype, shape):
    matrices = [Matrix("first", (64, 128), dtype), Matrix("second", shape, dtype)]
    plan = plan_stream({"layer": matrices}, ["layer"] * 3, slot_bytes=1 << 16, depth=2)
    random = np.random.default_rng(0)
    weights = [
        {m.name: random.integers(-100, 100, m.shape).astype(m.dtype) for m in matrices}
        for _ in range(3)
    ]
    stored = jnp.asarray(image(plan, lambda at, name: weights[at][name]))

    @jax.jit
    def unpack(pos):
        return {m.name: unpack_matrix(plan, stored, "layer", pos, m.name) for m in matrices}

    for at, pos in enumerate(plan.starts):
        for name, found in unpack(jnp.int32(pos)).items():
            np.testing.assert_array_equal(np.asarray(found), weights[at][name])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_of_tpus_takes_the_same_matrices(monkeypatch, dtype):
    """Interpreted; a matrix cut by columns and one cut by rows, both into tiles of two shapes."""
    wide, tall = Matrix("wide", (64, 640), dtype), Matrix("tall", (640, 128), dtype)
    plan = plan_stream({"layer": [wide, tall]}, ["layer"] * 2, slot_bytes=1 << 16, depth=2)
    random = np.random.default_rng(0)
    weights = [
        {m.name: random.normal(size=m.shape).astype(m.dtype) for m in (wide, tall)} for _ in "ab"
    ]
    stored = jnp.asarray(image(plan, lambda at, name: weights[at][name]))
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, tpu, default: tpu(*args))
    with pltpu.force_tpu_interpret_mode():
        for at, pos in enumerate(plan.starts):
            for name in ("wide", "tall"):
                found = unpack_matrix(plan, stored, "layer", pos, name)
                np.testing.assert_array_equal(np.asarray(found), weights[at][name])


def test_elements_of_less_than_a_byte_are_refused():
    plan = plan_stream(
        {"layer": [Matrix("w", (64, 128), jnp.int4)]}, ["layer"], slot_bytes=1 << 16, depth=1
    )
    with pytest.raises(ValueError, match="w of int4"):
        unpack_matrix(plan, jnp.zeros(plan.image_shape, jnp.uint8), "layer", 0, "w")
