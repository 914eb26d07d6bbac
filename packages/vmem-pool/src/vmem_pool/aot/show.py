"""A report for people."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from vmem_pool.aot.inventory import Inventory
from vmem_pool.aot.kernels import KernelReport
from vmem_pool.aot.loops import OPERATIONS, SLOTS, Loop
from vmem_pool.aot.machine import CLOCK_GHZ, OVERLAY_BUNDLES
from vmem_pool.aot.report import Report

__all__ = ["print_report"]

MIB = 1 << 20
SHOWN = 12
"""Kinds of VMEM allocations listed, largest first."""
PIPED_WIDTH = 160


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints everything; cycles are the compiler's schedule, without any wait."""
    out = console or Console(highlight=False, markup=False, soft_wrap=True)
    if not out.is_terminal:
        out.width = PIPED_WIDTH
    barriers = [kernel.name for kernel in report.kernels if kernel.global_barrier]
    out.print(
        f"compiled for {report.topology} in {report.compile_seconds:.2f} s:"
        f" {report.custom_calls} kernel calls, {report.copies} copies outside of them,"
        f" whole-mesh barrier in {', '.join(barriers) or 'none'}"
    )
    out.print(f"HBM floor of the transfers: {report.hbm_floor_cycles:.0f} cycles")
    for kernel in report.kernels:
        _print_kernel(kernel, out)
    out.print(_inventory(report.inventory))


def _print_kernel(kernel: KernelReport, out: Console) -> None:
    low, high = kernel.cycles
    fits = "inside" if kernel.fits_overlay else "beyond"
    out.print(
        f"\n{kernel.name}: {low}..{high} cycles (at most {high / CLOCK_GHZ / 1e3:.2f} us at"
        f" {CLOCK_GHZ} GHz, waits excluded)"
    )
    out.print(
        f"  {kernel.code_bundles} bundles of code, {fits} one overlay of about {OVERLAY_BUNDLES};"
        f" {kernel.spills} spills and fills"
    )
    out.print(
        f"  VMEM {kernel.vmem_bytes / MIB:.2f} of {kernel.vmem_limit_bytes / MIB:.2f} MiB,"
        f" SMEM {kernel.smem_bytes} bytes"
    )
    together = Counter(name for _, name in kernel.vmem_allocations)
    sizes: Counter[str] = Counter()
    for size, allocation in kernel.vmem_allocations:
        sizes[allocation] += size
    for name, total in sizes.most_common(SHOWN):
        out.print(f"  vmem {total / MIB:8.3f} MiB  {name[:80]} x{together[name]}")
    for operand in kernel.operands:
        out.print(f"  operand {operand}")
    for dma, count in Counter(kernel.dmas).items():
        way = "remote" if dma.remote else "local"
        moved = "bytes known while running" if dma.bytes is None else f"{dma.bytes} bytes"
        out.print(f"  {way} dma x{count} in the text: {dma.kind}, {moved}, {dma.loop} {dma.source}")
    if kernel.unknown_trips:
        out.print(f"  loops of unknown length, counted once: {', '.join(kernel.unknown_trips)}")
    for warning in kernel.warnings:
        out.print(f"  warning: {warning}")
    out.print(_loops(kernel.root, kernel, 1))


def _loops(loop: Loop, kernel: KernelReport, runs: int, into: Tree | None = None) -> Tree:
    trips = "?" if loop.trips is None else loop.trips
    used = [f"{k} {loop.own[k]} ({_share(loop, k, kernel)}%)" for k in SLOTS if loop.own[k]]
    used += [f"{k} {loop.own[k]}" for k in OPERATIONS if loop.own[k]]
    low, high = loop.cycles
    label = (
        f"{loop.name} {loop.source} x{trips} (entered {runs} times): {low}..{high}"
        f" cycles an iteration, own {loop.bundles}: {', '.join(used)}"
    )
    node = Tree(label) if into is None else into.add(label)
    inner = runs * (1 if loop.trips is None else loop.trips)
    for child in loop.children:
        _loops(child, kernel, inner, node)
    return node


def _share(loop: Loop, slot: str, kernel: KernelReport) -> int:
    return 100 * loop.own[slot] // max(1, loop.bundles * kernel.capacity[slot])


def _inventory(inventory: Inventory) -> Table:
    table = Table(title="transfers and semaphores, from the jaxpr")
    for name in ("operation", "runs", "bytes each", "route", "shape", "source", "where"):
        table.add_column(name, overflow="fold")
    for site, (low, high) in sorted(inventory.counts.items()):
        runs = str(low) if low == high else f"{low}..{high}"
        table.add_row(
            site.op, runs, str(site.bytes), site.route, site.shape, site.source, site.nest
        )
    if inventory.unknown:
        table.caption = f"loops of unknown length: {', '.join(sorted(inventory.unknown))}"
    return table
