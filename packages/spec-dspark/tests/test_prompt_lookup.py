"""The drafter without weights."""

import numpy as np
import pytest
from kda_mla_kernels.sampling import Sampling
from spec_dspark import Drafter, PromptLookup
from spec_dspark.prompt_lookup import find_continuation


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1]),
        ([1, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2]),  # the latest place
        ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], [5, 8, 1]),  # a longer run beats a later place
        ([3, 3, 3, 3], [3]),  # the run may overlap itself; only one token stands after it
        ([1, 2, 3], []),
        ([4, 1, 4], []),  # a run of one is too short
        ([1], []),
    ],
)
def test_the_latest_place_of_the_longest_run_is_continued(tokens, expected):
    assert find_continuation(tokens, longest=4, shortest=2, num_drafts=3) == expected


def test_random_text_is_continued_as_a_plain_search_does():
    random = np.random.default_rng(1)
    for _ in range(200):
        tokens = random.integers(0, 4, random.integers(1, 40)).tolist()
        expected = []
        for length in (3, 2, 1):
            places = [
                at
                for at in range(len(tokens) - length)
                if tokens[at : at + length] == tokens[len(tokens) - length :]
            ]
            if places:
                start = places[-1] + length
                expected = tokens[start : start + 5]
                break
        assert find_continuation(tokens, longest=3, shortest=1, num_drafts=5) == expected


def test_rows_are_looked_up_in_their_own_past_until_they_are_reset():
    drafter = PromptLookup(max_drafts=3)
    drafter.extend(0, [1, 2, 3, 1], None)
    drafter.extend(1, [1, 2, 9], None)
    drafter.extend(1, [9, 1], None)
    sampling = Sampling.greedy(2)
    assert drafter.propose([1, 0], [2, 2], sampling, 3).tokens.tolist() == [[9, 9, 1], [3, 1, 2]]
    drafter.reset(0)
    got = drafter.propose([0, 1], [2, 2], sampling, 2)
    assert got.tokens.tolist() == [[-1, -1], [9, 9]]
    assert got.probabilities is None


def test_it_keeps_the_drafter_protocol():
    assert isinstance(PromptLookup(), Drafter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_drafts": 0}, "max_drafts must be at least 1, not 0"),
        ({"longest": 2, "shortest": 3}, "runs of 3 to 2 tokens cannot be looked up"),
        ({"shortest": 0}, "runs of 0 to 4 tokens"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PromptLookup(**options)
