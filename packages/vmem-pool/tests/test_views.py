"""Views: bytes on the host, and round trips in both interpreters. No view runs on a TPU here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from vmem_pool import Buffer, PlanError, pack, plan, unpack, view

INTERPRETERS = pytest.mark.parametrize(
    "interpret", [True, pltpu.InterpretParams()], ids=["hlo", "tpu"]
)
DTYPES = (
    jnp.float32,
    jnp.bfloat16,
    jnp.int8,
    jnp.uint8,
    jnp.uint32,
    jnp.float8_e4m3fn,
    jnp.int4,
    jnp.uint4,
    jnp.float4_e2m1fn,
)


def _values(shape, dtype, seed=0):
    random = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        return random.integers(low, high, shape, endpoint=True).astype(dtype)
    return random.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 128), (3, 200), (2, 3, 40, 130)])
def test_unpack_reverses_pack(shape, dtype):
    values = _values(shape, dtype)
    np.testing.assert_array_equal(unpack(pack(values), shape, dtype), values)


def test_packed_bytes_stand_low_byte_first_and_panel_after_panel():
    words = np.full((8, 256), 0x04030201, np.uint32)
    words[0, 128:] = 0x08070605
    packed = pack(words)
    assert packed.shape == (64, 128)
    np.testing.assert_array_equal(packed[:4, 0], [1, 2, 3, 4])
    np.testing.assert_array_equal(packed[32:36, 0], [5, 6, 7, 8])


def test_padding_is_packed_as_zero():
    packed = pack(np.full((1, 1), -1, np.int32))
    assert packed.sum() == 4 * 255


def _demo_plan(dtype):
    buffers = [
        Buffer("before", (8, 128), jnp.float32, (0, 1)),
        Buffer("matrix", (20, 300), dtype, (0, 1)),
        Buffer("stack", (3, 8, 128), dtype, (1, 1)),
    ]
    return plan(buffers, 1 << 20)


# XLA's CPU compiler in jax 0.12 makes invalid code of fused e2m1 arrays, which only the HLO
# interpreter gives it.
ROUND_TRIPS = [
    pytest.param(dtype, interpret, id=f"{jnp.dtype(dtype)}-{mode}")
    for dtype in DTYPES
    for mode, interpret in (("hlo", True), ("tpu", pltpu.InterpretParams()))
    if (dtype, mode) != (jnp.float4_e2m1fn, "hlo")
]


@pytest.mark.parametrize(("dtype", "interpret"), ROUND_TRIPS)
def test_what_a_kernel_stores_in_a_view_it_loads_again(dtype, interpret):
    planned = _demo_plan(dtype)
    matrix, stack = _values((20, 300), dtype), _values((3, 8, 128), dtype, 1)

    def kernel(matrix_ref, stack_ref, matrix_out, stack_out, pool_out, pool):
        view(pool, planned, "before").store(jnp.zeros((8, 128), jnp.float32))
        view(pool, planned, "matrix").store(matrix_ref[...])
        slots = view(pool, planned, "stack")

        @pl.loop(0, 3)
        def _(slot):
            slots.store(stack_ref[slot], slot)

        matrix_out[...] = view(pool, planned, "matrix").load()
        for slot in range(3):
            stack_out[slot] = slots.load(slot)
        pool_out[...] = pool[...]

    pool_shape = jax.ShapeDtypeStruct((planned.byte_rows, 128), jnp.uint8)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (matrix, stack)]
    got_matrix, got_stack, pool = pl.pallas_call(
        kernel,
        out_shape=(*shapes, pool_shape),
        scratch_shapes=[planned.scratch()],
        interpret=interpret,
    )(jnp.asarray(matrix), jnp.asarray(stack))

    np.testing.assert_array_equal(np.asarray(got_matrix), matrix)
    np.testing.assert_array_equal(np.asarray(got_stack), stack)
    # The host reads the same bytes in the same way, and finds the packed form there.
    host = np.asarray(pool)
    np.testing.assert_array_equal(view(host, planned, "matrix").load(), matrix)
    np.testing.assert_array_equal(view(host, planned, "stack").load(2), stack[2])
    start = planned.offsets["matrix"] // 128
    packed = pack(matrix)
    np.testing.assert_array_equal(host[start : start + len(packed)], packed)


@INTERPRETERS
def test_packed_weights_arrive_by_dma_and_go_straight_into_a_dot(interpret):
    planned = plan([Buffer("weights", (2, 64, 256), jnp.bfloat16, (0, 0), ((0, 0),))], 1 << 20)
    weights = _values((2, 64, 256), jnp.bfloat16)
    x = _values((16, 64), jnp.bfloat16, 1)

    def kernel(weights_hbm, x_ref, out_ref, pool, sem):
        slots = view(pool, planned, "weights", phase=0)
        copy = pltpu.make_async_copy(weights_hbm, slots.window(1), sem)
        copy.start()
        copy.wait()
        out_ref[...] = jnp.dot(x_ref[...], slots.load(1), preferred_element_type=jnp.float32)

    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((16, 256), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)],
        scratch_shapes=[planned.scratch(), pltpu.SemaphoreType.DMA],
        interpret=interpret,
    )(jnp.asarray(pack(weights[1])), jnp.asarray(x))
    expected = x.astype(np.float64) @ weights[1].astype(np.float64)
    # Products are exact in f32; 64 sums of values up to about 4 round by at most 64 · 2^-24 · 64.
    np.testing.assert_allclose(out, expected, atol=64 * 2**-24 * 64)


@INTERPRETERS
def test_one_pool_serves_two_buffers_that_take_turns(interpret):
    early = Buffer("early", (8, 128), jnp.float32, (0, 0))
    late = Buffer("late", (16, 128), jnp.bfloat16, (1, 1))
    planned = plan([early, late], 4096)

    def kernel(x_ref, out_ref, pool):
        view(pool, planned, "early", phase=0).store(x_ref[...])
        doubled = view(pool, planned, "early", phase=0).load() * 2
        both = jnp.concatenate([doubled, doubled]).astype(jnp.bfloat16)
        view(pool, planned, "late", phase=1).store(both)
        out_ref[...] = view(pool, planned, "late", phase=1).load()

    x = np.arange(1024, dtype=np.float32).reshape(8, 128) / 8
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((16, 128), jnp.bfloat16),
        scratch_shapes=[planned.scratch()],
        interpret=interpret,
    )(x)
    np.testing.assert_array_equal(out, np.concatenate([x, x]).astype(jnp.bfloat16) * 2)


def test_host_views_write_the_pool_that_they_read():
    planned = _demo_plan(jnp.bfloat16)
    pool = np.zeros((planned.byte_rows, 128), np.uint8)
    values = _values((8, 128), jnp.bfloat16)
    view(pool, planned, "stack").store(values, 1)
    np.testing.assert_array_equal(view(pool, planned, "stack").load(1), values)
    np.testing.assert_array_equal(view(pool, planned, "stack").window(1), pack(values))
    assert not view(pool, planned, "matrix").load().any()


def _pool(planned):
    return np.zeros((planned.byte_rows, 128), np.uint8)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda p: view(_pool(p), p, "nothing"), "no buffer 'nothing' .*planned: before, matrix"),
        (lambda p: view(_pool(p)[1:], p, "matrix"), "the plan's storage is uint8"),
        (lambda p: view(_pool(p), p, "stack", phase=0), "stack does not live in phase 0"),
        (lambda p: view(_pool(p), p, "stack").load(), "1 leading dimensions, .* of 0 entries"),
        (lambda p: view(_pool(p), p, "stack").load(3), r"index 3 is outside 0\.\.2"),
        (
            lambda p: view(_pool(p), p, "matrix").store(np.zeros((20, 300), np.int16)),
            r"holds float32 \(20, 300\), not int16",
        ),
    ],
)
def test_wrong_use_of_a_view_is_refused(use, message):
    with pytest.raises(PlanError, match=message):
        use(_demo_plan(jnp.float32))


def test_bytes_of_another_shape_are_not_unpacked():
    with pytest.raises(PlanError, match=r"float32 \(8, 256\) is stored as uint8 \(64, 128\)"):
        unpack(np.zeros((32, 128), np.uint8), (8, 256), np.float32)
