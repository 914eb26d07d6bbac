"""The XLA backend on 1, 2, 4 and 8 devices against transformers' outputs and our reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels import gdn
from megakernel_qwen.layout import QwenLayout

ALL_LAYERS = tuple(range(8))


@pytest.fixture
def model(request, load_tiny):
    # Unrolled on one device as laptops run it, a loop over periods on several as slices do.
    return load_tiny(
        request.param, rough=True, feature_layers=ALL_LAYERS, stack_layers=request.param > 1
    )


def on_ranks(*short, slow=(4,)):
    """All rank counts with the 70-token prompt; shorter prompts, a program each, on one rank."""
    pairs = [(1, n) for n in short] + [(ranks, 70) for ranks in (1, 2, 4, 8)]
    cases = [
        pytest.param(
            *pair,
            id="{} ranks, {} tokens".format(*pair),
            marks=[pytest.mark.slow] if pair[0] in slow else [],
        )
        for pair in pairs
    ]
    return pytest.mark.parametrize(("model", "n"), cases, indirect=["model"])


@on_ranks(7)
def test_prefill_logits_and_hidden_states_equal_the_golden(model, golden, n):
    tokens = golden[f"len{n}/input_ids"]
    out = model.prefill(model.init_state(), 3, tokens, 0, all_logits=True)
    error = np.abs(np.asarray(out.logits) - golden[f"len{n}/fp32/logits"])
    assert error.max() < 2e-4
    assert error.mean() < 2e-5
    expected = golden[f"len{n}/fp32/hidden"][1:]
    hidden = np.moveaxis(np.asarray(out.features), 1, 0)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=2e-4 * expected.std())


@on_ranks()
def test_states_after_the_prompt_equal_the_golden(
    model, n, golden, tiny_config, state_of_row, channels_of_all_ranks
):
    out = model.prefill(model.init_state(), 3, golden[f"len{n}/input_ids"], 0, all_logits=True)
    state = state_of_row(out.state, 3, n)
    tail = channels_of_all_ranks(QwenLayout(tiny_config, model.info.ranks), state["tail"])
    expected = golden["len70/fp32/gdn_conv_state"][..., 1:]  # the oldest column is spare
    np.testing.assert_allclose(np.moveaxis(tail, 1, 2), expected, rtol=0, atol=5e-5)
    delta = np.concatenate(list(state["delta"]), axis=1)  # ranks hold neighbouring heads
    expected = golden["len70/fp32/gdn_recurrent_state"]
    np.testing.assert_allclose(delta, expected, rtol=0, atol=3e-5)


@on_ranks(1, slow=(2, 4))
def test_greedy_tokens_equal_the_golden(model, golden, sequence, n):
    run = sequence(model, row=2)
    logits = run.prefill(golden[f"len{n}/input_ids"], all_logits=True)[0][-1]
    for token, expected in zip(
        golden[f"len{n}/fp32/greedy_tokens"], golden[f"len{n}/fp32/greedy_logits"]
    ):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)
        assert logits.argmax() == token
        logits = run.decode(token)


def test_bf16_equals_the_reference_at_the_same_rounding_points(load_tiny, golden, bf16_logits):
    model = load_tiny(2, numerics="bf16")
    tokens = golden["len70/input_ids"]
    ours = np.asarray(model.prefill(model.init_state(), 0, tokens, 0, all_logits=True).logits)
    # Sums in another order move a value over a rounding border now and then, and the layers after
    # that carry it on; a missing or extra rounding point moves every value.
    error = np.abs(ours - bf16_logits)
    assert error.mean() < 0.03
    assert error.max() < 0.4
    assert (ours.argmax(-1) == bf16_logits.argmax(-1)).mean() > 0.95


def test_bf16_is_as_near_the_golden_as_two_implementations_are(load_tiny, golden):
    model = load_tiny(2, numerics="bf16")
    out = model.prefill(model.init_state(), 0, golden["len70/input_ids"], 0, all_logits=True)
    error = np.abs(np.asarray(out.logits) - golden["len70/bf16/logits"])
    assert error.mean() < 0.15
    assert error.max() < 1.2
    same = np.asarray(out.logits).argmax(-1) == golden["len70/bf16/logits"].argmax(-1)
    assert same.mean() > 0.85


def test_a_mistake_in_the_chunk_form_is_caught(monkeypatch, load_tiny, golden):
    """The backend's own forms are planted too: here a chunk that forgets the state before it."""
    right = gdn.chunked_delta_rule

    def wrong(state, inputs, valid, chunk=64):
        return right(jnp.zeros_like(state), inputs, valid, chunk)

    monkeypatch.setattr(gdn, "chunked_delta_rule", wrong)
    # A model of its own: programs are traced on first use.
    model = load_tiny(1, rough=True, max_rows=2)
    state, tokens = model.init_state(), golden["len70/input_ids"]
    for first, last in ((0, 35), (35, 70)):
        out = model.prefill(state, 0, tokens[first:last], first, all_logits=True)
        state = out.state
    error = np.abs(np.asarray(out.logits) - golden["len70/fp32/logits"][35:])
    assert error.max() > 100 * 2e-4


def test_a_rank_that_reads_the_wrong_key_head_is_caught(monkeypatch, load_tiny, golden):
    monkeypatch.setattr(QwenLayout, "first_kv_head", lambda self, rank: 0)
    model = load_tiny(4, rough=True, max_rows=2)
    out = model.prefill(model.init_state(), 0, golden["len70/input_ids"], 0, all_logits=True)
    assert np.abs(np.asarray(out.logits) - golden["len70/fp32/logits"]).max() > 100 * 2e-4
