"""The TPU compiler takes the kernel at full size, with weights and state where they are.

Nothing here runs on a TPU, and no figure is a time. Every program is compiled on one of the two
lines of jax in the fast set, and on both with ``-m "slow or not slow"``.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from vmem_pool.aot import report

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]

PROGRAMS = Path(__file__).parent / "compiled_programs.py"
HBM_BYTES = 96 << 30
NEWEST = jax.__version_info__ >= (0, 11)


@dataclass(frozen=True)
class Case:
    """A program and what it may read from HBM per step and rank."""

    name: str
    newest: bool
    """on which line the fast set compiles it"""
    weight_bytes: float = float("inf")
    kernels: int = 2
    """the step and its commit"""


CASES = (
    Case("decode_27b_1_row", True, 6.46e9),
    Case("decode_27b_1_row_8_steps", False),
    Case("decode_27b_8_rows", False),
    Case("decode_27b_16_rows", True),
    Case("verify_27b_8_tokens", False, kernels=1),
    Case("decode_4b_8_ranks", False),
    Case("decode_08b_1_rank", True),
)


def cases():
    for case in CASES:
        marks = [pytest.mark.slow] if case.newest != NEWEST else []
        yield pytest.param(case, id=case.name, marks=marks)


@pytest.fixture(scope="module", params=cases())
def compiled(request):
    case = request.param
    return case, report(f"{PROGRAMS}:{case.name}")


def test_it_compiles_in_a_minute_into_one_kernel_for_the_step(compiled):
    case, found = compiled
    assert found.custom_calls == case.kernels
    assert found.compile_seconds < 60
    (step,) = [kernel for kernel in found.kernels if kernel.name.startswith("qwen_step")]
    assert step.code_bundles <= 60_000
    assert step.vmem_bytes <= step.vmem_limit_bytes
    assert not any(kernel.global_barrier for kernel in found.kernels)


def test_weights_and_state_stay_in_hbm_and_nothing_is_copied(compiled):
    case, found = compiled
    for kernel in found.kernels:
        large = [place for place in kernel.operands if "u8[" in place or ",32768" in place]
        assert large
        assert all(place.startswith("hbm") for place in large)
    state = found.memory["alias_size_in_bytes"]
    assert state > 0 or case.kernels == 1  # a verify step only reads
    assert found.memory["temp_size_in_bytes"] < 32 << 20


def test_the_stream_is_deep_and_reads_no_more_than_the_weights(compiled):
    case, found = compiled
    slots = [site for site in found.inventory.counts if site.shape.startswith("uint8")]
    assert slots
    read = sum(
        site.bytes * runs[1]
        for site, runs in found.inventory.counts.items()
        if site.op == "dma_start" and site.shape.startswith("uint8")
    )
    assert 0 < read <= case.weight_bytes


@pytest.mark.skipif(NEWEST, reason="compiled on the other line; two minutes")
@pytest.mark.slow
def test_prefill_shares_the_weights_of_the_kernel():
    found = report(f"{PROGRAMS}:prefill_27b")
    memory = found.memory
    weights_and_state = memory["argument_size_in_bytes"]
    assert memory["alias_size_in_bytes"] > 0
    assert memory["temp_size_in_bytes"] < weights_and_state / 2  # no second copy of the weights
    assert weights_and_state + memory["temp_size_in_bytes"] < HBM_BYTES
