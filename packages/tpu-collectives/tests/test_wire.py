"""Layouts of blocks that travel: values survive, and bytes are those of the tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_collectives.testing import wide_range
from tpu_collectives.wire import Wire


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("width", [256, 200, 0])
def test_a_block_comes_back_rounded_and_filled_with_zeros(dtype, rows, width):
    wire = Wire(rows, 256, dtype)
    block = wide_range((rows, width))
    stored = wire.encode(jnp.asarray(block))
    assert jax.ShapeDtypeStruct(stored.shape, stored.dtype) == wire.stored
    back = np.asarray(wire.decode(stored), np.float32)
    assert np.array_equal(back[:, :width], block.astype(dtype).astype(np.float32))
    assert not back[:, width:].any()


def test_special_values_survive_packing():
    wire = Wire(1, 256, jnp.bfloat16)
    block = np.resize(np.float32([np.inf, -np.inf, -0.0, np.nan, 3e38, 1e-30]), (1, 256))
    back = np.asarray(wire.decode(wire.encode(jnp.asarray(block))), jnp.bfloat16)
    assert np.array_equal(back, block.astype(jnp.bfloat16), equal_nan=True)
    assert np.array_equal(np.signbit(back), np.signbit(block))


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "expected"),
    [
        (1, 5120, jnp.bfloat16, 10240),  # packed
        (1, 128, jnp.bfloat16, 512),  # too narrow to pack: two rows of a tile
        (1, 5120, jnp.float32, 20480),
        (3, 256, jnp.bfloat16, 4 * 512),
        (8, 640, jnp.bfloat16, 10240),
        (9, 128, jnp.float32, 16 * 512),
    ],
)
def test_a_message_has_the_bytes_of_its_tiles(rows, columns, dtype, expected):
    assert Wire(rows, columns, dtype).bytes == expected
