"""Acceptance: exact where it can be exact, chi-square tests with fixed seeds where chance rules."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.sampling import Sampling, SamplingParams, probabilities, sample, uniform
from scipy import stats
from spec_dspark import accept, accept_greedy, verification

VOCABULARY = 5
SEQUENCES = 20_000
NUM_DRAFTS = 2
RANDOM = np.random.default_rng(11)
TARGET = (RANDOM.normal(size=(VOCABULARY, VOCABULARY)) * 1.5).astype(np.float32)
DRAFT = (TARGET + RANDOM.normal(size=TARGET.shape) * 1.2).astype(np.float32)
# Compiled once for each shape: compiling is most of what these tests cost.
JUDGE = jax.jit(accept)
SAMPLE = jax.jit(sample)
SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.9, top_k=4, top_p=0.9, min_p=0.05),
]


def _logits(tokens, vocabulary=VOCABULARY):
    """[S, K + 1, V] that make the given tokens the arg-max everywhere."""
    return 3 * jax.nn.one_hot(jnp.asarray(tokens), vocabulary)


def _seeded(params):
    """The same parameters for every sequence, each with a seed of its own."""
    return Sampling.of([replace(params, seed=s) for s in range(SEQUENCES)])


def _filtered(params):
    """The toy target's transition probabilities under a request's parameters."""
    sampling = Sampling.of([params] * VOCABULARY)
    return np.asarray(jax.jit(probabilities)(TARGET, sampling), np.float64)


@pytest.mark.parametrize(
    ("drafts", "accepted", "tokens"),
    [
        ([1, 2, 3], 3, [1, 2, 3, 4]),
        ([1, 2, 0], 2, [1, 2, 3, -1]),
        ([0, 2, 3], 0, [1, -1, -1, -1]),
        ([1, -1, -1], 1, [1, 2, -1, -1]),
        ([-1, -1, -1], 0, [1, -1, -1, -1]),
    ],
)
def test_greedy_accepts_leading_matches_and_adds_the_next_choice(drafts, accepted, tokens):
    got = accept_greedy(jnp.array([drafts]), _logits([[1, 2, 3, 4]]))
    assert got.accepted.tolist() == [accepted]
    assert got.tokens.tolist() == [tokens]


def test_greedy_ties_go_to_the_lowest_id():
    logits = jnp.zeros((1, 2, VOCABULARY)).at[0, :, 3:].set(1.0)
    assert accept_greedy(jnp.array([[3]]), logits).tokens.tolist() == [[3, 3]]
    assert accept_greedy(jnp.array([[4]]), logits).tokens.tolist() == [[3, -1]]


def _random_case(seed, sequences=30, drafts=3, vocabulary=9):
    random = np.random.default_rng(seed)
    logits = random.normal(size=(sequences, drafts + 1, vocabulary)).astype(np.float32) * 2
    tokens = random.integers(-1, vocabulary, (sequences, drafts)).astype(np.int32)
    hits = random.random(tokens.shape) < 0.6
    tokens = np.where(hits, logits[:, :-1].argmax(axis=-1), tokens).astype(np.int32)
    tokens[np.cumsum(tokens < 0, axis=1) > 0] = -1
    q = random.dirichlet(np.ones(vocabulary), tokens.shape).astype(np.float32)
    positions = random.integers(0, 1000, sequences).astype(np.int32)
    params = [
        SamplingParams(
            temperature=float(random.choice([0.0, 0.7, 1.5])),
            top_k=int(random.choice([0, 4])),
            top_p=float(random.choice([1.0, 0.8])),
            seed=int(random.integers(1 << 40)),
        )
        for _ in range(sequences)
    ]
    return tokens, logits, params, positions, q


@pytest.mark.parametrize("seed", range(4))
def test_drafts_without_chance_give_the_tokens_of_plain_sampling(seed):
    drafts, logits, params, positions, _ = _random_case(seed)
    got = JUDGE(drafts, logits, Sampling.of(params), positions)
    plain = np.stack(
        [SAMPLE(logits[:, k], Sampling.of(params), positions + k) for k in range(4)], axis=1
    )
    assert 0 < int(got.accepted.sum()) < drafts.size
    for s, accepted in enumerate(np.asarray(got.accepted)):
        emitted = np.asarray(got.tokens[s])
        assert emitted[: accepted + 1].tolist() == plain[s, : accepted + 1].tolist()
        assert emitted[:accepted].tolist() == drafts[s, :accepted].tolist()
        assert accepted == 3 or drafts[s, accepted] != plain[s, accepted]


@pytest.mark.parametrize("seed", range(4))
def test_greedy_sequences_accept_the_arg_max_whatever_the_draft_distribution_and_neighbours(seed):
    drafts, logits, params, positions, q = _random_case(seed)
    got = JUDGE(drafts, logits, Sampling.of(params), positions, q)
    expected = accept_greedy(drafts, logits)
    greedy = np.array([one.temperature == 0 for one in params])
    assert 0 < greedy.sum() < 30
    np.testing.assert_array_equal(got.tokens[greedy], expected.tokens[greedy])
    np.testing.assert_array_equal(got.accepted[greedy], expected.accepted[greedy])


@pytest.mark.parametrize("drawn", [False, True])
def test_a_result_does_not_depend_on_the_neighbours_or_the_place_in_the_batch(drawn):
    def judge(cases):
        drafts, logits, params, positions, q = zip(*cases)
        arrays = [np.stack(part) for part in (drafts, logits, positions, q)]
        given = arrays[3] if drawn else None
        return JUDGE(arrays[0], arrays[1], Sampling.of(params), arrays[2], given).tokens.tolist()

    ours, others = list(zip(*_random_case(3))), list(zip(*_random_case(4)))
    mixed = [*others[:10], *reversed(ours[:20])]
    assert judge(mixed)[10:] == judge(ours)[:20][::-1]


def test_a_round_without_drafts_is_plain_sampling():
    _, logits, params, positions, _ = _random_case(5)
    got = JUDGE(np.full((30, 3), -1, np.int32), logits, Sampling.of(params), positions)
    plain = SAMPLE(logits[:, 0], Sampling.of(params), positions)
    np.testing.assert_array_equal(got.tokens[:, 0], plain)
    assert not got.accepted.any()


def test_where_drawn_drafts_are_missing_the_target_alone_is_drawn_from():
    params = SETTINGS[1]
    none = np.full((SEQUENCES, 2), -1, np.int32)
    logits = np.broadcast_to(TARGET[0], (SEQUENCES, 3, VOCABULARY))
    q = np.full((SEQUENCES, 2, VOCABULARY), 1 / VOCABULARY, np.float32)
    got = JUDGE(none, logits, _seeded(params), np.zeros(SEQUENCES, np.int32), q)
    observed = np.bincount(np.asarray(got.tokens[:, 0]), minlength=VOCABULARY)
    p = _filtered(params)[0]
    assert not got.accepted.any()
    assert observed[p == 0].sum() == 0
    kept = p > 0
    assert stats.chisquare(observed[kept], p[kept] * SEQUENCES / p.sum()).pvalue > 1e-3


# Statistics: sequences of a Markov chain are drafted by another chain, judged and continued in
# rounds; the first three tokens must have the target chain's joint distribution.


def _judge_one_round(mutant, draft_salt, anchor, position, sampling):
    """``mutant`` only keeps the compiled programs of patched rules apart."""
    q_table = jax.nn.softmax(DRAFT, axis=-1)
    drafts, qs, previous = [], [], anchor
    for k in range(NUM_DRAFTS):
        q = q_table[previous]
        chance = uniform(sampling.seed, position + 1 + k, draft_salt)
        below = jnp.cumsum(q, axis=-1) <= chance[:, None]
        previous = jnp.minimum(jnp.sum(below, axis=-1), VOCABULARY - 1)
        drafts.append(previous)
        qs.append(q)
    fed = jnp.stack([anchor, *drafts], axis=1)
    logits = jnp.asarray(TARGET)[fed]
    return accept(fed[:, 1:], logits, sampling, position + 1, jnp.stack(qs, axis=1))


ONE_ROUND = jax.jit(_judge_one_round, static_argnums=(0, 1))


def _speculate(params, draft_salt=verification.DRAFT_SALT, mutant=None, rounds=3):
    """The first three tokens of many sequences, and the share of drafts that were accepted."""
    sampling = _seeded(params)
    sequence = np.arange(SEQUENCES)
    anchor, position = np.zeros(SEQUENCES, np.int32), np.zeros(SEQUENCES, np.int32)
    written = np.full((SEQUENCES, rounds * (NUM_DRAFTS + 1) + 1), -1)
    accepted = 0
    for _ in range(rounds):
        judged = ONE_ROUND(mutant, draft_salt, anchor, position, sampling)
        tokens, count = np.asarray(judged.tokens), np.asarray(judged.accepted)
        for column in range(NUM_DRAFTS + 1):
            there = column <= count
            written[sequence[there], position[there] + 1 + column] = tokens[there, column]
        anchor = tokens[sequence, count]
        position = position + count + 1
        accepted += count.sum()
    return written[:, 1:4], accepted / (rounds * NUM_DRAFTS * SEQUENCES)


def _p_value(tokens, params):
    """Chi-square of three tokens after token 0 against the target chain; tiny cells are pooled."""
    chain = _filtered(params)
    expected = (chain[0][:, None, None] * chain[:, :, None] * chain[None]).ravel() * len(tokens)
    cells = np.ravel_multi_index(tokens.T, (VOCABULARY,) * 3)
    observed = np.bincount(cells, minlength=expected.size)
    assert observed[expected == 0].sum() == 0, "a token outside the filtered set was emitted"
    big = expected >= 5
    pooled = (expected > 0) & ~big
    seen, wanted = observed[big].tolist(), expected[big].tolist()
    if expected[pooled].sum() >= 5:
        seen.append(observed[pooled].sum())
        wanted.append(expected[pooled].sum())
    wanted = np.array(wanted) * sum(seen) / sum(wanted)
    return stats.chisquare(seen, wanted).pvalue


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_drawn_drafts_leave_the_joint_distribution_of_the_target(params):
    tokens, share = _speculate(params)
    assert 0.1 < share < 0.9
    assert _p_value(tokens, params) > 1e-3


def test_a_draft_is_accepted_as_often_as_the_two_distributions_overlap():
    params = SamplingParams(temperature=1.0)
    p, q = _filtered(params)[0], np.asarray(jax.nn.softmax(DRAFT[0]), np.float64)
    random = np.random.default_rng(2)
    drafts = random.choice(VOCABULARY, (SEQUENCES, 1), p=q / q.sum()).astype(np.int32)
    logits = np.broadcast_to(TARGET[0], (SEQUENCES, 2, VOCABULARY))
    sampling = _seeded(params)
    given = np.broadcast_to(q.astype(np.float32), (SEQUENCES, 1, VOCABULARY))
    got = JUDGE(drafts, logits, sampling, np.zeros(SEQUENCES, np.int32), given)
    overlap = np.minimum(p, q).sum()
    deviation = np.sqrt(overlap * (1 - overlap) / SEQUENCES)
    assert abs(float(got.accepted.mean()) - overlap) < 4 * deviation


def test_drafts_without_chance_are_accepted_with_the_targets_probability():
    params = SamplingParams(temperature=0.8, top_k=4)
    p = _filtered(params)[0]
    sampling = _seeded(params)
    logits = np.broadcast_to(TARGET[0], (SEQUENCES, 2, VOCABULARY))
    draft = int(np.argsort(p)[-2])
    drafts = np.full((SEQUENCES, 1), draft, np.int32)
    got = JUDGE(drafts, logits, sampling, np.zeros(SEQUENCES, np.int32))
    observed = np.bincount(np.asarray(got.tokens[:, 0]), minlength=VOCABULARY)
    kept = p > 0
    assert observed[~kept].sum() == 0
    assert stats.chisquare(observed[kept], p[kept] * SEQUENCES / p.sum()).pvalue > 1e-3
    deviation = np.sqrt(p[draft] * (1 - p[draft]) / SEQUENCES)
    assert abs(float(got.accepted.mean()) - p[draft]) < 4 * deviation


def _keep_the_target(p, q):
    return p


def _accept_all(good):
    return jnp.full(good.shape[0], good.shape[1], jnp.int32)


@pytest.mark.parametrize(
    ("name", "mutant", "draft_salt"),
    [
        ("_residual", _keep_the_target, verification.DRAFT_SALT),
        ("_leading", _accept_all, verification.DRAFT_SALT),
        (None, None, verification.ACCEPT_SALT),
    ],
    ids=[
        "nothing is subtracted after a rejection",
        "every draft is accepted",
        "the drafter shares the acceptance draws",
    ],
)
def test_the_statistics_notice_a_wrong_rule(name, mutant, draft_salt, monkeypatch):
    if name:
        monkeypatch.setattr(verification, name, mutant)
    params = SETTINGS[0]
    tokens, _ = _speculate(params, draft_salt, mutant=name and mutant)
    assert _p_value(tokens, params) < 1e-9


@pytest.mark.parametrize(
    ("drafts", "logits", "q", "message"),
    [
        ((2,), (2, 1, 5), None, r"drafts must be \[S, K\], not \(2,\)"),
        ((2, 3), (2, 3, 5), None, r"logits must be \[2, 4, V\] for drafts \(2, 3\), not"),
        ((2, 3), (2, 4, 5), (2, 3, 4), r"draft_probabilities must be \(2, 3, 5\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(drafts, logits, q, message):
    q = None if q is None else jnp.zeros(q)
    with pytest.raises(ValueError, match=message):
        accept(
            jnp.zeros(drafts, jnp.int32),
            jnp.zeros(logits),
            Sampling.greedy(2),
            jnp.zeros(2, jnp.int32),
            q,
        )
