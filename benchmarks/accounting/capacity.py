"""``python -m benchmarks.accounting.capacity``: what weights, state and caches take in HBM.

Sizes follow from shapes alone: nothing is compiled, and no device is needed but its topology.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vmem_pool.aot.report import ENVIRONMENT

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)  # before jax looks for devices

import jax  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.accounting.cases import Case  # noqa: E402
from benchmarks.accounting.families import FAMILIES  # noqa: E402

__all__ = ["HBM_BYTES", "Held", "held_bytes", "main"]

HBM_BYTES = 96 << 30
"""Of one core of a TPU v7."""
CONTEXTS = tuple(4096 << n for n in range(9))
ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Held:
    """Bytes of one rank.

    Attributes:
        weights: of the kernel, experts included.
        state: recurrent states and convolution tails of all rows.
        cache: of all positions of all rows.
    """

    weights: int
    state: int
    cache: int

    @property
    def all(self) -> int:
        """Together."""
        return self.weights + self.state + self.cache

    @property
    def fits(self) -> bool:
        """Whether HBM holds it, with nothing left for temporaries."""
        return self.all <= HBM_BYTES


def held_bytes(case: Case) -> Held:
    """What the programs of a case keep in HBM between steps."""
    model = case.model
    state, cache = case.of_family.held(model)
    ranks = model.programs.mesh.size
    weights = jax.tree.leaves(model.weight_shapes)
    return Held(_bytes(weights), _bytes(state) // ranks, _bytes(cache) // ranks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accounting.capacity",
        description="Prints the GiB that one rank needs in HBM, by context and rows.",
    )
    parser.add_argument("--model", choices=FAMILIES, default="kimi-k3")
    parser.add_argument("--experts", choices=["mxfp4", "fp8"], default="mxfp4", help="container")
    parser.add_argument("--holders", type=int, default=1, help="ranks that share cached positions")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    chosen = parser.parse_args(arguments)
    console = Console(highlight=False)
    console.print(_table(chosen))
    return 0


def _table(chosen: argparse.Namespace) -> Table:
    name, rows = chosen.model, chosen.rows

    def held(row_count: int, context: int) -> Held:
        case = Case(
            sequences=row_count,
            tokens=1,
            position=0,
            accepted=1,
            context=context,
            topology=FAMILIES[name].topology,
            config={},
            family=name,
            form=chosen.experts,
            holders=chosen.holders,
        )
        return held_bytes(case)

    first = held(rows[0], chosen.contexts[0])
    table = Table(
        title=f"{name}, {chosen.experts}: GiB of one rank, planned; weights"
        f" {_gibi(first.weights)}, state {first.state / rows[0] / 2**20:.1f} MiB a row;"
        " (over) 96 GiB do not hold it"
    )
    table.add_column("context", justify="right")
    for count in rows:
        table.add_column(f"{count} rows" if count > 1 else "1 row", justify="right")
    for context in chosen.contexts:
        cells = [held(count, context) for count in rows]
        table.add_row(
            f"{context:,}", *(_gibi(x.all) + ("" if x.fits else " (over)") for x in cells)
        )
    return table


def _gibi(bytes_: int) -> str:
    return f"{bytes_ / 2**30:.1f}"


def _bytes(shapes: Sequence[Any]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes)


if __name__ == "__main__":
    sys.exit(main())
