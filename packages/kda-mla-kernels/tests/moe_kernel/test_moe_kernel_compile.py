"""The stage at a rank's size, compiled for TPU v7; cycles are the compiler's."""

import importlib.util
from pathlib import Path

import pytest
from vmem_pool import aot

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]

TARGETS = Path(__file__).with_name("moe_kernel_targets.py")
HBM_CYCLES = 380
"""In which the share of one expert arrives: 552,960 bytes."""


@pytest.mark.parametrize(
    ("target", "rows"),
    [
        ("rank_1_mxfp4_16", 1),
        ("rank_8_mxfp4_4", 8),
        pytest.param("rank_1_fp8_16", 1, marks=pytest.mark.slow),
        pytest.param("rank_16_mxfp4_4", 16, marks=pytest.mark.slow),
    ],
)
def test_a_chunk_of_experts_takes_hardly_longer_than_its_load(target, rows):
    found = aot.report(f"{TARGETS}:{target}")
    (kernel,) = found.kernels
    assert kernel.vmem_bytes < 24 << 20
    layer = kernel.root.children[0]
    if rows == 1:
        selection_and_more = 6000
        assert layer.cycles[1] - selection_and_more < 16 * HBM_CYCLES
    else:  # loops that start loads and wait for them turn once for each expert
        (chunk,) = (loop for loop in layer.children if loop.children)
        each = sum(loop.cycles[1] for loop in chunk.children)
        assert chunk.cycles[1] - each + 4 * each < 1.03 * 4 * HBM_CYCLES
    assert found.memory["temp_size_in_bytes"] == 0
