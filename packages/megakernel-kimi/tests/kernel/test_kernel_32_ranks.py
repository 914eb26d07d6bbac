"""The decode kernel on 32 interpreted ranks, in four hosts of eight as on a slice of sixteen chips.

The model has heads enough for 32 ranks, seeded weights, and two layers with every kind of sublayer.
A process of its own, since the number of devices is fixed when jax starts.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

RANKS, SECONDS = 32, 900
TESTS = Path(__file__).parents[1]
write_mini = runpy.run_path(str(TESTS / "mini_checkpoint.py"))["write"]


@pytest.mark.cpu32
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("holders", [1, 8, 32])
def test_32_ranks_compute_what_the_reference_does(tmp_path, holders):
    folder = tmp_path / "mini"
    heads = {"num_attention_heads": RANKS, "num_key_value_heads": RANKS, "kda_heads": RANKS}
    write_mini(folder, experts=16, moe_intermediate_size=32 * RANKS, **heads)
    subprocess.run(
        [sys.executable, str(TESTS / "many_ranks.py"), str(folder), str(RANKS), str(holders)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=SECONDS,
        check=True,
    )
    with np.load(folder / "results.npz") as results:
        expected = results["reference"]
        error = np.abs(results["kernel"] - expected)
    assert error.max() < 2e-4 * expected.std()
