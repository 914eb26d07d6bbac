"""A planned stream for people."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from vmem_pool.stream.plan import StreamPlan

__all__ = ["print_stream"]

MIB = 1 << 20


def print_stream(plan: StreamPlan, console: Console | None = None) -> None:
    """Prints how each matrix is cut, and what slots, padding and the ring cost."""
    table = Table(title=f"stream of {plan.num_slots} slots of {plan.slot_bytes / MIB:.3f} MiB")
    for column in ("segment", "matrix", "dtype", "shape", "tiles"):
        table.add_column(column)
    table.add_column("slots", justify="right")
    times = Counter(plan.order)
    for name, segment in plan.segments.items():
        for matrix in segment.matrices:
            tiles = segment.of(matrix.name)
            shapes = Counter("x".join(map(str, tile.shape)) for tile in tiles)
            cut = ", ".join(f"{count} of {shape}" for shape, count in shapes.items())
            shape = "x".join(map(str, matrix.shape))
            slots = f"{tiles[0].slot}..{tiles[-1].slot}"
            where = f"{name} (x{times[name]})"
            table.add_row(where, matrix.name, str(matrix.dtype), shape, cut, slots)
    padding = plan.bytes / plan.payload_bytes - 1
    enough = "enough" if plan.saturates_hbm else "too little"
    table.caption = (
        f"{plan.bytes / MIB:.1f} MiB a step, {padding:.2%} of it padding; ring of {plan.depth}"
        f" slots with {plan.ring_bytes / MIB:.1f} MiB, {enough} to keep a TPU v7's HBM busy"
    )
    (console or Console()).print(table)
