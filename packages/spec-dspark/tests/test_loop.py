"""The loop around a toy model that keeps the protocol strictly. Real models are not covered."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.model import Model
from kda_mla_kernels.sampling import SamplingParams, uniform
from scipy import stats
from spec_dspark import Live, PromptLookup, Proposal, Request, generate, run_round, stream
from spec_dspark.verification import DRAFT_SALT

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=77)


class Recorder:
    """Drafts at random, now and then too few, and remembers what it was told."""

    max_drafts = 5

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.told = {}

    def reset(self, row):
        self.told[row] = []

    def extend(self, row, tokens, features):
        assert len(tokens) == len(features)
        for token, feature in zip(tokens, np.asarray(features)[:, 0, 0]):
            self.told[row].append(token)
            assert feature == sum(self.told[row]), "features belong to other tokens"

    def propose(self, rows, anchors, sampling, num_drafts):
        drafts = self.random.integers(0, 16, (len(rows), num_drafts))
        counts = self.random.integers(0, num_drafts + 1, (len(rows), 1))
        return Proposal(np.where(np.arange(num_drafts) < counts, drafts, -1).astype(np.int32))


class Cheat(Recorder):
    """Drafts what the model will say, with a share of mistakes."""

    def __init__(self, model, mistakes):
        super().__init__()
        self.model, self.mistakes = model, mistakes

    def propose(self, rows, anchors, sampling, num_drafts):
        drafts = np.zeros((len(rows), num_drafts), np.int32)
        for s, (row, anchor) in enumerate(zip(rows, anchors)):
            history = [*self.told[row], anchor]
            for k in range(num_drafts):
                right = int(np.argmax(self.model._logits(history)))
                wrong = self.random.random() < self.mistakes
                drafts[s, k] = (right + wrong) % 16
                history.append(int(drafts[s, k]))
        return Proposal(drafts)


class Drawing(Recorder):
    """Draws every draft from one fixed distribution, with the random numbers drafters shall use."""

    max_drafts = 3

    def propose(self, rows, anchors, sampling, num_drafts):
        q = jax.nn.softmax(jnp.arange(16) % 5 * 0.4)
        ends = jnp.cumsum(q)
        columns = []
        for k in range(num_drafts):
            at = jnp.array([len(self.told[row]) + 1 + k for row in rows])
            chance = uniform(sampling.seed, at, DRAFT_SALT)
            columns.append(jnp.minimum(jnp.searchsorted(ends, chance, side="right"), 15))
        given = jnp.broadcast_to(q, (len(rows), num_drafts, 16))
        return Proposal(jnp.stack(columns, axis=1).astype(jnp.int32), given)


def test_the_toy_model_keeps_the_protocol(toy_model):
    assert isinstance(toy_model, Model)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["recorder", "lookup", "cheat", "perfect"])
def test_the_output_is_that_of_plain_decoding(drafter, params, toy_model, decode_plainly):
    drafters = {
        "recorder": Recorder(),
        "lookup": PromptLookup(shortest=1),
        "cheat": Cheat(toy_model, mistakes=0.3),
        "perfect": Cheat(toy_model, mistakes=0.0),
    }
    request = Request(PROMPT, 40, params)
    got, state = generate(toy_model, toy_model.init_state(), drafters[drafter], request)
    assert got.tokens == decode_plainly(toy_model, PROMPT, 40, params)
    assert (got.finish, len(got.tokens)) == ("length", 40)
    assert got.accepted + got.rounds + 1 == 40
    assert state.rows[0] == (*PROMPT, *got.tokens[:-1])


def test_a_perfect_drafter_needs_a_sixth_of_the_steps(toy_model):
    request = Request(PROMPT, 37)
    drafter = Cheat(toy_model, mistakes=0.0)
    got, _ = generate(toy_model, toy_model.init_state(), drafter, request)
    assert (got.rounds, got.tokens_per_round) == (6, 6.0)
    assert toy_model.verify_calls == [[6]] * 6


def test_lookup_saves_steps_where_the_text_repeats_itself(toy_model):
    got, _ = generate(
        toy_model, toy_model.init_state(), PromptLookup(shortest=1), Request(PROMPT, 60)
    )
    assert got.rounds < 50
    assert got.tokens_per_round == pytest.approx(59 / got.rounds)
    assert 0 < got.accepted <= got.drafted


class Fixed(Recorder):
    """Always makes the same number of wrong drafts."""

    def __init__(self, count, max_drafts):
        super().__init__()
        self.count, self.max_drafts = count, max_drafts

    def propose(self, rows, anchors, sampling, num_drafts):
        drafts = np.full((len(rows), num_drafts), -1, np.int32)
        drafts[:, : self.count] = 0
        return Proposal(drafts)


@pytest.mark.parametrize(
    ("count", "max_drafts", "width"),
    [(0, 7, 1), (1, 7, 2), (2, 7, 4), (3, 7, 4), (4, 7, 8), (7, 7, 8), (4, 5, 6), (9, 9, 8)],
)
def test_the_verify_step_is_as_wide_as_the_next_power_of_two(count, max_drafts, width, toy_model):
    """Cut at what the drafter (5) or the model's rows (8) allow."""
    state, drafter = toy_model.init_state(), Fixed(count, max_drafts)
    drafter.reset(0)
    consumed = toy_model.prefill(state, 0, PROMPT[:5], 0)
    drafter.extend(0, PROMPT[:5], consumed.features)
    step = run_round(toy_model, consumed.state, drafter, [Live(0, PROMPT[5], 5)])
    assert toy_model.verify_calls == [[width]]
    assert step.drafted == (min(count, 7),)


