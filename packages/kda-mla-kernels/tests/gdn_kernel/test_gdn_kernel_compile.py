"""The stage and its commit at real sizes, compiled for TPU v7; cycles are the compiler's."""

import importlib.util
from functools import cache
from pathlib import Path

import pytest
from tpu_collectives.testing import run_isolated
from vmem_pool import aot

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]

TARGETS = Path(__file__).with_name("gdn_kernel_targets.py")
MIB = 1 << 20


@cache
def compiled(target):
    found = aot.report(f"{TARGETS}:{target}")
    (kernel,) = found.kernels
    assert kernel.warnings == ()
    return found, kernel


def copied(target):
    """Shapes that a compiled program copies outside of its kernels."""
    outcome = run_isolated(f"{TARGETS}:print_copies", 1, timeout_s=120, target=target)
    assert outcome.status == "passed", outcome.output[-3000:]
    (line,) = [line for line in outcome.output.splitlines() if line.startswith("copied:")]
    return line.split()[1:]


# All compiled with jax 0.10.2 and 0.12.0.1: at most 2,143 and 2,1xx.
@pytest.mark.parametrize(("size", "tokens"), [("1_1", 1), ("16_1", 16), ("2_4", 8)])
def test_a_token_of_all_heads_on_one_core_takes_at_most_2480_cycles(size, tokens):
    _, kernel = compiled(f"rule_core_{size}")
    layers = kernel.root.children[0]
    assert layers.trips == 3
    assert layers.cycles[1] <= 2480 * tokens


@pytest.mark.parametrize("size", ["1_1", "8_1", "16_1"])
def test_the_stage_compiles_at_a_ranks_size(size):
    found, kernel = compiled(f"stage_rank_{size}")
    assert kernel.vmem_bytes < 4 * MIB
    assert kernel.spills < 1000
    assert kernel.code_bundles < 1500
    assert found.memory["temp_size_in_bytes"] == 0
