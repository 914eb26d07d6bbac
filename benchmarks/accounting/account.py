"""The account of one case: bytes, phases and cycles as traced and compiled, times as simulated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vmem_pool.aot.machine import OVERLAY_BUNDLES

from benchmarks.accounting.compiled import CompiledCase, CompiledKernel
from benchmarks.accounting.idle import hbm_idle_us
from benchmarks.accounting.machine import CYCLES_PER_US, HBM_BYTES_PER_US
from benchmarks.accounting.parts import Part, parts_of
from benchmarks.accounting.phases import exchanges_of
from benchmarks.accounting.simulation import Simulated, simulate

__all__ = ["Account", "account"]

STATIC_KINDS = ("weights", "gates", "vectors", "embedding")
EXCHANGES = "exchanges"
"""The stage of the core's own work for exchanges."""


@dataclass(frozen=True)
class Account:
    """One step of one rank, with its commit.

    Attributes:
        title: the case.
        max_static_bytes: what static bytes should not exceed.
        static_bytes: weights that the step reads: the stream, the gates' projections, the vectors.
        stream_bytes: of these, the stream's.
        routed_bytes: experts; see the family for how many are assumed.
        state_bytes, cache_bytes: recurrent states and key/value caches, read and written.
        held_state_bytes, held_cache_bytes: what all rows of the rank take in HBM.
        record_bytes: what the step leaves for the commit, written and read.
        phases: off-chip exchanges that the step waits for.
        phases_per_layer: of these, in the loop over layers.
        cycles: of the core by stage, as compiled.
        parts: of the step, by the kind of their sublayers.
        core_us: all of them.
        floor_us: all bytes of HBM at the sustained bandwidth.
        step_us: simulated, of the step kernel and of its commit.
        fair_us: the same if HBM gives transfers in flight equal shares.
        waited_us: simulated, by what the core waits for.
        idle_us: of HBM in the step, simulated, by what the core does meanwhile.
        ring_bytes: of the ring in VMEM.
        code_bundles, vmem_bytes: of the step kernel, as compiled.
        compile_seconds: of all programs.
        simulated: the step and the commit.
    """

    title: str
    rows: int
    max_static_bytes: float
    static_bytes: int
    stream_bytes: int
    routed_bytes: int
    state_bytes: int
    cache_bytes: int
    held_state_bytes: int
    held_cache_bytes: int
    record_bytes: int
    phases: int
    phases_per_layer: float
    cycles: Counter[str]
    parts: dict[str, Part]
    core_us: float
    floor_us: float
    step_us: tuple[float, ...]
    fair_us: tuple[float, ...]
    waited_us: Counter[str]
    idle_us: Counter[str]
    ring_bytes: int
    code_bundles: int
    vmem_bytes: int
    compile_seconds: float
    simulated: tuple[Simulated, ...]

    @property
    def total_us(self) -> float:
        """Step and commit, launches excluded."""
        return sum(self.step_us)

    @property
    def floor_share(self) -> float:
        """How near the prediction is to the floor."""
        return self.floor_us / self.total_us

    @property
    def fits_overlay(self) -> bool:
        """Whether the step's code stays in the instruction memory."""
        return self.code_bundles <= OVERLAY_BUNDLES

    @property
    def product_cycles(self) -> int:
        """Of products with streamed matrices."""
        return sum(n for stage, n in self.cycles.items() if stage.startswith("product "))

    @property
    def exchange_cycles(self) -> int:
        """Of the core's own work for exchanges: packing, sends, sums."""
        return self.cycles[EXCHANGES]

    def to_json(self) -> dict[str, Any]:
        """Figures only."""
        plain = {name: value for name, value in vars(self).items() if name != "simulated"}
        plain["parts"] = {name: vars(part) for name, part in self.parts.items()}
        return plain | {"total_us": self.total_us, "floor_share": self.floor_share}


def account(compiled: CompiledCase) -> Account:
    """Simulates a compiled case and adds up."""
    kernels, step = compiled.kernels, compiled.kernels[0]
    runs = tuple(simulate(kernel.program) for kernel in kernels)
    fair = tuple(simulate(kernel.program, fair=True) for kernel in kernels)
    moved: Counter[str] = sum((run.bytes for run in runs), Counter())
    static = sum(moved[kind] for kind in STATIC_KINDS) + step.trace.copied_in
    cycles: Counter[str] = sum((run.cycles for run in runs), Counter())
    family = compiled.case.of_family
    state, cache = family.held(compiled.model)
    ring = family.stream(compiled.model, compiled.case.block)
    return Account(
        title=compiled.case.title,
        rows=compiled.case.sequences * compiled.case.tokens,
        max_static_bytes=family.max_static_bytes,
        static_bytes=static,
        stream_bytes=moved["weights"],
        routed_bytes=moved["routed"],
        state_bytes=moved["state"],
        cache_bytes=moved["cache"],
        held_state_bytes=_held(state),
        held_cache_bytes=_held(cache),
        record_bytes=moved["records"],
        phases=off_chip_phases(step),
        phases_per_layer=_in_layers(step) / family.layers(compiled.model),
        cycles=cycles,
        parts=parts_of(runs[0]),
        core_us=sum(cycles.values()) / CYCLES_PER_US,
        floor_us=sum(moved.values()) / HBM_BYTES_PER_US,
        step_us=tuple(run.us for run in runs),
        fair_us=tuple(run.us for run in fair),
        waited_us=sum((run.waited_us for run in runs), Counter()),
        idle_us=hbm_idle_us(runs[0]),
        ring_bytes=ring.ring_bytes,
        code_bundles=step.report.code_bundles,
        vmem_bytes=step.report.vmem_bytes,
        compile_seconds=compiled.compile_seconds,
        simulated=runs,
    )


def _held(shapes: Iterable[Any]) -> int:
    """Bytes of one rank; the leading axis of each array is that of the ranks."""
    return sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in shapes)


def off_chip_phases(kernel: CompiledKernel) -> int:
    """Exchanges with other chips that a kernel waits for, its entry barrier included."""
    found = exchanges_of(kernel.trace.events, kernel.program.sibling)
    return sum(not exchange.sibling for exchange in found)


def _in_layers(kernel: CompiledKernel) -> int:
    """Phases after the stream's first slot was taken and before its head."""
    events: Sequence[Any] = [step.event for step in kernel.program.steps]
    kinds = [step.kind for step in kernel.program.steps]
    taken = [n for n, kind in enumerate(kinds) if kind == "weights" and events[n].op == "dma_wait"]
    head = next(
        n
        for n, step in enumerate(kernel.program.steps)
        if any(stage.startswith("product head") for stage in step.stages)
    )
    inside = [event for event in events[taken[0] : head] if event is not None]
    found = exchanges_of(inside, kernel.program.sibling)
    return sum(not exchange.sibling for exchange in found)
