"""Sampling: each filter against plain NumPy, then what a draw may depend on, then frequencies.

Not covered: the quality of the random bits, which is JAX's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.sampling import (
    Sampling,
    SamplingParams,
    decided_by,
    probabilities,
    sample,
    sample_candidates,
    uniform,
)

VOCABULARY = 97


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution of one row, filter by filter over a list of tokens, in f64."""
    ids = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return np.eye(len(logits))[ids[0]]
    ids = ids[: params.top_k] if params.top_k else ids
    best = max(logits)
    weight = {token: np.exp((logits[token] - best) / params.temperature) for token in ids}
    total, kept, mass = sum(weight.values()), [], 0.0
    for token in ids:
        if mass < params.top_p or params.top_p == 1:
            kept.append(token)
        mass += weight[token] / total
    kept = [token for token in kept if weight[token] >= params.min_p * weight[kept[0]]]
    result = np.zeros(len(logits))
    result[kept] = [weight[token] for token in kept]
    return result / result.sum()


def random_logits(rows: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (rows, VOCABULARY)).astype(np.float32)


def distribution(logits: np.ndarray, *rows: SamplingParams) -> np.ndarray:
    return np.asarray(probabilities(jnp.asarray(logits), Sampling.of(rows)))


def draws(logits: np.ndarray, rows: list[SamplingParams], positions: list[int]) -> np.ndarray:
    tokens = sample(jnp.asarray(logits), Sampling.of(rows), jnp.asarray(positions, jnp.int32))
    return np.asarray(tokens)


FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=1.0, top_k=VOCABULARY + 5),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=1.7, top_k=50, top_p=0.9, min_p=0.01),
    SamplingParams(),
]


# Filters


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_filter_agrees_with_the_reference(params, seed):
    logits = random_logits(1, seed)
    got = distribution(logits, params)[0]
    expected = reference(logits[0].astype(np.float64), params)
    np.testing.assert_array_equal(got > 0, expected > 0)
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_rows_with_different_parameters_are_filtered_each_by_its_own():
    logits = random_logits(len(FILTERS))
    got = distribution(logits, *FILTERS)
    for row, params in enumerate(FILTERS):
        np.testing.assert_allclose(
            got[row], reference(logits[row].astype(np.float64), params), rtol=2e-5
        )


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, top_k=2), [1, 2]),
        (SamplingParams(temperature=1.0, top_k=3), [1, 2, 4]),
        (SamplingParams(temperature=1.0, top_p=0.4), [1, 2]),
        (SamplingParams(temperature=1.0, top_p=0.2), [1]),
        (SamplingParams(temperature=1.0, min_p=1.0), [1, 2, 4, 5]),
        (SamplingParams(), [1]),
    ],
    ids=str,
)
def test_ties_are_cut_in_favour_of_the_lowest_id(params, kept):
    logits = np.array([[-1.0, 2.0, 2.0, -1.0, 2.0, 2.0]], np.float32)
    assert np.flatnonzero(distribution(logits, params)[0]).tolist() == kept


def test_top_p_applies_to_what_top_k_left():
    # Of 0.4, 0.3, 0.2, 0.1 the two best are 4/7 and 3/7: the first alone reaches 0.5.
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
    both = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    assert np.flatnonzero(distribution(logits, both)[0]).tolist() == [1]
    alone = SamplingParams(temperature=1.0, top_p=0.5)
    assert np.flatnonzero(distribution(logits, alone)[0]).tolist() == [1, 3]


def test_top_p_of_one_keeps_tokens_that_rounding_would_lose():
    logits = np.array([[0.0, -20.0, -20.0, -21.0]], np.float32)
    assert (distribution(logits, SamplingParams(temperature=1.0)) > 0).all()


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-40, 1e-38, 1e-20, 1e20, 1e38, 1e300])
def test_extreme_temperatures_give_a_distribution(temperature):
    logits = np.array([[3.0, 5.0, -np.inf, 4.0]], np.float32)
    got = distribution(logits, SamplingParams(temperature=temperature))[0]
    expected = [0, 1, 0, 0] if temperature < 1 else [1 / 3, 1 / 3, 0, 1 / 3]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_masked_tokens_are_never_drawn():
    logits = np.full((64, VOCABULARY), -np.inf, np.float32)
    logits[:, [3, 50]] = [0.0, -2.0]
    rows = [SamplingParams(temperature=2.0, seed=seed) for seed in range(64)]
    assert set(draws(logits, rows, [0] * 64)) == {3, 50}


