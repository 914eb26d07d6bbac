"""The router and the latent mixture of experts against third-party outputs and plain numpy.

Grouped routing, which the golden file also holds, is not supported and so not compared.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels import mlp, moe
from kda_mla_kernels.moe.top_k import ordered_keys
from kda_mla_kernels.numerics import BF16, F32

GOLDEN = Path(__file__).parent / "golden" / "components"
RULES = {
    "plain": moe.RouterRule(4),
    "scaled": moe.RouterRule(4, scale=2.5),
    "no_renorm": moe.RouterRule(4, renormalize=False, scale=1.5),
}
EXPERTS, WIDTH, INNER = 8, 12, 10
ROUTES = {
    "random": np.array([[6, 1], [0, 3], [6, 4], [7, 6]]),
    "all rows on one expert set": np.tile([2, 5], (4, 1)),
    "disjoint sets": np.arange(8).reshape(4, 2)[[3, 1, 0, 2]],
    "an empty group": np.array([[0, 1], [1, 3], [0, 3], [2, 3]]),
}

choose = jax.jit(moe.choose, static_argnums=2)
router_scores = jax.jit(moe.router_scores, static_argnums=2)
sort_routes = jax.jit(moe.sort_routes, static_argnums=1)


@pytest.fixture(scope="module")
def routing():
    with np.load(GOLDEN / "routing.npz") as data:
        return dict(data)


def normal(*shape, seed):
    """Drawn by numpy: jax would compile a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def numpy_top_k(values, k):
    """Largest first, then lowest index: a stable sort of the negatives."""
    mask = np.zeros(values.shape, bool)
    np.put_along_axis(mask, np.argsort(-values, axis=-1, kind="stable")[..., :k], True, axis=-1)
    return mask


def test_situ_equals_the_golden():
    with np.load(GOLDEN / "small_ops.npz") as data:
        gate, up = np.split(data["situ_gate_up"], 2, axis=-1)
        expected = data["situ_out"]
    ours = mlp.situ(jnp.asarray(gate), jnp.asarray(up), 4.0, 25.0, F32)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 4, 15, 16])
def test_the_k_largest_are_those_of_a_stable_sort(k):
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [
            rng.normal(size=(8, 16)),
            rng.integers(-2, 3, (16, 16)),  # many ties, zeros, negative values
            np.full((1, 16), 0.25),
            rng.normal(size=(4, 16)) * 10.0 ** rng.integers(-38, 38, (4, 16)),
            np.where(rng.random((2, 16)) < 0.5, 0.0, -0.0),
            np.where(rng.random((2, 16)) < 0.3, -np.inf, 3e38),
        ]
    ).astype(np.float32)
    np.testing.assert_array_equal(moe.top_k_mask(jnp.asarray(values), k), numpy_top_k(values, k))


def test_integer_keys_have_the_order_of_the_floats():
    values = np.array([-np.inf, -3e38, -1, -2e-38, 0, 2e-38, 1, 3e38, np.inf], np.float32)
    keys = np.asarray(ordered_keys(jnp.asarray(values)))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    assert ordered_keys(jnp.float32(-0.0)) == ordered_keys(jnp.float32(0.0))


@pytest.mark.parametrize("case", RULES)
def test_routes_equal_the_golden(routing, case):
    scores = router_scores(jnp.asarray(routing["hidden"]), jnp.asarray(routing["gate_weight"]), F32)
    np.testing.assert_allclose(scores, routing[f"{case}_scores"], rtol=1e-5, atol=1e-7)
    # Ties are exact in the golden's own scores, so the choice is made from these.
    stored = jnp.asarray(routing[f"{case}_scores"])
    routes = choose(stored, jnp.asarray(routing["e_score_correction_bias"]), RULES[case])
    chosen = np.asarray(moe.dense_weights(routes, 16)) > 0
    must, tied = routing[f"{case}_must_select"], routing[f"{case}_tied"]
    slots = routing[f"{case}_tied_slots"][:, None]
    first_tied = tied & (np.cumsum(tied, axis=1) <= slots)
    np.testing.assert_array_equal(chosen, must | first_tied)
    assert tied.any(), "the golden file holds no tie"

    rule = RULES[case]
    weights = np.where(chosen, routing[f"{case}_scores"], 0).astype(np.float64)
    if rule.renormalize:
        weights /= weights.sum(axis=1, keepdims=True)
    dense = np.asarray(moe.dense_weights(routes, 16))
    np.testing.assert_allclose(dense, weights * rule.scale, rtol=1e-5)
    # Where nothing is tied the third party's choice is the only one.
    clear = ~tied.any(axis=1)
    np.testing.assert_allclose(
        dense[clear], routing[f"{case}_weights_dense"][clear], rtol=1e-5, atol=1e-7
    )


def test_experts_of_a_token_ascend(routing):
    bias = jnp.asarray(routing["e_score_correction_bias"])
    routes = choose(jnp.asarray(routing["plain_scores"]), bias, RULES["plain"])
    assert (np.diff(routes.experts, axis=1) > 0).all()


def test_a_rule_without_experts_is_refused():
    with pytest.raises(ValueError, match="top_k is 0"):
        moe.RouterRule(0)


@pytest.fixture(scope="module")
def experts():
    return moe.ExpertWeights(
        normal(EXPERTS, INNER, WIDTH, seed=0),
        normal(EXPERTS, INNER, WIDTH, seed=1),
        normal(EXPERTS, WIDTH, INNER, seed=2),
    )


