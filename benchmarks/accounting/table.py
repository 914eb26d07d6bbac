"""The account for people. Every figure says whether it is traced, compiled or simulated."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.accounting.account import Account
from benchmarks.accounting.machine import MAX_STATIC_BYTES
from benchmarks.accounting.reference.check import Check

__all__ = ["print_accounts"]

PIPED_WIDTH = 150


def print_accounts(
    accounts: Sequence[Account], checks: Sequence[Check], out: Console | None = None
) -> None:
    """Prints all tables."""
    console = out or Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(_figures(accounts, checks))
    console.print(_cycles(accounts))
    for check in checks:
        console.print(check.sentence)
    console.print(
        "Nothing here ran on a TPU. Not in any prediction: launches of kernels, latency of a local"
        " transfer, skew between ranks, XLA operations between kernels."
    )


def _figures(accounts: Sequence[Account], checks: Sequence[Check]) -> Table:
    table = Table(title="one rank, one step with its commit")
    table.add_column("figure")
    table.add_column("how")
    for found in accounts:
        table.add_column(found.title, justify="right")

    def row(name: str, how: str, values: Sequence[str]) -> None:
        table.add_row(name, how, *values)

    row("static bytes", "traced", [_static(a) for a in accounts])
    row("  of these the weight stream", "traced", [_giga(a.stream_bytes) for a in accounts])
    row("state bytes moved", "traced", [_mega(a.state_bytes) for a in accounts])
    row("cache bytes moved", "traced", [_mega(a.cache_bytes) for a in accounts])
    row("state held in HBM", "planned", [_mega(a.held_state_bytes) for a in accounts])
    row("cache held in HBM", "planned", [_mega(a.held_cache_bytes) for a in accounts])
    row("record bytes moved", "traced", [_mega(a.record_bytes) for a in accounts])
    row("off-chip phases", "traced", [str(a.phases) for a in accounts])
    row("  per layer", "traced", [f"{a.phases_per_layer:.2f}" for a in accounts])
    row("core, waits excluded", "compiled", [_us(a.core_us) for a in accounts])
    row("code bundles of the step", "compiled", [_code(a) for a in accounts])
    row("VMEM of the step", "compiled", [f"{a.vmem_bytes / 2**20:.1f} MiB" for a in accounts])
    row("floor: all bytes of HBM", "traced", [_us(a.floor_us) for a in accounts])
    table.add_section()
    waits = sorted({name for a in accounts for name in a.waited_us})
    for name in waits:
        row(f"waiting for {name}", "simulated", [_us(a.waited_us[name]) for a in accounts])
    trust = "predicted; model " + ", ".join(f"{check.error:+.0%}" for check in checks)
    row("step", trust, [_us(a.step_us[0]) for a in accounts])
    row("commit", trust, [_us(sum(a.step_us[1:])) for a in accounts])
    row("step and commit", trust, [f"{a.total_us / 1e3:.3f} ms" for a in accounts])
    row("  if HBM shares fairly", trust, [f"{sum(a.fair_us) / 1e3:.3f} ms" for a in accounts])
    row("floor / prediction", trust, [f"{a.floor_share:.1%}" for a in accounts])
    return table


def _cycles(accounts: Sequence[Account]) -> Table:
    table = Table(title="cycles of the core by stage, compiled, waits excluded")
    table.add_column("stage")
    for found in accounts:
        table.add_column(found.title, justify="right")
    total = sum((found.cycles for found in accounts[1:]), accounts[0].cycles.copy())
    for stage, _ in total.most_common():
        table.add_row(stage, *(f"{found.cycles[stage]:,}" for found in accounts))
    table.add_section()
    table.add_row("all", *(f"{sum(found.cycles.values()):,}" for found in accounts))
    return table


def _static(found: Account) -> str:
    mark = "" if found.static_bytes <= MAX_STATIC_BYTES else " (over 6.46)"
    return _giga(found.static_bytes) + mark


def _code(found: Account) -> str:
    return f"{found.code_bundles:,}" + ("" if found.fits_overlay else " (beyond one overlay)")


def _giga(bytes_: int) -> str:
    return f"{bytes_ / 1e9:.3f} GB"


def _mega(bytes_: int) -> str:
    return f"{bytes_ / 1e6:.1f} MB"


def _us(us: float) -> str:
    return f"{us:,.1f} us"
