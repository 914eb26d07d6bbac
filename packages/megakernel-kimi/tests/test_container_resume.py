"""A converter that is killed anywhere goes on to the same bytes."""

import hashlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kda_mla_kernels.checkpoint import open_checkpoint
from kda_mla_kernels.numerics import BF16
from megakernel_kimi.config import KimiConfig
from megakernel_kimi.container import Target, convert
from megakernel_kimi.layout import KimiLayout

HERE = Path(__file__).parent
write_mini = runpy.run_path(str(HERE / "mini_checkpoint.py"))["write"]
KILLS, RANKS = 20, 2


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mini") / "mini"
    write_mini(folder, experts=8)
    return folder


@pytest.fixture(scope="module")
def target(mini):
    config = KimiConfig.from_file(mini)
    return Target.of(KimiLayout.of(config, RANKS), BF16, "mxfp4")


@pytest.fixture(scope="module")
def whole(mini, target, tmp_path_factory):
    """What a conversion that nobody stops writes."""
    folder = tmp_path_factory.mktemp("whole")
    convert(open_checkpoint(mini), folder, target)
    return folder


def test_a_killed_conversion_goes_on_to_the_same_bytes(mini, whole, tmp_path):
    total = sum(path.stat().st_size for path in whole.glob("*.safetensors"))
    sizes = np.random.default_rng(7).uniform(0, total, KILLS).astype(int)
    program = [sys.executable, HERE / "killed_conversions.py", mini, tmp_path / "out", RANKS]
    done = subprocess.run(
        [*map(str, [*program, *sizes])], check=True, capture_output=True, text=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == KILLS
    expected = {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in whole.iterdir()}
    for size, result in zip(sizes, results):
        assert result["files"] == expected, f"killed after {size} bytes"
    halfway = [result for result in results if result["left"] and not result["finished"]]
    assert len(halfway) > KILLS / 2


def test_a_finished_conversion_is_left_alone(mini, target, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.glob("rank-*")}
    convert(open_checkpoint(mini), whole, target)
    assert {path: path.stat().st_mtime_ns for path in whole.glob("rank-*")} == before
