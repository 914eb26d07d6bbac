"""A plan for people: a table with a lifeline per buffer, and bytes per phase."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from vmem_pool.buffers import ReceiveArea
from vmem_pool.planner import Plan

__all__ = ["print_plan", "table", "text"]

LIVE, DEAD = "█", "·"
BARS = "▁▂▃▄▅▆▇█"


def table(plan: Plan) -> Table:
    """Buffers by offset, one lifeline character per phase; the bytes that live in each below."""
    live, most = plan.live_bytes, max(plan.bound_bytes, 1)
    bars = "".join(BARS[round(size / most * (len(BARS) - 1))] for size in live)
    found = Table(title=_title(plan), caption=_caption(plan), show_footer=True)
    found.add_column("buffer", "live", no_wrap=True)
    found.add_column("shape")
    found.add_column("dtype")
    found.add_column("offset", justify="right")
    found.add_column("KiB", justify="right")
    found.add_column("phases", bars, no_wrap=True)
    for buffer in sorted(plan.buffers, key=lambda b: (plan.offsets[b.name], b.name)):
        lifeline = "".join(
            LIVE if buffer.lives_in(phase) else DEAD for phase in range(len(plan.phases))
        )
        remote = " (remote)" if isinstance(buffer, ReceiveArea) else ""
        found.add_row(
            buffer.name + remote,
            "x".join(map(str, buffer.shape)),
            str(buffer.dtype),
            str(plan.offsets[buffer.name]),
            f"{buffer.bytes / 1024:.0f}",
            lifeline,
        )
    return found


def text(plan: Plan, width: int = 120) -> str:
    """The table as plain text, ``width`` characters wide at most."""
    written = StringIO()
    Console(width=width, color_system=None, file=written).print(table(plan))
    return written.getvalue()


def print_plan(plan: Plan) -> None:
    """Prints the table to the terminal."""
    Console().print(table(plan))


def _title(plan: Plan) -> str:
    mib = 1 << 20
    gaps = plan.size_bytes / max(plan.bound_bytes, 1) - 1
    unshared = sum(buffer.bytes for buffer in plan.buffers)
    return (
        f"pool of {plan.size_bytes / mib:.2f} MiB in a budget of {plan.budget_bytes / mib:.2f}"
        f" ({unshared / mib:.2f} without sharing, gaps {gaps:.1%})"
    )


def _caption(plan: Plan) -> str:
    phase, live = plan.peak_phase, plan.bound_bytes / 1024
    return f"fullest is phase {phase} ({plan.phases[phase]}): {live:.0f} KiB live"
