"""``python -m benchmarks.accounting``: what a step reads, waits for and should take."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vmem_pool.aot.report import ENVIRONMENT

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)  # before jax looks for devices

from rich.console import Console  # noqa: E402
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: E402

from benchmarks.accounting.account import Account, account  # noqa: E402
from benchmarks.accounting.cases import Case  # noqa: E402
from benchmarks.accounting.compiled import compile_case  # noqa: E402
from benchmarks.accounting.families import FAMILIES  # noqa: E402
from benchmarks.accounting.reference.check import Check, check_all  # noqa: E402
from benchmarks.accounting.table import print_accounts  # noqa: E402
from benchmarks.accounting.timeline import save_timeline  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    chosen = _parser().parse_args(arguments)
    config = json.loads(Path(chosen.config).read_text()) if chosen.config else {}
    checks = check_all()
    accounts = _accounts(_cases(chosen, config))
    if chosen.json:
        print(json.dumps(_plain(accounts, checks), indent=1))
    else:
        print_accounts(accounts, checks)
    if chosen.png:
        _draw(accounts, Path(chosen.png))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accounting",
        description="Compiles a decode kernel for a TPU that is not there and predicts its step."
        " Nothing is measured.",
    )
    parser.add_argument("--model", choices=FAMILIES, default="qwen-27b")
    parser.add_argument("--experts", choices=["mxfp4", "fp8"], default="mxfp4", help="container")
    parser.add_argument("--holders", type=int, default=1, help="ranks that share cached positions")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16], help="decode steps")
    parser.add_argument("--verify", type=int, nargs="*", default=[8], help="tokens to verify")
    parser.add_argument("--position", type=int, default=2048, help="keys that each row attends to")
    parser.add_argument("--accepted", type=int, default=6, help="tokens a verify step commits")
    parser.add_argument("--context", type=int, default=32768, help="size of the cache")
    parser.add_argument("--topology", help="default: one that the published model is run on")
    parser.add_argument("--config", help="config.json of another model of the family")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--png", metavar="FOLDER", help="draw a timeline of each step there")
    return parser


def _cases(chosen: argparse.Namespace, config: dict[str, Any]) -> list[Case]:
    def case(sequences: int, tokens: int, accepted: int) -> Case:
        return Case(
            sequences=sequences,
            tokens=tokens,
            position=chosen.position,
            accepted=accepted,
            context=chosen.context,
            topology=chosen.topology or FAMILIES[chosen.model].topology,
            config=config,
            family=chosen.model,
            form=chosen.experts,
            holders=chosen.holders,
        )

    decode = [case(rows, 1, 1) for rows in chosen.rows]
    return decode + [case(1, n, min(n, chosen.accepted)) for n in chosen.verify]


def _accounts(cases: Sequence[Case]) -> list[Account]:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    found = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for case in cases:
            task = progress.add_task(f"compile and simulate: {case.title}", total=1)
            found.append(account(compile_case(case)))
            progress.update(task, completed=1)
    return found


def _plain(accounts: Sequence[Account], checks: Sequence[Check]) -> dict[str, Any]:
    return {
        "accounts": [found.to_json() for found in accounts],
        "reference": [vars(check) | {"error": check.error} for check in checks],
    }


def _draw(accounts: Sequence[Account], folder: Path) -> None:
    """The whole step, and a group of four layers in its middle."""
    folder.mkdir(parents=True, exist_ok=True)
    for found in accounts:
        name = found.title.replace(" ", "_")
        step = found.simulated[0]
        save_timeline(step, folder / f"{name}.png", found.title, (0.0, step.us))
        middle = step.us / 2
        window = (middle, middle + step.us / 16)
        save_timeline(step, folder / f"{name}_four_layers.png", found.title, window)


if __name__ == "__main__":
    sys.exit(main())
