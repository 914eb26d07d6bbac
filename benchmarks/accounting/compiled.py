"""Compiles a case, follows its kernels' traces through the schedules, and names what they do."""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kda_mla_kernels.backend import RANKS, AbstractModel
from kda_mla_kernels.errors import ConfigError
from tpu_collectives import Topology
from vmem_pool.aot import (
    KernelReport,
    Options,
    Report,
    Segment,
    Trace,
    read_schedule,
    report,
    trace_events,
)
from vmem_pool.stream import StreamPlan

from benchmarks.accounting.cases import Case
from benchmarks.accounting.families import Family, KernelCase
from benchmarks.accounting.parts import SublayerNames
from benchmarks.accounting.program import Program, Step
from benchmarks.accounting.stages import StageNames, kind_of

__all__ = ["CompiledCase", "CompiledKernel", "compile_case"]

VMEM_OPERAND = re.compile(
    r"vmem \[shape: [a-z]+(\d+)\[([\d,]+)\], index: (\d+), kind: (input|output)"
)
ROOT = Path(__file__).resolve().parents[2]
TARGET = """\
import sys

sys.path.insert(0, {root!r})
from benchmarks.accounting.cases import Case


def build(topology):
    return {case!r}.programs()[{number}]
"""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as the simulation runs it, and what the compiler said of it."""

    program: Program
    trace: Trace
    report: KernelReport


@dataclass(frozen=True)
class CompiledCase:
    """The kernels of a case, step first."""

    case: Case
    model: AbstractModel
    kernels: tuple[CompiledKernel, ...]
    compile_seconds: float


def compile_case(case: Case) -> CompiledCase:
    """Compiles and traces at the same time.

    Raises:
        CompileError, TraceError, ScheduleError: as in :mod:`vmem_pool.aot`.
    """
    model, programs = case.model, case.programs()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        folders = [Path(folder) / str(number) for number in range(len(programs))]
        reports = [pool.submit(_compile, case, n, at) for n, at in enumerate(folders)]
        kernels = case.kernels(model)
        traces = [_trace(programs, kernel) for kernel in kernels]
        found = [
            _kernel(case, model, kernel, trace, _holding(kernel, reports, folders))
            for kernel, trace in zip(kernels, traces)
        ]
        seconds = sum(future.result().compile_seconds for future in reports)
    return CompiledCase(case, model, tuple(found), seconds)


def _compile(case: Case, number: int, folder: Path) -> Report:
    folder.mkdir()
    target = folder / "target.py"
    target.write_text(TARGET.format(root=str(ROOT), case=case, number=number))
    return report(f"{target}:build", case.topology, Options(keep=folder))


def _trace(programs: Iterable[tuple[object, tuple[object, ...]]], kernel: KernelCase) -> Trace:
    """The kernel in the first program that has it."""
    last = None
    for function, arguments in programs:
        try:
            return trace_events(
                function,  # type: ignore[arg-type]
                *arguments,
                kernel=kernel.name,
                axis_index={RANKS: 0},
                contents=kernel.contents,
            )
        except ValueError as error:
            if "no kernel is called" not in str(error):
                raise
            last = error
    raise last or ConfigError("a case has no programs")


def _holding(
    kernel: KernelCase, reports: Iterable[Future[Report]], folders: Iterable[Path]
) -> tuple[KernelReport, Path]:
    """The report on a kernel, and where its schedule is."""
    for future, folder in zip(reports, folders):
        for found in future.result().kernels:
            if found.name.startswith(kernel.name):
                return found, folder
    raise ConfigError(f"the compiler made no kernel {kernel.name}")


def _kernel(
    case: Case,
    model: AbstractModel,
    kernel: KernelCase,
    trace: Trace,
    compiled: tuple[KernelReport, Path],
) -> CompiledKernel:
    found, folder = compiled
    moved = _operands_in_vmem(found)
    trace = _without_copies(trace, [*moved["input"], *moved["output"]])
    segments = read_schedule(folder, kernel.name, trace.trips).follow(trace.events)
    first = trace.arguments - len(kernel.scratch)
    chip = Topology.from_name(case.topology).group(0, "chip")
    sibling = tuple(((RANKS, rank),) for rank in chip if rank)
    stream = case.of_family.stream(model, case.block)
    names = _Names(case.of_family, stream, dict(enumerate(kernel.scratch, first)))
    return CompiledKernel(
        Program(
            name=trace.kernel,
            steps=tuple(names.steps(trace, segments)),
            copied_in=trace.copied_in + moved["input"].total(),
            copied_out=trace.copied_out + moved["output"].total(),
            sibling=sibling[0] if sibling else None,
            ring=("weights", stream.depth),
        ),
        trace,
        found,
    )


def _operands_in_vmem(report: KernelReport) -> dict[str, Counter[int]]:
    """Bytes of what the kernel wants in HBM and XLA puts into VMEM, by number of the argument."""
    found: dict[str, Counter[int]] = {"input": Counter(), "output": Counter()}
    for operand in report.operands:
        if placed := VMEM_OPERAND.match(operand):
            bits, shape, number, kind = int(placed[1]), placed[2], int(placed[3]), placed[4]
            found[kind][number] = math.prod(map(int, shape.split(","))) * bits // 8
    return found


def _without_copies(trace: Trace, moved: Iterable[int]) -> Trace:
    """The compiler makes vector copies out of transfers inside VMEM; their work is compiled."""
    inside = frozenset(moved)
    events = [
        event if inside.isdisjoint(event.ends) else event._replace(route="vmem->vmem")
        for event in trace.events
        if not (event.op == "dma_start" and not inside.isdisjoint(event.ends))
    ]
    return replace(trace, events=tuple(events))


class _Names:
    """Gives stages, kinds and sublayers to what a kernel does.

    Args:
        stream: of the step.
        scratch: names of the kernel's arguments, as far as they are scratch.
    """

    def __init__(self, family: Family, stream: StreamPlan, scratch: Mapping[int, str]) -> None:
        self.family, self.scratch = family, scratch
        self.stages = StageNames(stream, family)
        self.sublayers = SublayerNames(stream, "before the layers")

    def steps(self, trace: Trace, segments: Iterable[Segment]) -> Iterable[Step]:
        """One for each event, and one for what follows the last."""
        for segment, event in zip(segments, (*trace.events, None)):
            stages, sublayer, kind = self.stages.of(segment), self.sublayers.now, ""
            if event is not None:
                number = event.semaphore.argument
                name = "" if number is None else self.scratch[number]
                kind = kind_of(name, self.family)
                self.stages.follow(event, kind)
                self.sublayers.follow(event, kind)
            yield Step(segment.cycles, stages, event, kind, sublayer)
