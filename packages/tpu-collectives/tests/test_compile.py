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


@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "width"), [(1, 5120), (8, 5120), (3, 200)])
def test_an_all_reduce_of_one_host_compiles(rows, width, wire):
    compiles("all_reduce", name="tpu7x:2x2x1", rows=rows, width=width, wire=wire, schedules=[0, 1])
