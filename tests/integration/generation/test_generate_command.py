"""``megakernel generate`` on one and several devices, against decoding by hand."""

from pathlib import Path

import pytest

PROMPT, COUNT = "def add(a, b):", 12


@pytest.fixture(scope="module")
def by_hand(python_in, tmp_path_factory):
    script = Path(__file__).with_name("decode_by_hand.py")
    return python_in(tmp_path_factory.mktemp("by-hand"), script, PROMPT, COUNT).stdout


@pytest.mark.parametrize("devices", [1, 4])
def test_greedy_text_is_that_of_decoding_by_hand(devices, megakernel, by_hand):
    flags = ["--max-tokens", COUNT, "--temperature", 0, "--devices", devices]
    done = megakernel("generate", PROMPT, *flags)
    assert done.stdout == by_hand + "\n"
    assert len(by_hand) > len(PROMPT) + COUNT
    assert f"{COUNT} tokens in" in done.stderr


def test_a_seed_makes_sampling_repeatable(megakernel, by_hand):
    flags = ["--max-tokens", COUNT, "--temperature", 1, "--seed", 5]
    texts = [megakernel("generate", *flags, stdin=PROMPT).stdout for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith(PROMPT)
    assert texts[0] != by_hand + "\n"


def test_ranks_that_do_not_fit_are_refused_with_those_that_do(megakernel):
    done = megakernel("generate", PROMPT, "--devices", 3, code=1)
    assert done.stderr.startswith("megakernel: error: 3 ranks do not fit this model")
    assert "use one of 1, 2, 4, 8" in done.stderr
