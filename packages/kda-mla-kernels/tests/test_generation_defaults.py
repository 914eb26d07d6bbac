"""``generation_config.json``: what it may say, and what is refused before a model is loaded."""

import pytest
from kda_mla_kernels.errors import CheckpointError
from kda_mla_kernels.model import GenerationDefaults


def test_no_file_is_greedy_with_the_given_stop_ids():
    found = GenerationDefaults.from_json(None, frozenset({7}))
    assert (found.temperature, found.top_p, found.stop_ids) == (0.0, 1.0, {7})


def test_values_and_stop_ids_are_taken_and_null_means_unset():
    found = GenerationDefaults.from_json(
        {"temperature": 0.6, "top_p": None, "top_k": 20, "eos_token_id": [3, 4]}, frozenset({4, 5})
    )
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 1.0, 20)
    assert found.stop_ids == {3, 4, 5}


def test_do_sample_decides_over_the_temperature():
    given = {"temperature": 0.6, "do_sample": False}
    assert GenerationDefaults.from_json(given).temperature == 0.0
    assert GenerationDefaults.from_json({"do_sample": True}).temperature == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must hold an object"),
        ({"temperature": -1}, "temperature must be a number >= 0"),
        ({"temperature": float("nan")}, "temperature must be a number >= 0"),
        ({"temperature": "warm"}, "temperature 'warm' must be a number"),
        ({"top_k": 1.5}, "top_k 1.5 must be a number"),
        ({"top_k": -1}, "top_k must be >= 0"),
        ({"top_p": 0}, "top_p must lie in"),
        ({"min_p": 2}, "min_p must lie in"),
        ({"do_sample": "no"}, "do_sample 'no' must be a boolean"),
        ({"eos_token_id": ["a"]}, "must be an id or a list of ids"),
    ],
)
def test_a_wrong_value_is_named(given, message):
    with pytest.raises(CheckpointError, match=message):
        GenerationDefaults.from_json(given)
