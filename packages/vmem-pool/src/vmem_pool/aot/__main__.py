"""``python -m vmem_pool.aot FILE.py:build`` prints what the TPU compiler makes of a kernel."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from vmem_pool.aot.report import CompileError, Options, Report, report
from vmem_pool.aot.show import print_report

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 1 if the target does not compile."""
    parser = argparse.ArgumentParser(
        prog="python -m vmem_pool.aot",
        description="Compiles a Pallas kernel for a TPU that is not there, and reports on it.",
    )
    parser.add_argument("target", help="FILE.py:build or package.module:build")
    parser.add_argument("--topology", default="tpu7x:2x2x1", help="default: %(default)s")
    parser.add_argument("--trips", type=_counts, default={}, metavar="L0=8,...")
    parser.add_argument("--axis", type=_counts, default={}, metavar="tp=0,...")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the compiler's dumps there")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    chosen = parser.parse_args(arguments)
    options = Options(trips=chosen.trips, axis_index=chosen.axis, keep=chosen.keep)
    try:
        found = report(chosen.target, chosen.topology, options)
    except (CompileError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(_plain(found)))
    else:
        print_report(found)
    return 0


def _counts(text: str) -> dict[str, int]:
    try:
        return {name: int(n) for name, n in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=NUMBER,...") from None


def _plain(found: Report) -> dict[str, Any]:
    plain = dataclasses.asdict(dataclasses.replace(found, inventory=None))  # type: ignore[arg-type]
    return plain | {"inventory": found.inventory.to_json()}


if __name__ == "__main__":
    sys.exit(main())
