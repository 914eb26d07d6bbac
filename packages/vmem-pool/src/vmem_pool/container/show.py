"""Sizes of a container for people, also before it is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from vmem_pool.container.spec import Spec
from vmem_pool.container.writer import remaining_bytes

__all__ = ["print_dry_run", "print_spec"]


def print_dry_run(folder: str | Path, spec: Spec, console: Console | None = None) -> None:
    """Prints what writing would need, without writing anything."""
    out = console or Console()
    print_spec(spec, out)
    where = Path(folder)
    existing = next(parent for parent in (where, *where.resolve().parents) if parent.exists())
    missing, free = remaining_bytes(where, spec), shutil.disk_usage(existing).free
    enough = "enough" if missing <= free else "too little"
    out.print(f"still to write: {decimal(missing)}; free: {decimal(free)} ({enough})")


def print_spec(spec: Spec, console: Console | None = None) -> None:
    """Prints the table of tensors and the sizes."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in spec.mesh.items())
    table = Table(title=f"container for mesh {mesh}, {spec.quantisation}, {spec.config_hash}")
    for column in ("tensor", "dtype", "shape"):
        table.add_column(column)
    table.add_column("bytes of a rank", justify="right")
    for tensor in spec.tensors:
        shape = "x".join(map(str, tensor.shape))
        table.add_row(tensor.name, str(tensor.dtype), shape, f"{tensor.bytes:,}")
    table.caption = (
        f"{spec.num_ranks} files of {decimal(spec.file_bytes)}, {decimal(spec.total_bytes)} in all"
    )
    (console or Console()).print(table)
