"""The examples of the README run as they stand, on CPU, and print what their comments say."""

import re
from pathlib import Path

import pytest
from tpu_collectives.testing import run_isolated

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def run_examples():
    """Execute all blocks in one namespace."""
    exec("\n".join(BLOCKS), {})


def promised():
    """The comments behind ``print`` calls, without remarks after a colon."""
    comments = re.findall(r"^ *print\(.*\)  # (.+)$", "\n".join(BLOCKS), re.MULTILINE)
    return [comment.partition(":")[0] for comment in comments]


@pytest.fixture(scope="module")
def printed():
    outcome = run_isolated(f"{Path(__file__)}:run_examples", ranks=8, timeout_s=120)
    assert outcome.status == "passed", outcome.output
    return outcome.output.splitlines()


def test_the_examples_print_what_their_comments_say(printed):
    assert len(promised()) == 6
    assert printed[-len(promised()) :] == promised()