def test_the_drafter_is_told_exactly_what_was_consumed(toy_model):
    drafter = Recorder()
    got, state = generate(toy_model, toy_model.init_state(), drafter, Request(PROMPT, 30), row=2)
    assert tuple(drafter.told[2]) == state.rows[2] == (*PROMPT, *got.tokens[:-1])


def test_generation_ends_with_the_first_stop_token(toy_model, decode_plainly):
    plain = decode_plainly(toy_model, PROMPT, 30, GREEDY)
    stop = plain[7]
    request = Request(PROMPT, 30, stop_ids=frozenset({stop}))
    drafter = Cheat(toy_model, mistakes=0.0)
    got, _ = generate(toy_model, toy_model.init_state(), drafter, request)
    assert got.tokens == plain[: plain.index(stop) + 1]
    assert got.finish == "stop"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_max_tokens_is_kept_to_the_token(count, toy_model, decode_plainly):
    drafter = Cheat(toy_model, mistakes=0.0)
    got, _ = generate(toy_model, toy_model.init_state(), drafter, Request(PROMPT, count))
    assert got.tokens == decode_plainly(toy_model, PROMPT, count, GREEDY)


def test_prompt_and_answer_fill_the_context_and_no_more(make_model):
    model = make_model(max_context=20)
    drafter = Cheat(model, mistakes=0.0)
    got, _ = generate(model, model.init_state(), drafter, Request(PROMPT, 100))
    assert len(PROMPT) + len(got.tokens) == 20
    assert got.finish == "length"


def test_a_stream_gives_the_tokens_as_they_come(toy_model):
    drafter = Cheat(toy_model, mistakes=0.0)
    steps = list(stream(toy_model, toy_model.init_state(), drafter, Request(PROMPT, 14)))
    assert [len(step.emitted[0]) for step in steps] == [1, 6, 6, 1]
    assert [step.drafted for step in steps] == [(), (5,), (5,), (0,)]


def test_a_round_serves_greedy_and_sampled_sequences_side_by_side(toy_model, decode_plainly):
    """Two rows of one model advance together, each as if it were alone."""
    plans = {1: GREEDY, 3: SAMPLED}
    drafter, state, live, got = Cheat(toy_model, mistakes=0.4), toy_model.init_state(), [], {}
    for row, params in plans.items():
        first, *_ = stream(toy_model, state, drafter, Request(PROMPT, 1, params), row)
        state, got[row] = first.state, list(first.emitted[0])
        live.append(Live(row, got[row][0], len(PROMPT), params))
    while min(map(len, got.values())) < 20:
        step = run_round(toy_model, state, drafter, live)
        state = step.state
        for s, sequence in enumerate(live):
            got[sequence.row] += step.emitted[s]
            at = sequence.position + len(step.emitted[s])
            live[s] = replace(sequence, anchor=step.emitted[s][-1], position=at)
    assert max(len(lengths) for lengths in toy_model.verify_calls) == 2
    assert max(sum(lengths) for lengths in toy_model.verify_calls) == 8
    for row, params in plans.items():
        assert tuple(got[row][:20]) == decode_plainly(toy_model, PROMPT, 20, params)


def test_drawn_drafts_leave_the_first_two_tokens_after_the_anchor_as_they_were(make_model):
    """Many seeds through the real loop, eight sequences a round, against the exact distribution."""
    model, drafter = make_model(max_rows=16), Drawing()
    params = SamplingParams(temperature=1.0, top_k=4)
    counts = np.zeros((16, 16))
    for first in range(0, 1200, 8):
        state = model.init_state()
        live = []
        for row in range(8):
            drafter.reset(row)
            consumed = model.prefill(state, row, (3, 1), 0)
            drafter.extend(row, (3, 1), consumed.features)
            state = consumed.state
            live.append(Live(row, 4, 2, replace(params, seed=first + row)))
        emitted = [()] * 8
        while min(map(len, emitted)) < 2:
            step = run_round(model, state, drafter, live, max_drafts=1)
            state = step.state
            emitted = [a + b for a, b in zip(emitted, step.emitted)]
            live = [
                replace(one, anchor=new[-1], position=one.position + len(new))
                for one, new in zip(live, step.emitted)
            ]
        for tokens in emitted:
            counts[tokens[0], tokens[1]] += 1

    def chosen(history):
        logits = np.asarray(model._logits(history), np.float64)
        kept = np.where(logits >= np.sort(logits)[-4], np.exp(logits - logits.max()), 0)
        return kept / kept.sum()

    start = chosen((3, 1, 4))
    joint = np.stack([start[a] * chosen((3, 1, 4, a)) for a in range(16)])
    assert counts[joint == 0].sum() == 0
    likely = joint * counts.sum() >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(joint[likely], joint[~likely].sum()) * counts.sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_wrong_requests_and_rounds_are_refused(make_model):
    model = make_model(max_rows=2, max_context=12)
    with pytest.raises(ValueError, match="a prompt needs at least one token"):
        Request((), 5)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        Request((1,), 0)
    with pytest.raises(ValueError, match="a prompt of 12 tokens leaves no room in a context of 12"):
        generate(model, model.init_state(), Recorder(), Request((1,) * 12, 5))
    with pytest.raises(ValueError, match="at least one sequence"):
        run_round(model, model.init_state(), Recorder(), [])
    with pytest.raises(ValueError, match="3 sequences exceed the model's 2 rows"):
        run_round(model, model.init_state(), Recorder(), [Live(row, 1, 1) for row in range(3)])
    with pytest.raises(ValueError, match="at the end of the context of 12 tokens"):
        run_round(model, model.init_state(), Recorder(), [Live(0, 1, 11)])
