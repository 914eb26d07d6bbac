"""The converter's memory does not grow with the number of experts. Linux counts it."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

write_mini = runpy.run_path(str(Path(__file__).parent / "mini_checkpoint.py"))["write"]
MEASURED = """
import re, sys
from megakernel_kimi.convert import main
assert main(sys.argv[1:]) == 0
status = open("/proc/self/status").read()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) << 10)
"""


def peak_bytes(folder, experts, wide, *options):
    """Most memory of a process that converts a checkpoint with so many experts."""
    checkpoint, out = folder / f"{experts}", folder / f"{experts}-converted"
    write_mini(checkpoint, experts, wide)
    command = [sys.executable, "-c", MEASURED, str(checkpoint), str(out), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("wide", "few", "ranks", "form", "allowed"),
    [
        (False, 256, 1, "mxfp4", 16 << 20),  # 768 experts more are 40 MB
        pytest.param(True, 16, 4, "mxfp4", 64 << 20, marks=pytest.mark.slow),  # 48 more, 840 MB
        pytest.param(True, 16, 4, "fp8", 64 << 20, marks=pytest.mark.slow),
    ],
)
def test_four_times_the_experts_need_no_more_memory(wide, few, ranks, form, allowed, tmp_path):
    peaks = [
        peak_bytes(tmp_path, experts, wide, "--ranks", str(ranks), "--form", form)
        for experts in (few, 4 * few)
    ]
    print(f"wide={wide} {form}: {few} experts {peaks[0]:,} bytes, {4 * few} {peaks[1]:,} bytes")
    assert abs(peaks[1] - peaks[0]) < allowed
