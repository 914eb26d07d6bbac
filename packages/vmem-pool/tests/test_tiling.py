"""Tiles and padded sizes, against what the compiler's layout dump shows for TPU v7."""

import jax.numpy as jnp
import numpy as np
import pytest
from vmem_pool import PlanError
from vmem_pool.tiling import (
    allocated_bytes,
    bits_of,
    layout_tile,
    native_tile,
    padded_bytes,
    padded_shape,
)


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (jnp.float32, 8),
        (jnp.int32, 8),
        (jnp.uint32, 8),
        (jnp.bfloat16, 16),
        (jnp.int8, 32),
        (jnp.uint8, 32),
        (jnp.float8_e4m3fn, 32),
        (jnp.int4, 64),
        (jnp.float4_e2m1fn, 64),
    ],
)
def test_every_full_tile_has_128_lanes_and_4_kib(dtype, rows):
    assert native_tile(dtype) == (rows, 128)
    assert rows * 128 * bits_of(dtype) // 8 == 4096


@pytest.mark.parametrize(
    ("dtype", "rows", "tile"),
    [
        (jnp.float32, 1, 1),
        (jnp.float32, 2, 2),
        (jnp.float32, 3, 4),
        (jnp.float32, 24, 8),
        (jnp.bfloat16, 1, 2),
        (jnp.bfloat16, 4, 4),
        (jnp.bfloat16, 8, 8),
        (jnp.bfloat16, 24, 8),
        (jnp.bfloat16, 48, 16),
        (jnp.int8, 1, 4),
        (jnp.int8, 24, 8),
        (jnp.int8, 64, 32),
        (jnp.int4, 2, 8),
        (jnp.int4, 64, 64),
    ],
)
def test_an_allocation_of_few_rows_gets_a_smaller_tile(dtype, rows, tile):
    assert layout_tile(dtype, rows) == (tile, 128)


@pytest.mark.parametrize(
    ("shape", "dtype", "padded", "size"),
    [
        ((8, 128), jnp.float32, (8, 128), 4096),
        ((1, 1), jnp.float32, (8, 128), 4096),
        ((3, 8, 200), jnp.bfloat16, (3, 16, 256), 3 * 8192),
        ((1, 7168), jnp.bfloat16, (16, 7168), 16 * 7168 * 2),
        ((64, 128), jnp.int4, (64, 128), 4096),
    ],
)
def test_padding_fills_whole_tiles(shape, dtype, padded, size):
    assert padded_shape(shape, dtype) == padded
    assert padded_bytes(shape, dtype) == size


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((64, 1, 5120), "float32", 64 * 5120 * 4),
        ((3, 200), "bfloat16", 4 * 256 * 2),
        ((8, 128), "bfloat16", 8 * 128 * 2),
        ((2, 40, 128), "uint8", 2 * 40 * 128),
    ],
)
def test_an_allocation_of_its_own_takes_its_smaller_tiles(shape, dtype, size):
    assert allocated_bytes(shape, dtype) == size


def test_an_allocation_of_one_dimension_is_refused():
    with pytest.raises(PlanError, match="at least two dimensions"):
        allocated_bytes((128,), "float32")


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((128,), jnp.float32, r"\(128,\) needs rows and lanes; write a vector as \(1, size\)"),
        ((0, 128), jnp.float32, "has a size below 1"),
        ((8, 128), np.bool_, "bool is neither an integer nor a float; store it as uint8"),
        ((8, 128), np.float64, "float64 has 64 bits"),
    ],
)
def test_what_vmem_cannot_hold_is_refused(shape, dtype, message):
    with pytest.raises(PlanError, match=message):
        padded_bytes(shape, dtype)
