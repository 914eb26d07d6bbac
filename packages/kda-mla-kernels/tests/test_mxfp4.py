"""MXFP4 decoding against compressed-tensors' and ml_dtypes' values, and the FP8 conversion.

`golden/components/mxfp4.npz` was computed by compressed-tensors 0.20.0 and ml_dtypes 0.6.0.
Dots that read packed weights are tested elsewhere.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kda_mla_kernels.quant import mxfp4
from kda_mla_kernels.quant.mxfp4 import Mxfp4, NotLosslessError


@pytest.fixture(scope="module")
def golden():
    return np.load(Path(__file__).parent / "golden" / "components" / "mxfp4.npz")


def bits(array):
    return np.asarray(array).view(f"u{np.asarray(array).dtype.itemsize}")


def random_weight(seed=0, shape=(6, 512), scales=(110, 124)):
    rng = np.random.default_rng(seed)
    n, k = shape
    return Mxfp4(
        rng.integers(0, 256, (n, k // 2), np.uint8),
        rng.integers(*scales, (n, k // 32)).astype(np.uint8),
    )


def test_every_byte_decodes_to_the_low_nibble_then_the_high_one(golden):
    np.testing.assert_array_equal(bits(mxfp4.CODES), bits(golden["e2m1_values"]))
    every = np.arange(256, dtype=np.uint8)[:, None]
    np.testing.assert_array_equal(
        bits(mxfp4.CODES[mxfp4.unpack(every)]), bits(golden["byte_to_two_values"])
    )


def test_every_scale_byte_decodes_to_its_power_of_two_and_255_to_nan(golden):
    scales = mxfp4.decode_scales(np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(scales, golden["e8m0_values"])
    assert np.isnan(scales[255])
    assert scales[0] == 2.0**-127


@pytest.mark.parametrize("case", ["decode", "encode"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_decoding_on_the_host_equals_the_golden_values_bit_for_bit(golden, case, dtype):
    weight = Mxfp4(golden[f"{case}_packed"], golden[f"{case}_scale"])
    expected = golden[f"{case}_values"]
    np.testing.assert_array_equal(
        bits(mxfp4.decode(weight, np.float32).astype(dtype)), bits(expected.astype(dtype))
    )
    np.testing.assert_array_equal(bits(mxfp4.decode(weight, dtype)), bits(expected.astype(dtype)))


def test_decoding_on_a_device_equals_the_golden_values(golden):
    normal = golden["decode_scale"] >= 2
    values = jax.jit(mxfp4.decode_jax, static_argnames="dtype")(
        golden["decode_packed"], golden["decode_scale"], dtype=jnp.float32
    )
    groups = np.asarray(values).reshape(*normal.shape, 32)
    expected = golden["decode_values"].reshape(*normal.shape, 32)
    np.testing.assert_array_equal(bits(groups[normal]), bits(expected[normal]))
    # Subnormal products are flushed or kept.
    np.testing.assert_allclose(groups[~normal], expected[~normal], rtol=0, atol=2.0**-125)


def test_decoding_on_a_device_to_bf16_is_exact():
    weight = random_weight(scales=(2, 253))
    weight.check_exact()
    np.testing.assert_array_equal(
        np.asarray(mxfp4.decode_jax(weight.packed, weight.scales)).astype(np.float32),
        mxfp4.decode(weight, np.float32),
    )


def test_a_nan_scale_decodes_to_nan_on_host_and_device():
    packed = np.full((1, 16), 0x22, np.uint8)
    scales = np.array([[255]], np.uint8)
    assert np.isnan(mxfp4.decode(Mxfp4(packed, scales))).all()
    assert np.isnan(np.asarray(mxfp4.decode_jax(packed, scales), np.float32)).all()


def test_a_stack_of_experts_decodes_like_each_of_them():
    one, two = random_weight(1), random_weight(2)
    stack = Mxfp4(np.stack([one.packed, two.packed]), np.stack([one.scales, two.scales]))
    assert stack.shape == (2, 6, 512)
    np.testing.assert_array_equal(
        mxfp4.decode(stack), np.stack([mxfp4.decode(one), mxfp4.decode(two)])
    )


@pytest.mark.parametrize("block", [32, 64, 256, 512])
def test_fp8_holds_the_same_weights_bit_for_bit_up_to_a_spread_of_14(block):
    weight = random_weight(3, scales=(100, 115))
    assert np.ptp(weight.scales) == 14
    fp8 = mxfp4.to_block_fp8(weight, block)
    assert fp8.values.dtype == ml_dtypes.float8_e4m3fn
    assert fp8.exponents.shape == (6, 512 // block)
    assert fp8.block == block
    np.testing.assert_array_equal(bits(mxfp4.decode_fp8(fp8)), bits(mxfp4.decode(weight)))


def test_the_block_exponent_is_the_largest_scale_less_six():
    weight = random_weight(4, (2, 64), (120, 121))
    np.testing.assert_array_equal(mxfp4.to_block_fp8(weight, 64).exponents, [[114], [114]])


def one_row(*groups):
    """A row of groups, each (nibble, scale byte)."""
    packed = np.repeat([code * 0x11 for code, _ in groups], 16).astype(np.uint8)[None]
    return Mxfp4(packed, np.array([[scale for _, scale in groups]], np.uint8))


def test_fp8_is_refused_when_a_spread_of_15_would_round():
    with pytest.raises(NotLosslessError, match=r"w1: the block of \(0, 32\) .* 15 apart"):
        mxfp4.to_block_fp8(one_row((7, 130), (1, 115)), 64, name="w1")


def test_fp8_takes_a_spread_of_15_when_the_codes_that_are_there_fit():
    # Code 2 (value 1.0) at 15 below the largest is 2^-9, the smallest e4m3 number.
    weight = one_row((7, 130), (2, 115))
    fp8 = mxfp4.to_block_fp8(weight, 64)
    np.testing.assert_array_equal(bits(mxfp4.decode_fp8(fp8)), bits(mxfp4.decode(weight)))


@pytest.mark.parametrize("zero", [0, 8])
def test_groups_of_zeros_do_not_count_and_keep_their_sign(zero):
    weight = one_row((7, 120), (zero, 254), (zero, 0), (1, 110))
    fp8 = mxfp4.to_block_fp8(weight, 128)
    assert fp8.exponents.tolist() == [[114]]
    np.testing.assert_array_equal(bits(mxfp4.decode_fp8(fp8)), bits(mxfp4.decode(weight)))


def test_a_block_of_zeros_converts():
    fp8 = mxfp4.to_block_fp8(one_row((0, 0), (8, 3)), 64)
    assert not mxfp4.decode_fp8(fp8).any()


def test_a_scale_too_small_for_a_block_exponent_is_refused():
    with pytest.raises(NotLosslessError, match="scale byte 6 leaves no room"):
        mxfp4.to_block_fp8(one_row((1, 6)), 32)


@pytest.mark.parametrize("scale", [0, 1, 253, 254, 255])
def test_scales_whose_weights_are_not_normal_numbers_are_named(scale):
    with pytest.raises(ValueError, match=rf"experts.3.w2: scale byte {scale} at \(0, 1\)"):
        one_row((7, 120), (7, scale)).check_exact("experts.3.w2")


def test_a_nan_scale_is_refused_even_over_zeros():
    with pytest.raises(ValueError, match="255"):
        one_row((0, 255)).check_exact()


@pytest.mark.parametrize(
    ("packed", "scales", "message"),
    [
        (np.zeros((2, 16), np.int8), np.zeros((2, 1), np.uint8), "packed must be uint8, not int8"),
        (np.zeros((2, 16), np.uint8), np.zeros((2, 1), np.float32), "scales must be uint8"),
        (np.zeros((2, 8), np.uint8), np.zeros((2, 1), np.uint8), "multiple of 32 inputs, not 16"),
        (np.zeros((2, 0), np.uint8), np.zeros((2, 0), np.uint8), "multiple of 32 inputs, not 0"),
        (np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint8), r"shape \(2, 2\), not \(2, 1\)"),
        (np.zeros((32,), np.uint8), np.zeros((2,), np.uint8), "not of shape"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(packed, scales, message):
    with pytest.raises(ValueError, match=message):
        Mxfp4(packed, scales)


@pytest.mark.parametrize("block", [0, -32, 48, 96, 1024])
def test_a_block_that_does_not_divide_the_inputs_is_refused(block):
    with pytest.raises(ValueError, match=f"divides 512, not {block}"):
        mxfp4.to_block_fp8(random_weight(), block)
