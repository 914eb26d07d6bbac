"""Attention-residual mixing against the K3 code's own outputs, and with scores made beforehand."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels import residual
from kda_mla_kernels.numerics import BF16, F32

EPS = 1e-5

# One program for each number of blocks.
mix = jax.jit(residual.mix, static_argnums=4)


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parent / "golden" / "components" / "small_ops.npz") as data:
        return {name: jnp.asarray(data[name]) for name in data if name.startswith("attnres")}


@pytest.fixture(scope="module")
def vector(golden):
    return residual.fold(golden["attnres_norm_weight"], golden["attnres_proj_weight"][0])


def blocks_of(golden, count):
    return jnp.moveaxis(golden["attnres_blocks"], 1, 0)[:count]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_mixture_equals_the_golden(golden, vector, count):
    ours = mix(blocks_of(golden, count), golden["attnres_prefix_sum"], vector, EPS, F32)
    np.testing.assert_allclose(ours, golden[f"attnres_out_{count}_blocks"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numerics", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("count", [1, 4])
def test_scores_made_when_blocks_complete_give_the_same_mixture(golden, vector, count, numerics):
    """Each block is scored once, alone, under all later mixing vectors."""
    vectors = jnp.stack([2 * vector, vector, -vector])
    blocks, prefix = blocks_of(golden, count), golden["attnres_prefix_sum"]
    blocks, prefix = numerics.round(blocks), numerics.round(prefix)
    early = jnp.stack([residual.scores(block, vectors, EPS) for block in blocks], axis=1)
    for own, scored in zip(vectors, early):
        late = residual.scores(prefix, own, EPS)
        ours = residual.mix_scored(blocks, scored, prefix, late, numerics)
        expected = mix(blocks, prefix, own, EPS, numerics)
        rounding = 2**-7 if numerics is BF16 else 1e-6
        np.testing.assert_allclose(
            ours.astype(jnp.float32), expected.astype(jnp.float32), rtol=rounding, atol=1e-6
        )


def test_without_blocks_the_mixture_is_the_prefix(golden, vector):
    prefix = golden["attnres_prefix_sum"]
    nothing = jnp.zeros((0, *prefix.shape))
    np.testing.assert_array_equal(mix(nothing, prefix, vector, EPS, F32), prefix)


def test_values_are_raw_and_scores_are_of_normalised_sources(golden, vector):
    """Scaling all sources scales the mixture: the scores do not move."""
    blocks, prefix = blocks_of(golden, 3), golden["attnres_prefix_sum"]
    once = mix(blocks, prefix, vector, 0.0, F32)
    np.testing.assert_allclose(
        mix(16 * blocks, 16 * prefix, vector, 0.0, F32), 16 * once, rtol=2e-6, atol=1e-6
    )


def test_the_mixture_is_rounded_once(golden, vector):
    blocks, prefix = (BF16.round(x) for x in (blocks_of(golden, 3), golden["attnres_prefix_sum"]))
    exact = mix(*(x.astype(jnp.float32) for x in (blocks, prefix)), vector, EPS, F32)
    ours = mix(blocks, prefix, vector, EPS, BF16)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours, BF16.round(exact))
