"""The account for people. Every figure says whether it is traced, compiled or simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.accounting.account import Account
from benchmarks.accounting.machine import CYCLES_PER_US
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
    console.print(_parts(accounts))
    console.print(_cycles(accounts))
    console.print(_idle(accounts))
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
    if any(a.routed_bytes for a in accounts):
        row("routed experts' bytes", "assumed", [_giga(a.routed_bytes) for a in accounts])
    row("state bytes moved", "traced", [_mega(a.state_bytes) for a in accounts])
    row("cache bytes moved", "traced", [_mega(a.cache_bytes) for a in accounts])
    row("state held in HBM", "planned", [_mega(a.held_state_bytes) for a in accounts])
    row("cache held in HBM", "planned", [_mega(a.held_cache_bytes) for a in accounts])
    row("record bytes moved", "traced", [_mega(a.record_bytes) for a in accounts])
    row("off-chip phases", "traced", [str(a.phases) for a in accounts])
    row("  per layer", "traced", [f"{a.phases_per_layer:.2f}" for a in accounts])
    row("core, waits excluded", "compiled", [_us(a.core_us) for a in accounts])
    row("  streamed products", "compiled", [_cycles_us(a.product_cycles) for a in accounts])
    row("  work for exchanges", "compiled", [_cycles_us(a.exchange_cycles) for a in accounts])
    row("code bundles of the step", "compiled", [_code(a) for a in accounts])
    row("VMEM of the step", "compiled", [f"{a.vmem_bytes / 2**20:.1f} MiB" for a in accounts])
    row("  of it the ring", "planned", [f"{a.ring_bytes / 2**20:.1f} MiB" for a in accounts])
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


def _parts(accounts: Sequence[Account]) -> Table:
    """One sublayer of each kind, on average."""
    table = Table(
        title="one sublayer: off-chip phases (traced), core in us (compiled), in all us (predicted)"
    )
    table.add_column("kind")
    table.add_column("number", justify="right")
    for found in accounts:
        table.add_column(found.title, justify="right")
    kinds = {kind: part.count for found in accounts for kind, part in found.parts.items()}
    for kind, count in kinds.items():
        cells = []
        for part in (found.parts[kind] for found in accounts):
            core, whole = part.cycles / CYCLES_PER_US / count, part.us / count
            cells.append(f"{part.phases / count:.3g} / {core:.2f} / {whole:.2f}")
        table.add_row(kind, str(count), *cells)
    return table


def _idle(accounts: Sequence[Account]) -> Table:
    """The reasons, largest first, as far as they take a microsecond of some step."""
    table = Table(title="us in which HBM is idle, by what the core does meanwhile, simulated")
    table.add_column("core")
    for found in accounts:
        table.add_column(found.title, justify="right")
    total: Counter[str] = sum((found.idle_us for found in accounts), Counter())
    for what, us in total.most_common():
        if us >= 1:
            table.add_row(what, *(_us(found.idle_us[what]) for found in accounts))
    table.add_section()
    table.add_row("all", *(_us(sum(found.idle_us.values())) for found in accounts))
    return table


def _cycles(accounts: Sequence[Account]) -> Table:
    table = Table(title="cycles of the core by stage, compiled, waits excluded")
    table.add_column("stage")
    for found in accounts:
        table.add_column(found.title, justify="right")
    total: Counter[str] = sum((found.cycles for found in accounts), Counter())
    for stage, _ in total.most_common():
        table.add_row(stage, *(f"{found.cycles[stage]:,}" for found in accounts))
    table.add_section()
    table.add_row("all", *(f"{sum(found.cycles.values()):,}" for found in accounts))
    return table


def _static(found: Account) -> str:
    most = found.max_static_bytes
    mark = "" if found.static_bytes <= most else f" (over {most / 1e9:.2f})"
    return _giga(found.static_bytes) + mark


def _code(found: Account) -> str:
    return f"{found.code_bundles:,}" + ("" if found.fits_overlay else " (beyond one overlay)")


def _giga(bytes_: int) -> str:
    return f"{bytes_ / 1e9:.3f} GB"


def _mega(bytes_: int) -> str:
    return f"{bytes_ / 1e6:.1f} MB"


def _cycles_us(cycles: int) -> str:
    return _us(cycles / CYCLES_PER_US)


def _us(us: float) -> str:
    return f"{us:,.1f} us"
