"""The TPU compiler takes the XLA programs of the published model for 32 ranks.

Nothing here runs on a TPU, and no figure is a time. Minutes each: not in the fast set.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from megakernel_kimi.presets import kimi_k3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]

PROGRAMS = Path(__file__).parent / "compiled_programs.py"
HBM_BYTES = 96 << 30
ROWS, CONTEXT, RANKS = 8, 32768, 32


def state_bytes(config):
    """Latents of every position on each rank; recurrent states and tails of its heads."""
    latents = len(config.mla_layers) * CONTEXT * config.mla_cache_width * 2
    heads, dim = config.kda_heads // RANKS, config.kda_head_dim
    head = dim * dim * 4 + 4 * 3 * dim * 2  # tails of 3 inputs take 4 rows
    return ROWS * (latents + len(config.kda_layers) * heads * head)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_program_fits_beside_weights_and_state(name):
    command = [sys.executable, str(PROGRAMS), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    memory = json.loads(done.stdout.splitlines()[-1])
    assert memory["argument"] + memory["temp"] < HBM_BYTES
    assert memory["alias"] == pytest.approx(state_bytes(kimi_k3()), rel=0.01)
