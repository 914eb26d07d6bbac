"""Matrices that XLA takes out of an image are those that were packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


def test_elements_of_less_than_a_byte_are_refused():
    plan = plan_stream(
        {"layer": [Matrix("w", (64, 128), jnp.int4)]}, ["layer"], slot_bytes=1 << 16, depth=1
    )
    with pytest.raises(ValueError, match="w of int4"):
        unpack_matrix(plan, jnp.zeros(plan.image_shape, jnp.uint8), "layer", 0, "w")