# What a draw depends on


def test_greedy_takes_the_lowest_id_of_the_largest_logit():
    logits = random_logits(4)
    logits[0, [9, 4, 70]] = 50.0
    logits[1, [2, 1]] = [0.0, -0.0]
    logits[1, 3:], logits[1, 0] = -1.0, -1.0
    expected = logits.argmax(axis=-1)
    assert expected[:2].tolist() == [4, 1]
    greedy = [SamplingParams(top_k=5, top_p=0.1, min_p=1.0, seed=row) for row in range(4)]
    np.testing.assert_array_equal(draws(logits, greedy, [0, 1, 2, 3]), expected)
    np.testing.assert_array_equal(distribution(logits, *greedy), np.eye(VOCABULARY)[expected])
    alone = sample(jnp.asarray(logits), Sampling.greedy(4), jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(alone, expected)


def test_greedy_rows_choose_alike_beside_a_row_that_draws():
    logits = random_logits(5)
    logits[:, 7] = logits[:, 90] = 40.0
    mixed = [SamplingParams()] * 4 + [SamplingParams(temperature=1.0)]
    np.testing.assert_array_equal(draws(logits, mixed, [0] * 5)[:4], [7] * 4)


def test_the_same_seed_and_position_draw_the_same_token():
    logits = np.tile(random_logits(1), (50, 1))
    rows = [SamplingParams(temperature=1.5, seed=seed) for seed in range(50)]
    first = draws(logits, rows, [11] * 50)
    np.testing.assert_array_equal(first, draws(logits, rows, [11] * 50))
    assert (first != draws(logits, rows, [12] * 50)).any()


def test_draws_do_not_change_from_one_release_to_the_next():
    logits = np.zeros((4, 1000), np.float32)
    rows = [SamplingParams(temperature=1.0, seed=seed) for seed in (0, 1, 2**32, 2**63)]
    assert draws(logits, rows, [0, 5, 5, 100]).tolist() == [282, 207, 571, 464]


def test_all_64_bits_of_a_seed_count():
    base = 0x0123456789ABCDEF
    seeds = [base] + [base ^ (1 << bit) for bit in range(64)]
    words = Sampling.of([SamplingParams(seed=seed) for seed in seeds]).seed
    numbers = np.asarray(uniform(words, np.zeros(65, np.int32)))
    assert len(set(numbers.tolist())) == 65


def test_seeds_count_modulo_two_to_the_64():
    seeds = [5, 5 + 2**64, -1, 2**64 - 1]
    words = Sampling.of([SamplingParams(seed=seed) for seed in seeds]).seed
    np.testing.assert_array_equal(words[0], [0, 5])
    np.testing.assert_array_equal(words[0], words[1])
    np.testing.assert_array_equal(words[2], words[3])


def test_salts_give_independent_numbers():
    words = Sampling.of([SamplingParams(seed=seed) for seed in range(2000)]).seed
    at = np.zeros(2000, np.int32)
    one, other = np.asarray(uniform(words, at, salt=0)), np.asarray(uniform(words, at, salt=1))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.1


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_a_row_is_bit_equal_alone_and_among_any_neighbours(rows):
    own_logits, own = random_logits(1, seed=9), SamplingParams(0.9, 40, 0.95, 0.02, seed=77)
    alone = distribution(own_logits, own)[0]
    alone_tokens = [draws(own_logits, [own], [at])[0] for at in range(4)]
    for place in {0, rows // 2, rows - 1}:
        logits = random_logits(rows, seed=rows + place, spread=10.0)
        logits[place] = own_logits[0]
        params = [SamplingParams(temperature=2.0, seed=5)] * rows
        params[place] = own
        np.testing.assert_array_equal(distribution(logits, *params)[place], alone)
        for at, token in enumerate(alone_tokens):
            positions = [at + 31] * rows
            positions[place] = at
            assert draws(logits, params, positions)[place] == token


def test_compiled_and_eager_draws_agree_and_values_do_not_recompile():
    traces = []

    @jax.jit
    def compiled(logits, sampling, positions):
        traces.append(None)
        return sample(logits, sampling, positions)

    logits = random_logits(8)
    for temperature in (0.0, 0.5, 1.0):
        rows = [SamplingParams(temperature, top_k=temperature > 0.7, seed=s) for s in range(8)]
        at = np.arange(8, dtype=np.int32)
        tokens = compiled(logits, Sampling.of(rows), at)
        np.testing.assert_array_equal(tokens, draws(logits, rows, at.tolist()))
    assert len(traces) == 1


# Frequencies


def test_uniform_numbers_fill_the_unit_interval_evenly():
    count = 20_000
    words = Sampling.of([SamplingParams(seed=3)] * count).seed
    numbers = np.asarray(uniform(words, np.arange(count, dtype=np.int32)))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    cells = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert chi_square(cells, np.full(20, count / 20)) < 52.4  # 19 degrees, p = 5e-5


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.6, seed=2),
        SamplingParams(temperature=1.0, top_k=5, seed=3),
        SamplingParams(temperature=1.5, top_p=0.9, min_p=0.05, seed=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("varying", ["positions", "seeds"])
def test_tokens_are_drawn_as_often_as_the_reference_says(params, varying):
    count, vocabulary = 20_000, 12
    logits = np.random.default_rng(8).normal(0, 1.2, vocabulary).astype(np.float32)
    expected = reference(logits.astype(np.float64), params) * count
    if varying == "seeds":
        rows = [SamplingParams(**{**vars(params), "seed": 1000 + s}) for s in range(count)]
        positions = np.full(count, 17, np.int32)
    else:
        rows, positions = [params] * count, np.arange(count, dtype=np.int32)
    tokens = sample(
        jnp.broadcast_to(logits, (count, vocabulary)), Sampling.of(rows), jnp.asarray(positions)
    )
    observed = np.bincount(np.asarray(tokens), minlength=vocabulary)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    assert possible.sum() > 2
    assert chi_square(observed[possible], expected[possible]) < 42.0  # 11 degrees, p = 2e-5


# Parameters


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number >= 0, not -0.1"),
        ({"temperature": float("nan")}, "temperature .* not nan"),
        ({"temperature": float("inf")}, "temperature .* not inf"),
        ({"top_k": -1}, "top_k must be >= 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], not 0.0"),
        ({"top_p": 1.5}, "top_p .* not 1.5"),
        ({"top_p": float("nan")}, "top_p .* not nan"),
        ({"min_p": -0.5}, r"min_p must lie in \[0, 1\], not -0.5"),
        ({"min_p": 1.01}, "min_p .* not 1.01"),
    ],
)
def test_parameters_out_of_range_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_the_stacked_parameters_have_the_documented_types():
    stacked = Sampling.of([SamplingParams(1.0, 2**40, 0.5, 0.1, seed=2**40 + 3)] * 3)
    assert [stacked.temperature.dtype, stacked.top_p.dtype, stacked.min_p.dtype] == [np.float32] * 3
    assert (stacked.top_k.dtype, stacked.seed.dtype) == (np.int32, np.uint32)
    assert stacked.top_k.tolist() == [2**31 - 1] * 3
    assert stacked.seed.tolist() == [[256, 3]] * 3
    assert Sampling.of([]).seed.shape == (0, 2)


# Candidates


@pytest.mark.parametrize("candidates", [20, 64])
def test_candidates_decide_as_the_whole_vocabulary_does(candidates):
    rows = [row for row in FILTERS if decided_by(Sampling.of([row]), candidates)]
    assert len(rows) >= 4
    logits = random_logits(len(rows))
    logits[:, 30:40] = logits[:, :1]  # equal ones
    order = np.argsort(-logits, axis=1, kind="stable")[:, :candidates]
    values = np.take_along_axis(logits, order, axis=1)
    for position in range(50):
        positions = jnp.full(len(rows), position)
        found = sample_candidates(values, jnp.asarray(order), Sampling.of(rows), positions)
        np.testing.assert_array_equal(found, draws(logits, rows, [position] * len(rows)))


@pytest.mark.parametrize(
    ("row", "decided"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=1.0, top_k=20), True),
        (SamplingParams(temperature=1.0, top_k=21), False),
        (SamplingParams(temperature=1.0), False),
        (SamplingParams(temperature=1.0, top_p=0.1), False),
    ],
    ids=str,
)
def test_candidates_decide_where_top_k_is_among_them(row, decided):
    greedy = SamplingParams(top_k=90)
    assert decided_by(Sampling.of([greedy, row]), 20) is decided
