"""Reads the compiler's dumps of each Pallas kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmem_pool.aot.loops import (
    OPERATIONS,
    SLOTS,
    Branches,
    Loop,
    count_cycles,
    loop_tree,
    source_of,
)
from vmem_pool.aot.machine import OVERLAY_BUNDLES

__all__ = ["DmaSite", "Dumps", "KernelReport", "find_dumps", "read_kernels", "split_bundles"]

GRANULE_BYTES = 32
"""Unit of a transfer's size in the dumps."""
OPERATION = re.compile(r"(?:\{ |;;  )((?:%\w+(?: = |.*? = ))?[a-z][\w.]+)")
BUNDLE = re.compile(r"^(?= *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? *:)", re.M)
DMA = re.compile(r"(?:\{ |;;  )%\w+ = dma\.(?!done)(\w+)(.*?)(?=;;  |\}|$)", re.S)
ALLOCATION = re.compile(r"space=(\w+), size = (\w+)(?:, offset = (\w+))?, scoped, tag = '([^']*)")


@dataclass(frozen=True)
class DmaSite:
    """A transfer in the program text; ``bytes`` is None if only known while running."""

    kind: str
    remote: bool
    bytes: int | None
    loop: str
    source: str


@dataclass(frozen=True)
class KernelReport:
    """What the compiler made of one Pallas kernel. Waits are in none of its numbers.

    Attributes:
        name: as in the compiled program.
        root: the kernel as a loop of one trip; its ``cycles`` are the kernel's.
        scheduled_bundles: length of the schedule, gaps included.
        code_bundles: bundles of the program, 64 bytes each, without gaps.
        vmem_bytes, vmem_limit_bytes: scoped VMEM, spills included, and what it may be.
        smem_bytes: scoped SMEM.
        vmem_allocations: (bytes, name), largest first.
        operands: where each stands, "hbm [shape ..." or "vmem [shape ...".
        spills: spills to VMEM and fills from it, in the text.
        dmas: transfers in the text.
        capacity: what a bundle can do, by slot.
        global_barrier: the compiler put a barrier over the whole mesh at the kernel's entry.
        warnings: what in the dumps could not be understood.
    """

    name: str
    root: Loop
    scheduled_bundles: int
    code_bundles: int
    vmem_bytes: int
    vmem_limit_bytes: int
    smem_bytes: int
    vmem_allocations: tuple[tuple[int, str], ...]
    operands: tuple[str, ...]
    spills: int
    dmas: tuple[DmaSite, ...]
    capacity: Mapping[str, int]
    global_barrier: bool
    warnings: tuple[str, ...]

    @property
    def cycles(self) -> tuple[int, int]:
        """Shortest and longest path; conditions make the difference."""
        return self.root.cycles

    @property
    def unknown_trips(self) -> tuple[str, ...]:
        """Loops that are counted once because their length is not known."""
        return tuple(loop.name for loop in self.root.walk() if loop.trips is None)

    @property
    def fits_overlay(self) -> bool:
        """Whether the code stays inside the instruction memory."""
        return self.code_bundles <= OVERLAY_BUNDLES


@dataclass(frozen=True)
class Dumps:
    """Texts of one kernel."""

    name: str
    schedule: str
    utilisation: str
    allocations: str
    analysis: str
    vmem: Mapping[str, Any]


def read_kernels(folder: Path, trips: Mapping[str, int]) -> tuple[KernelReport, ...]:
    """All Pallas kernels that were dumped into a folder."""
    return tuple(_kernel(dumps, trips) for dumps in find_dumps(folder))


def find_dumps(folder: Path) -> Iterator[Dumps]:
    """The texts of all Pallas kernels in a folder of dumps."""
    vmem: dict[str, Any] = {}
    for page in folder.glob("*vmem_report.html"):
        data = re.search(r"const DATA = (\{.*?\n\});", page.read_text(errors="replace"), re.S)
        vmem.update(json.loads(data[1])["hlo_breakdowns"] if data else {})
    for path in sorted(folder.glob("*-packed-bundles-post-ra.txt")):
        named = re.fullmatch(r"(\d+-(.+))-\d\d-packed-bundles-post-ra\.txt", path.name)
        if not named:
            continue

        def text(suffix: str, prefix: str = named[1]) -> str:
            pattern = re.compile(re.escape(prefix) + r"-\d\d-" + suffix)
            files = [file for file in folder.iterdir() if pattern.fullmatch(file.name)]
            return files[0].read_text(errors="replace") if files else ""

        analysis = text(r"schedule-analysis_final_bundles\.txt")
        call = rf"%{re.escape(named[2])} = [^\n]*\"tpu_custom_call\""
        if re.search(call, analysis):
            yield Dumps(
                named[2],
                path.read_text(errors="replace"),
                text(r"pre-delay_hlo.*"),
                text(r"post-delay-converter\.txt"),
                analysis,
                vmem.get(named[2], {}),
            )


