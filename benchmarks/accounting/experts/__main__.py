"""``python -m benchmarks.accounting.experts``: splits, containers and chunks side by side."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vmem_pool.aot.report import ENVIRONMENT

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)  # before jax looks for devices

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from vmem_pool.aot import KernelReport, report  # noqa: E402

from benchmarks.accounting.experts.busiest import busiest_share  # noqa: E402
from benchmarks.accounting.experts.stage import RANKS, Choice  # noqa: E402
from benchmarks.accounting.machine import CYCLES_PER_US, HBM_BYTES_PER_US  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
TARGET = """\
import sys

sys.path.insert(0, {root!r})
from benchmarks.accounting.experts.stage import Choice


def build(topology):
    return {choice!r}.program(topology)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accounting.experts",
        description="Compiles the stage of routed experts for a TPU that is not there.",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--expert-tp", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--form", choices=["mxfp4", "fp8"], nargs="+", default=["mxfp4", "fp8"])
    parser.add_argument("--chunk", type=int, nargs="+", default=[4, 8])
    chosen = parser.parse_args(arguments)
    console = Console(highlight=False, width=150)
    table = Table(title="routed experts of Kimi K3, one layer of one rank of 32")
    for title in HEADINGS:
        table.add_column(title, justify="right")
    every = itertools.product(chosen.rows, chosen.expert_tp, chosen.form, chosen.chunk)
    for choice in dict.fromkeys(Choice.of(*values) for values in every):
        table.add_row(*_cells(choice, _compiled(choice)))
    console.print(table)
    return 0


HEADINGS = (
    "rows",
    "expert_tp",
    "form",
    "chunk",
    "experts held (counted)",
    "MB an expert (counted)",
    "busiest rank reads (assumed)",
    "HBM us",
    "core us (compiled)",
    "VMEM MiB (compiled)",
    "bundles (compiled)",
)


def _compiled(choice: Choice) -> KernelReport:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target.py"
        target.write_text(TARGET.format(root=str(ROOT), choice=choice))
        (kernel,) = report(f"{target}:build").kernels
    return kernel


def _cells(choice: Choice, kernel: KernelReport) -> list[str]:
    shape, config = choice.shape, choice.layout.config
    groups = RANKS // choice.expert_tp
    read = busiest_share(groups, config.num_experts_per_token, config.num_experts, choice.rows)
    moved = read * shape.bytes
    layer = kernel.root.children[0]
    return [
        str(choice.rows),
        str(choice.expert_tp),
        choice.form,
        str(choice.stage.schedule.places),
        str(shape.experts),
        f"{shape.bytes / 1e6:.3f}",
        f"{read:.1f} = {moved / 1e6:.1f} MB",
        f"{moved / HBM_BYTES_PER_US:.2f}",
        f"{_cycles(choice, kernel, read) / CYCLES_PER_US:.2f}",
        f"{kernel.vmem_bytes / 2**20:.1f}",
        f"{layer.end - layer.start:,}",
    ]


def _cycles(choice: Choice, kernel: KernelReport, read: float) -> float:
    """Of one layer that reads so many experts; how often its loops turn is not in the schedule."""
    layer = kernel.root.children[0]
    unknown = [loop for loop in layer.children if loop.trips is None]
    chunks = [loop for loop in unknown if loop.children]
    if not chunks:  # a single row's experts, whose code is straight
        return layer.cycles[1]
    (chunk,) = chunks
    each = sum(loop.cycles[1] for loop in chunk.children)  # to start a load, and to wait for it
    turns = choice.stage.schedule.entries // choice.stage.schedule.places - 1
    straight = layer.cycles[1] - sum(loop.cycles[1] for loop in unknown)
    return straight + turns * (chunk.cycles[1] - each) + read * each


if __name__ == "__main__":
    sys.exit(main())
