"""A picture of a simulated step: what the core does, exchanges, HBM, and how full the ring is."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

from benchmarks.accounting.idle import hbm_busy
from benchmarks.accounting.simulation import Simulated, Span

__all__ = ["ring_fill", "save_timeline"]

WIDTH_INCHES = 16


def save_timeline(
    run: Simulated, path: str | Path, title: str, window: tuple[float, float]
) -> None:
    """Draws the part of a step between two points in time, in us.

    Raises:
        ImportError: matplotlib is missing; the message says what to install.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the timeline needs matplotlib: pip install matplotlib") from error
    stages = sorted({span.what for span in run.work if _seen(span, window)})
    colours = dict(zip(stages, (colormaps["tab20"](n % 20) for n in range(len(stages)))))
    figure = Figure(figsize=(WIDTH_INCHES, 7), layout="constrained")
    core, ring = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for stage in stages:
        _bars(core, [s for s in run.work if s.what == stage], 3, window, colours[stage], stage)
    waits = [span for span in run.waits if span.what != "exchange"]
    _bars(core, waits, 2, window, "tab:red", "core waits for HBM")
    blocked = [span for span in run.waits if span.what == "exchange"]
    _bars(core, blocked, 2, window, "black", "core waits for an exchange")
    exchanges = [Span(e.first, e.arrival, "exchange") for e, _ in run.exchanges]
    _bars(core, exchanges, 1, window, "tab:purple", "exchange under way")
    _bars(core, hbm_busy(run), 0, window, "tab:green", "HBM busy")
    core.set_yticks(range(4), ["HBM", "exchanges", "waits", "core"])
    core.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    core.set_title(f"{title}: simulated, {window[0]:.0f} to {window[1]:.0f} us of {run.us:.0f} us")
    times, slots = ring_fill(run)
    ring.step(times, slots, where="post", color="tab:blue")
    ring.set_ylabel(f"slots loaded, of {run.program.ring[1]}")
    ring.set_xlabel("us")
    ring.set_xlim(*window)
    ring.set_ylim(0, run.program.ring[1] + 1)
    figure.savefig(path, dpi=110)


def ring_fill(run: Simulated) -> tuple[list[float], list[int]]:
    """How many loaded slots wait to be taken, after each point in time at which that changes."""
    loaded = sorted(t.end for t in run.transfers if t.kind == run.program.ring[0])
    taken = sorted(run.taken)
    times = sorted({*loaded, *taken})
    return times, [bisect_right(loaded, at) - bisect_right(taken, at) for at in times]


def _bars(
    axes: Any, spans: list[Span], level: int, window: tuple[float, float], colour: Any, label: str
) -> None:
    seen = [(span.start, span.end - span.start) for span in spans if _seen(span, window)]
    axes.broken_barh(seen, (level - 0.4, 0.8), facecolors=colour, label=label)


def _seen(span: Span, window: tuple[float, float]) -> bool:
    return span.end >= window[0] and span.start <= window[1]
