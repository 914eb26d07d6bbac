"""The TPU compiler takes the kernel at full size, with weights and state where they are.

Nothing here runs on a TPU, and no figure is a time. Every program is compiled on one of the two
lines of jax in the fast set, and on both with ``-m "slow or not slow"``.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from megakernel_qwen.config import QwenConfig
from megakernel_qwen.kernel.stream import stream_plan
from megakernel_qwen.layout import QwenLayout
from vmem_pool.aot import report

from ..family import bare

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]

PROGRAMS = Path(__file__).parent.parent / "compiled_programs.py"
HBM_BYTES = 96 << 30
NEWEST = jax.__version_info__ >= (0, 11)


@dataclass(frozen=True)
class Case:
    """A program and what it may read from HBM per step and rank."""

    name: str
    newest: bool
    """on which line the fast set compiles it"""
    size: str
    """of the published model"""
    ranks: int = 8
    steps: int = 1
    kernels: int = 2
    """the step and its commit"""
    most_weight_bytes: float = float("inf")


CASES = (
    Case("decode_27b_1_row", True, "27B", most_weight_bytes=6.46e9),
    Case("decode_27b_1_row_8_steps", False, "27B", steps=8),
    Case("decode_27b_8_rows", False, "27B"),
    Case("decode_27b_16_rows", True, "27B"),
    Case("decode_27b_2_ranks", True, "27B", ranks=2),
    Case("verify_27b_8_tokens", False, "27B", kernels=1),
    Case("decode_4b_8_ranks", False, "4B"),
    Case("decode_08b_1_rank", True, "0.8B", ranks=1),
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
    assert step.fits_overlay
    assert step.vmem_bytes <= step.vmem_limit_bytes
    assert not any(kernel.global_barrier for kernel in found.kernels)


def test_weights_and_state_stay_in_hbm_and_nothing_is_copied(compiled):
    _, found = compiled
    for kernel in found.kernels:
        large = [place for place in kernel.operands if "u8[" in place or ",128,128]" in place]
        assert large
        assert all(place.startswith("hbm") for place in large)
    assert found.memory["temp_size_in_bytes"] < 32 << 20


def test_a_step_reads_every_weight_once(compiled):
    """Of both kinds of layers the report counts the larger one in every layer, so at most."""
    case, found = compiled
    config = QwenConfig.from_json(bare(case.size))
    plan = stream_plan(QwenLayout(config, case.ranks), np.dtype(jnp.bfloat16))
    gates = 2 * len(config.linear_layers) * config.hidden_size * 16 * 2
    assert plan.bytes + gates <= case.most_weight_bytes
    assert plan.bytes < 1.03 * plan.payload_bytes
    slots = {site: runs for site, runs in found.inventory.counts.items() if is_slot(site)}
    least, most = (sum(site.bytes * runs[i] for site, runs in slots.items()) for i in range(2))
    assert least <= case.steps * plan.bytes <= most


def is_slot(site):
    return site.op == "dma_start" and site.shape.startswith("uint8")


@pytest.mark.skipif(NEWEST, reason="compiled on the other line; two minutes")
@pytest.mark.slow
def test_prefill_shares_the_weights_of_the_kernel():
    found = report(f"{PROGRAMS}:prefill_27b")
    memory = found.memory
    weights_and_state = memory["argument_size_in_bytes"]
    assert memory["alias_size_in_bytes"] > 0
    assert memory["temp_size_in_bytes"] < weights_and_state / 2  # no second copy of the weights
    assert weights_and_state + memory["temp_size_in_bytes"] < HBM_BYTES
