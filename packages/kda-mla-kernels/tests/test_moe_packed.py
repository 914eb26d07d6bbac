"""Packed experts, decoded a few at a time, against every expert on every token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels import moe
from kda_mla_kernels.mlp import situ
from kda_mla_kernels.numerics import F32
from kda_mla_kernels.quant import Mxfp4, decode, decode_halves, evens_first
from tpu_collectives.testing import quick_options

TOKENS, EXPERTS, CHANNELS, LATENT, TOP_K = 6, 24, 32, 64, 4
ACTIVATION = partial(situ, beta=4.0, linear_beta=25.0, numerics=F32)


def random_mxfp4(random, *shape):
    packed = random.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    return Mxfp4(packed, random.integers(120, 126, (*shape[:-1], shape[-1] // 32), np.uint8))


@pytest.fixture(scope="module")
def experts():
    """The same experts decoded, and packed as the middle one of three layers."""
    random = np.random.default_rng(3)
    gate, up = (random_mxfp4(random, EXPERTS, CHANNELS, LATENT) for _ in range(2))
    down = random_mxfp4(random, EXPERTS, LATENT, CHANNELS)
    parts = (
        np.concatenate([gate.packed, up.packed], axis=1),
        np.concatenate([gate.scales, up.scales], axis=1),
        down.packed.swapaxes(1, 2),
        down.scales.swapaxes(1, 2),
    )
    stacks = (jnp.stack([jnp.zeros_like(x), x, jnp.full_like(x, 7)]) for x in map(jnp.array, parts))
    whole = moe.ExpertWeights(*(jnp.array(decode(w)) for w in (gate, up, down)))
    return whole, moe.PackedExperts(*stacks)


def routes(chosen):
    random = np.random.default_rng(5)
    weights = random.uniform(0.1, 1, np.shape(chosen)).astype(np.float32)
    return moe.Routes(jnp.sort(jnp.array(chosen, jnp.int32), axis=-1), jnp.array(weights))


CHOICES = {
    "all rows on one set": [[0, 3, 9, 23]] * TOKENS,
    "disjoint sets": np.arange(TOKENS * TOP_K).reshape(TOKENS, TOP_K),
    "overlapping sets": [[t, t + 1, t + 2, 23] for t in range(TOKENS)],
}
FORMS = {"rows": moe.packed_experts, "tiles": moe.packed_experts_in_tiles}


@partial(jax.jit, static_argnames=("form", "first"), compiler_options=quick_options())
def run(form, packed, x, chosen, first=0):
    held = moe.HeldExperts(moe.StackedExperts(packed, 1), first, jnp.float32)
    return FORMS[form](x, held, chosen, ACTIVATION, F32)


@partial(jax.jit, compiler_options=quick_options())
def every_expert(x, whole, chosen):
    return moe.every_expert(x, whole, chosen, ACTIVATION, F32)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (TOKENS, LATENT))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_give_what_every_expert_gives(form, choice, experts, x):
    whole, packed = experts
    chosen = routes(CHOICES[choice])
    expected = every_expert(x, whole, chosen)
    np.testing.assert_allclose(run(form, packed, x, chosen), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_the_experts_sum_to_the_whole(form, experts, x):
    whole, packed = experts
    chosen = routes(CHOICES["overlapping sets"])
    total = 0.0
    for first in (0, 12):
        part = jax.tree.map(lambda stack, first=first: stack[:, first : first + 12], packed)
        total += np.asarray(run(form, part, x, chosen, first))
    expected = every_expert(x, whole, chosen)
    np.testing.assert_allclose(total, expected, rtol=0, atol=2e-4)


def test_many_rows_of_one_expert_take_several_tiles(experts):
    whole, packed = experts
    x = jax.random.normal(jax.random.key(1), (80, LATENT))
    chosen = routes([[1, 2, 5, 6 + t % 17] for t in range(80)])
    expected = every_expert(x, whole, chosen)
    np.testing.assert_allclose(run("tiles", packed, x, chosen), expected, rtol=0, atol=2e-4)


def test_a_row_has_the_same_bits_whatever_the_others_chose(experts, x):
    _, packed = experts
    mine = np.array([2, 11, 12, 20])
    results = []
    for others in CHOICES.values():
        chosen = np.array(others)
        chosen[3] = mine
        chosen = moe.Routes(jnp.array(chosen, jnp.int32), jnp.full((TOKENS, TOP_K), 0.25))
        results.append(np.asarray(run("rows", packed, x, chosen))[3])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("axis", [0, 1])
def test_halves_are_the_exact_weights_with_even_inputs_first(axis):
    weight = random_mxfp4(np.random.default_rng(1), 8, 64)
    expected = np.asarray(evens_first(jnp.array(decode(weight))))
    packed, scales = (
        jnp.array(part.T if axis == 0 else part) for part in (weight.packed, weight.scales)
    )
    found = np.asarray(decode_halves(packed, scales, axis, jnp.float32))
    np.testing.assert_array_equal(found.T if axis == 0 else found, expected)
