"""The XLA backend on 1, 2, 4 and 8 devices against K3's own outputs and our reference.

Tolerances are those of the golden data's README.
"""

import jax
import numpy as np
import pytest
from kda_mla_kernels import kda, moe
from kda_mla_kernels.numerics import BF16
from kda_mla_kernels.testing import Sequence
from megakernel_kimi import reference

MAX_LOGIT_ERROR, MEAN_LOGIT_ERROR = 1e-3, 3e-5
ALL_PREFIXES = tuple(range(8))  # before each of the 7 layers, and after the last


@pytest.fixture(scope="module")
def model(load_tiny):
    return load_tiny(1, rough=True, feature_layers=ALL_PREFIXES)


def whole_prompt(model, golden, row=3):
    return model.prefill(model.init_state(), row, golden["len70/input_ids"], 0, all_logits=True)


@pytest.fixture(
    scope="module", params=[1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 8]
)
def prefilled(request, load_tiny, golden):
    model = load_tiny(request.param, rough=True, feature_layers=ALL_PREFIXES)
    return whole_prompt(model, golden)


def assert_logits_equal(logits, expected):
    error = np.abs(np.asarray(logits) - expected)
    assert error.max() < MAX_LOGIT_ERROR
    assert error.mean() < MEAN_LOGIT_ERROR


def test_logits_and_prefixes_equal_the_golden(prefilled, golden):
    assert_logits_equal(prefilled.logits, golden["len70/fp32/logits"])
    prefixes = np.moveaxis(np.asarray(prefilled.features), 1, 0)
    expected = golden["len70/fp32/prefix_sum"]
    np.testing.assert_allclose(prefixes[1:], expected, rtol=0, atol=2e-4 * expected.std())
    np.testing.assert_array_equal(prefixes[0], golden["len70/fp32/embed"])


def of_all_ranks(part, axis):
    """[ranks, ...] with a share of ``axis`` each -> all of it."""
    return np.concatenate(list(part), axis=axis)


def test_states_after_the_prompt_equal_the_golden(prefilled, golden, state_of_row):
    state = state_of_row(prefilled.state, 3, 70)
    for part, name in zip(np.split(state["tail"], 3, axis=-1), "qkv"):
        expected = golden[f"len70/fp32/kda_conv_state_{name}"][..., 1:]  # the oldest is spare
        ours = of_all_ranks(np.swapaxes(part, -1, -2), 1)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=5e-5)
    ours = of_all_ranks(np.swapaxes(state["delta"], -1, -2), 1)  # the golden's are [value, key]
    expected = golden["len70/fp32/kda_recurrent_state"]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-5)
    rows = np.concatenate([state["latents"], np.swapaxes(state["shared"], -1, -2)], axis=-1)
    for mine in rows:  # every rank has them all
        np.testing.assert_allclose(mine, golden["len70/fp32/mla_latent"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("ranks", "n", "steps"), [(1, 1, 5), (1, 70, 16), (8, 70, 5)])
def test_greedy_tokens_equal_the_golden(ranks, n, steps, load_tiny, golden):
    run = Sequence(load_tiny(ranks, rough=True, feature_layers=ALL_PREFIXES), row=2)
    logits = run.prefill(golden[f"len{n}/input_ids"], all_logits=True)[0][-1]
    tokens, expected_logits = (golden[f"len{n}/fp32/greedy_{x}"] for x in ("tokens", "logits"))
    for token, expected in zip(tokens[:steps], expected_logits):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=MAX_LOGIT_ERROR)
        assert logits.argmax() == token
        logits = run.decode(token)


def test_greedy_steps_follow_each_other_on_the_device(model, golden):
    state = model.prefill(model.init_state(), 0, golden["len1/input_ids"], 0, all_logits=True).state
    first, *rest = golden["len1/fp32/greedy_tokens"][:5]
    rows = model.info.max_rows
    tokens, active = np.full(rows, first), np.arange(rows) == 0
    out = model.decode_steps(state, tokens, np.ones(rows, int), active, 4)
    np.testing.assert_array_equal(np.asarray(out.tokens)[:, 0], rest)
    assert (np.asarray(out.tokens)[:, 1:] == -1).all()


def test_routes_of_the_backend_equal_the_golden(load_tiny, golden):
    """What the experts were given, layer after layer, when the prompt was prefilled."""
    routes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "choose", watched(moe.choose, routes))
        # A model of its own: programs are traced on first use.
        model = load_tiny(1, short=True, rough=True, max_rows=1)
        model.prefill(model.init_state(), 0, golden["len7/input_ids"], 0)
    jax.effects_barrier()
    expected = golden["len7/fp32/router_weights_dense"][:3]
    np.testing.assert_allclose(np.stack(routes)[:, :7], expected, rtol=0, atol=1e-5)


def watched(choose, seen):
    """A router that notes the dense weights of its routes."""

    def noted(scores, bias, rule):
        routes = choose(scores, bias, rule)
        dense = moe.dense_weights(routes, scores.shape[-1])
        jax.debug.callback(lambda weights: seen.append(np.asarray(weights)), dense, ordered=True)
        return routes

    return noted


def test_bf16_is_as_near_our_reference_as_rounding_at_other_places_allows(
    load_tiny, golden, tiny_config, tiny_tensors
):
    """Prefill attends in the latent space, and an expert is rounded after its sum over ranks."""
    model = load_tiny(1, rough=True, numerics="bf16")
    ours = np.asarray(whole_prompt(model, golden).logits)
    forward = jax.jit(
        lambda tokens: reference.forward(tiny_config, BF16, tiny_tensors, tokens)[0],
        compiler_options=dict(model.programs.compiler_options),
    )
    expected = np.asarray(forward(golden["len70/input_ids"]))
    for other in (expected, golden["len70/bf16/logits"]):
        assert np.abs(ours - other).mean() < 0.35  # single logits move by an expert that flips
        assert (ours.argmax(-1) == other.argmax(-1)).mean() > 0.75


def test_a_mistake_in_the_chunk_form_is_caught(load_tiny, golden, monkeypatch):
    """The backend's own forms are planted too: here chunks that forget the state before them."""
    right = kda.chunked_delta_rule

    def wrong(state, inputs, valid):
        return right(jax.numpy.zeros_like(state), inputs, valid)

    monkeypatch.setattr(kda, "chunked_delta_rule", wrong)
    run = Sequence(load_tiny(1, short=True, rough=True, max_rows=2))
    run.prefill(golden["len7/input_ids"], chunk=4)
    state = run.state.caches.delta[0, :1, 0]
    error = np.abs(np.swapaxes(state, -1, -2) - golden["len7/fp32/kda_recurrent_state"][:1])
    assert error.max() > 100 * 3e-5
