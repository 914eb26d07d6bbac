"""A picture of a plan: offset against phase, one box per buffer. Needs the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vmem_pool.buffers import ReceiveArea
from vmem_pool.errors import PlanError
from vmem_pool.planner import Plan

__all__ = ["save_plot"]

MIB = 1 << 20
FORMATS = frozenset({".png", ".svg", ".pdf"})


def save_plot(plan: Plan, path: str | Path) -> None:
    """Draws the plan into a PNG, SVG or PDF file, by the path's suffix.

    Raises:
        PlanError: another suffix.
        ImportError: matplotlib is missing; the message says what to install.
    """
    target = Path(path)
    if target.suffix not in FORMATS:
        raise PlanError(f"cannot draw {target.name}; the suffix must be .png, .svg or .pdf")
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'vmem-pool[plot]'") from error
    colours = colormaps["tab20"]
    figure = Figure(figsize=(max(6.0, 0.5 * len(plan.phases) + 3), 6), layout="constrained")
    axes = figure.subplots()
    for number, buffer in enumerate(plan.buffers):
        at, height = plan.offsets[buffer.name] / MIB, buffer.bytes / MIB
        hatch = "//" if isinstance(buffer, ReceiveArea) else None
        for first, count in _runs(buffer, len(plan.phases)):
            bar = axes.bar(
                first + (count - 1) / 2,
                height,
                width=count,
                bottom=at,
                color=colours(number % colours.N),
                edgecolor="black",
                linewidth=0.5,
                hatch=hatch,
            )
            axes.bar_label(bar, labels=[buffer.name], label_type="center", fontsize=7)
    axes.axhline(plan.size_bytes / MIB, color="black", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(plan.phases)), plan.phases, rotation=90)
    axes.set_xlim(-0.5, len(plan.phases) - 0.5)
    axes.set_ylabel("offset, MiB")
    axes.set_title(f"{plan.size_bytes / MIB:.2f} of {plan.budget_bytes / MIB:.2f} MiB")
    figure.savefig(target)


def _runs(buffer: Any, num_phases: int) -> list[tuple[int, int]]:
    """Stretches of phases in which the buffer lives, as (first, count)."""
    runs: list[tuple[int, int]] = []
    for phase in range(num_phases):
        if not buffer.lives_in(phase):
            continue
        if runs and sum(runs[-1]) == phase:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((phase, 1))
    return runs
