"""``python -m vmem_pool MODULE:NAME [--plot FILE]`` prints a plan, or what a function plans."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vmem_pool.errors import PlanError
from vmem_pool.planner import Plan
from vmem_pool.plot import save_plot
from vmem_pool.report import print_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 1 if there is no plan to print."""
    parser = argparse.ArgumentParser(prog="python -m vmem_pool", description="Prints a VMEM plan.")
    parser.add_argument("plan", metavar="MODULE:NAME", help="a Plan, or a function that makes one")
    parser.add_argument("--plot", metavar="FILE", help="also draw it (.png, .svg or .pdf)")
    chosen = parser.parse_args(arguments)
    try:
        plan = _find(chosen.plan)
        print_plan(plan)
        if chosen.plot:
            save_plot(plan, chosen.plot)
    except (PlanError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _find(spec: str) -> Plan:
    module_name, _, name = spec.partition(":")
    if not name:
        raise PlanError(f"{spec!r} names no plan; write MODULE:NAME")
    found = getattr(importlib.import_module(module_name), name, None)
    planned = found() if callable(found) else found
    if not isinstance(planned, Plan):
        raise PlanError(f"{spec} is not a Plan and makes none")
    return planned


if __name__ == "__main__":
    sys.exit(main())
