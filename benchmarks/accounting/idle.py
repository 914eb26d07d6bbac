"""What the core does while HBM has nothing to do."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

from benchmarks.accounting.simulation import Simulated, Span

__all__ = ["hbm_busy", "hbm_idle_us"]


def hbm_busy(run: Simulated) -> list[Span]:
    """Stretches in which HBM moves something."""
    busy: list[Span] = []
    free = 0.0
    for transfer in run.transfers:
        start = max(transfer.start, free)
        if busy and start <= busy[-1].end + 1e-9:
            busy[-1] = Span(busy[-1].start, max(busy[-1].end, transfer.end), "hbm")
        else:
            busy.append(Span(start, transfer.end, "hbm"))
        free = busy[-1].end
    return busy


def hbm_idle_us(run: Simulated) -> Counter[str]:
    """Idle time of HBM by the stage that the core is in, or by what it waits for."""
    busy = hbm_busy(run)
    starts = [span.start for span in busy]
    idle: Counter[str] = Counter()
    for spans, form in ((run.work, "{}"), (run.waits, "waiting for {}")):
        for span in spans:
            moved = 0.0
            for other in busy[max(0, bisect_right(starts, span.start) - 1) :]:
                if other.start >= span.end:
                    break
                moved += max(0.0, min(span.end, other.end) - max(span.start, other.start))
            idle[form.format(span.what)] += span.end - span.start - moved  # type: ignore[assignment]
    return idle
