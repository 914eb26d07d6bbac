"""Collectives go through the TPU compiler for slices that are not there.

One process per slice: some inputs make the compiler abort. Says nothing about a run on a TPU.
"""

import importlib.util
from pathlib import Path

import pytest
from tpu_collectives.testing import run_isolated

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]

CASES = str(Path(__file__).with_name("compile_cases.py"))


def compiles(function, **arguments):
    outcome = run_isolated(f"{CASES}:{function}", ranks=1, timeout_s=120, **arguments)
    assert outcome.status == "passed", outcome.output[-3000:]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tpu7x:2x2x1", [(1, 5120), (3, 200), (16, 5120)]),
        ("tpu7x:2x2x4", [(1, 7168), (16, 7168)]),
    ],
)
def test_every_collective_and_schedule_compiles(name, sizes):
    compiles("everything", name=name, sizes=sizes)


@pytest.mark.parametrize("name", ["v6e:2x4", "v5p:2x2x4", "tpu7x:2x4x4"])
def test_other_slices_compile_too(name):
    compiles("all_reduces", name=name, sizes=[(8, 4096)], wires=["bfloat16"])


def test_devices_that_are_not_there_cannot_be_timed():
    compiles("tuning", name="tpu7x:2x2x1")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 8, 16])
@pytest.mark.parametrize("name", ["tpu7x:2x2x1", "tpu7x:2x2x4"])
def test_blocks_of_more_rows_compile(name, rows):
    compiles("blocks", name=name, rows=rows)