def split_bundles(schedule: str) -> list[str]:
    """The bundles of a schedule; one is one cycle."""
    return BUNDLE.split(schedule)[1:]


def _kernel(dumps: Dumps, trips: Mapping[str, int]) -> KernelReport:
    bundles = split_bundles(dumps.schedule)
    capacity, rows, warnings = _utilisation(dumps.utilisation, len(bundles))
    if re.search(r"= scall|sbr\.(ind|abs)", dumps.schedule):
        warnings.append("calls or indirect branches: their cycles are not counted")
    branches = Branches.of(bundles)
    root, loops = loop_tree(bundles, branches, trips)
    dmas = _fill(loops, bundles, rows, dumps)
    count_cycles(root, branches.forward)
    scoped = [
        (int(size, 0), int(at or "0", 0), space, tag)
        for space, size, at, tag in ALLOCATION.findall(dumps.allocations)
    ]
    in_vmem = [(size, at, tag.split(".")[0]) for size, at, space, tag in scoped if space == "vmem"]
    limit = re.search(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', dumps.analysis)
    code = re.search(r"total scheduled bundles:\s*(\d+)", dumps.analysis)
    return KernelReport(
        name=dumps.name,
        root=root,
        scheduled_bundles=len(bundles),
        code_bundles=int(code[1]) if code else 0,
        vmem_bytes=dumps.vmem.get("total_size", max((s + at for s, at, _ in in_vmem), default=0)),
        vmem_limit_bytes=int(limit[1]) if limit else 0,
        smem_bytes=sum(size for size, _, space, _ in scoped if space == "smem"),
        vmem_allocations=tuple(sorted(((s, tag) for s, _, tag in in_vmem), reverse=True)),
        operands=_operands(bundles),
        spills=sum(row[SLOTS.index("FILL")] + row[SLOTS.index("SPILL")] for row in rows),
        dmas=tuple(dmas),
        capacity=dict(zip(SLOTS, capacity)),
        global_barrier="global-barrier-wait" in dumps.schedule,
        warnings=tuple(warnings),
    )


def _utilisation(text: str, count: int) -> tuple[list[int], list[list[int]], list[str]]:
    """Slots per bundle that there are, and that each bundle uses."""
    lines = [line for line in text.split("\n") if re.fullmatch(r"[\d ]+", line)]
    rows = [[int(number) for number in line.split()] for line in lines]
    capacity, used = (rows[0], rows[1:]) if rows else ([1] * len(SLOTS), [])
    if len(used) == count:
        return capacity, used, []
    warning = f"{count} bundles but {len(used)} rows of utilisation: slots are not counted"
    return capacity, [[0] * len(SLOTS)] * count, [warning]


def _fill(
    loops: Sequence[Loop], bundles: Sequence[str], rows: Sequence[Sequence[int]], dumps: Dumps
) -> list[DmaSite]:
    """Counts each bundle in its innermost loop; returns the transfers."""
    tags = dict(re.findall(r"(#allocation\d+) \[[^\n]*tag = '([^']*)", dumps.allocations))
    dmas = []
    for at, (bundle, row) in enumerate(zip(bundles, rows)):
        around = [loop for loop in loops if loop.start <= at <= loop.end]
        loop = min(around, key=lambda other: other.end - other.start)
        loop.bundles += 1
        operations = " ".join(OPERATION.findall(bundle))
        found = [len(re.findall(pattern, operations)) for pattern in OPERATIONS.values()]
        for key, number in zip(loop.own, (*row, *found)):
            loop.own[key] += number
        dmas += [_dma(start, loop, dumps.schedule, tags) for start in DMA.finditer(bundle)]
    return dmas


def _dma(start: re.Match[str], loop: Loop, text: str, tags: Mapping[str, str]) -> DmaSite:
    kind, rest = start[1], start[2]
    size = re.search(r"size_in_granules=\*/(\d+)", rest)
    way = re.search(r"/\* (\w+-to-\w+)", rest)
    flag = re.search(r"src_syncflagno=\*/(\S+?),", rest)
    tag = ""
    if flag:
        alias = re.search(rf"{re.escape(flag[1])} = smov [^;]*?\[(#\w+)\]", text)
        tag = tags.get(alias[1] if alias else flag[1].strip("[]"), "")
    # Only a remote transfer has a semaphore of its own at its source.
    remote = kind == "general" and "dummy sync flag" not in tag
    return DmaSite(
        way[1] if way else kind.replace("_", "-"),
        remote,
        int(size[1]) * GRANULE_BYTES if size else None,
        loop.name,
        source_of(rest),
    )


def _operands(bundles: Sequence[str]) -> tuple[str, ...]:
    pattern = r"inlined_call_operand\.(\w+ \[shape: .*?, kind: \w+)"
    return tuple(re.findall(pattern, bundles[0] if bundles else ""))
