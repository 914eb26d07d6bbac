"""The TPU compiler takes the kernel of the published model on 32 ranks, with weights and state
where they are.

Nothing here runs on a TPU, and no figure is a time.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
from kda_mla_kernels.block import Block
from kda_mla_kernels.numerics import BF16
from megakernel_kimi.kernel.plan import KernelModel, StepPlan
from megakernel_kimi.kernel.refs import planned_stream
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.presets import kimi_k3
from tpu_collectives import Topology
from vmem_pool.aot import report

PROGRAMS = Path(__file__).parent.parent / "kernel_programs.py"
SLICE = "tpu7x:2x2x4"
CONTEXT = 32768
SLOTS = "32768", "131072"
"""Of a rank: 32 K positions, or a million over 32; a million over 8."""
MIB = 1 << 20

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


@dataclass(frozen=True)
class Case:
    """A program of ``kernel_programs.py`` and the block of its step."""

    name: str
    sequences: int
    tokens: int = 1
    kernels: int = 2
    """the step and its commit"""
    slow: bool = False


CASES = (
    Case("decode_1_row", 1),
    Case("decode_1_row_8_steps", 1, slow=True),
    Case("decode_8_rows", 8),
    Case("decode_16_rows", 16),
    Case("verify_8_tokens", 1, tokens=8, kernels=1, slow=True),
    Case("decode_8_rows_of_a_million_on_8_holders", 8, slow=True),
    Case("decode_8_rows_of_a_million_on_32_holders", 8, slow=True),
    Case("verify_8_tokens_of_a_million_on_8_holders", 1, tokens=8, kernels=1, slow=True),
)


def cases():
    for case in CASES:
        yield pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else [])


@pytest.fixture(scope="module", params=cases())
def compiled(request):
    case = request.param
    return case, report(f"{PROGRAMS}:{case.name}", topology=SLICE)


def step_of(found):
    (step,) = [kernel for kernel in found.kernels if kernel.name.startswith("kimi_step")]
    return step


@pytest.mark.tpu_compile
@needs_libtpu
def test_it_compiles_in_a_minute_into_one_kernel_for_the_step_and_one_for_the_commit(compiled):
    case, found = compiled
    assert found.custom_calls == case.kernels
    assert found.compile_seconds < 60
    step = step_of(found)
    assert step.vmem_bytes <= step.vmem_limit_bytes
    assert not any(kernel.global_barrier for kernel in found.kernels)


@pytest.mark.tpu_compile
@needs_libtpu
def test_weights_and_state_stay_in_hbm_and_nothing_is_copied(compiled):
    _, found = compiled
    for kernel in found.kernels:
        assert kernel.operands
        large = [
            place for place in kernel.operands if "u8[" in place or any(map(place.count, SLOTS))
        ]
        assert large
        assert all(place.startswith("hbm") for place in large)
    assert found.memory["temp_size_in_bytes"] < 32 * MIB


def plan(sequences, tokens=1, form="mxfp4"):
    topology = Topology.from_name(SLICE)
    layout = KimiLayout.of(kimi_k3(), topology.ranks, lanes=topology.ranks // topology.hosts)
    model = KernelModel(layout, BF16, topology, CONTEXT, form=form)
    return StepPlan(model, Block(sequences, tokens))


def test_a_rank_reads_few_bytes_for_one_row():
    model = plan(1).model
    config = model.layout.config
    assert model.stream.bytes <= 4.95e9
    assert model.stream.bytes < 1.06 * model.stream.payload_bytes
    assert model.layout.expert_tp == model.layout.ranks  # every rank reads of every chosen expert
    routes = config.num_experts_per_token * len(config.moe_layers)
    assert model.expert_shape.bytes * routes <= 0.85e9


@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
@pytest.mark.parametrize(
    ("sequences", "tokens", "mebibytes"),
    [(1, 1, 24), (8, 1, 24), (1, 8, 24), (16, 1, 16)],
    ids=["1 row", "8 rows", "8 tokens of 1 row", "16 rows"],
)
def test_the_ring_keeps_hbm_busy_beside_everything_else_in_vmem(sequences, tokens, mebibytes, form):
    assert planned_stream(plan(sequences, tokens, form)).ring_bytes >= mebibytes * MIB