def routes_of(case):
    ids = np.sort(ROUTES[case], axis=1)
    weights = np.random.default_rng(3).uniform(0.1, 1, ids.shape)
    return moe.Routes(jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32))


def situ(numerics):
    return partial(mlp.situ, beta=4.0, linear_beta=25.0, numerics=numerics)


def numpy_situ(gate, up):
    return 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)


def numpy_experts(x, weights, routes):
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, *jax.tree.leaves(weights)))
    out = np.zeros(x.shape)
    for m, (ids, shares) in enumerate(zip(np.asarray(routes.experts), np.asarray(routes.weights))):
        for e, share in zip(ids, shares):
            out[m] += share * (down[e] @ numpy_situ(gate[e] @ x[m], up[e] @ x[m]))
    return out


@partial(jax.jit, static_argnums=(3, 4))
def by_sorted_routes(x, weights, routes, held=range(EXPERTS), numerics=F32):
    own = jax.tree.map(lambda matrix: matrix[held.start : held.stop], weights)
    rows = moe.sort_routes(routes, held)
    return moe.sorted_experts(x, own, rows, situ(numerics), numerics)


@partial(jax.jit, static_argnums=3)
def by_every_expert(x, weights, routes, numerics=F32):
    return moe.every_expert(x, weights, routes, situ(numerics), numerics)


@pytest.mark.parametrize("form", [by_sorted_routes, by_every_expert])
@pytest.mark.parametrize("case", ROUTES)
def test_experts_equal_numpy(experts, case, form):
    routes = routes_of(case)
    x = normal(len(routes.experts), WIDTH, seed=4)
    expected = numpy_experts(x, experts, routes)
    np.testing.assert_allclose(form(x, experts, routes), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", ROUTES)
def test_parts_of_the_experts_add_up_to_all(experts, case):
    """In the case of the empty group no row goes to the second half."""
    routes = routes_of(case)
    x = normal(len(routes.experts), WIDTH, seed=4)
    halves = [by_sorted_routes(x, experts, routes, held) for held in (range(4), range(4, 8))]
    np.testing.assert_allclose(
        halves[0] + halves[1], numpy_experts(x, experts, routes), rtol=1e-5, atol=2e-5
    )
    if case == "an empty group":
        np.testing.assert_array_equal(halves[1], 0)


def test_both_forms_round_alike_in_bf16(experts):
    routes = routes_of("random")
    x = normal(4, WIDTH, seed=4).astype(jnp.bfloat16)
    ours = by_sorted_routes(x, experts, routes, range(EXPERTS), BF16)
    expected = by_every_expert(x, experts, routes, BF16)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2**-8 * np.abs(expected).max())


@pytest.mark.parametrize("case", ROUTES)
@pytest.mark.parametrize("held", [range(8), range(4), range(4, 8), range(6, 7)])
def test_sorted_routes_are_those_of_numpy(case, held):
    routes = routes_of(case)
    ours = sort_routes(routes, held)
    flat = [
        (e, m, w)
        for m, (ids, weights) in enumerate(zip(ROUTES[case], np.asarray(routes.weights)))
        for e, w in zip(np.sort(ids), weights)
    ]
    mine = sorted((route for route in flat if route[0] in held), key=lambda route: route[:2])
    np.testing.assert_array_equal(ours.counts, [sum(r[0] == e for r in mine) for e in held])
    np.testing.assert_array_equal(ours.tokens[: len(mine)], [r[1] for r in mine])
    np.testing.assert_array_equal(ours.weights[: len(mine)], [r[2] for r in mine])
    np.testing.assert_array_equal(ours.weights[len(mine) :], 0)
    assert len(ours.tokens) == len(flat)


def test_the_latent_mixture_equals_numpy(experts):
    hidden, rows, inner = 20, 5, 14
    shared = moe.MlpWeights(
        normal(inner, hidden, seed=10),
        normal(inner, hidden, seed=11),
        normal(hidden, inner, seed=12),
    )
    weights = moe.LatentMoeWeights(
        router=normal(EXPERTS, hidden, seed=13),
        router_bias=normal(EXPERTS, seed=14),
        down=normal(WIDTH, hidden, seed=15),
        norm=normal(WIDTH, seed=16),
        up=normal(hidden, WIDTH, seed=17),
        experts=experts,
        shared=shared,
    )
    rule = moe.LatentMoeRule(moe.RouterRule(3), 4.0, 25.0, 1e-5)
    x = normal(rows, hidden, seed=18)
    out, trace = jax.jit(lambda x, w: moe.latent_moe(x, w, rule, F32))(x, weights)

    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), weights)
    scores = 1 / (1 + np.exp(-(np.asarray(x, np.float64) @ wide.router.T)))
    chosen = np.where(numpy_top_k(scores + wide.router_bias, 3), scores, 0)
    dense = chosen / chosen.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(moe.dense_weights(trace.routes, EXPERTS), dense, rtol=1e-5)
    latent = np.asarray(x, np.float64) @ wide.down.T
    mixed = numpy_experts(latent, experts, trace.routes)
    normed = mixed / np.sqrt((mixed**2).mean(axis=1, keepdims=True) + 1e-5) * wide.norm
    own = numpy_situ(x @ wide.shared.gate.T, x @ wide.shared.up.T) @ wide.shared.down.T
    np.testing.assert_allclose(out, normed @ wide.up.T + own, rtol=1e-4, atol=1e-3)
