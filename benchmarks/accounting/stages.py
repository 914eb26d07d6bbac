"""Names for what a kernel does: stages of its work, kinds of what it moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from vmem_pool.aot import Event, Segment
from vmem_pool.stream import Segment as PlannedSegment
from vmem_pool.stream import StreamPlan

from benchmarks.accounting.families import Family

__all__ = ["StageNames", "kind_of"]

EMBEDDING = "embedding"
KINDS = (
    ("record", "records"),
    (".stored", "records"),
    (".fetched", "records"),
    (".ring", "weights"),
    (".embedding", EMBEDDING),
)
"""Parts of the names of scratch, and what moves on their semaphores, before those of a family."""
COMMIT_KINDS = (
    ("[0]", "state"),  # the replay's scratch, then the caches'
    ("[1]", "cache"),
)
STAGES = (
    ("/tpu_collectives/", "exchanges"),
    ("/norm/", "norms"),
    ("/mlp/", "activation"),
    ("/head/", "arg-max"),
    ("/embedding/", EMBEDDING),
)
"""Parts of the paths of source files, and the stage they are, behind those of a family."""
STREAM = "/vmem_pool/stream/"
SHARED = ("/kda_mla_kernels/numerics.py", "/kda_mla_kernels/block.py")
"""What all stages call; its cycles are those of the stage around it."""
OTHER = "residual, gates, control"


def kind_of(name: str, family: Family) -> str:
    """What moves on a semaphore of that name in the scratch; empty if nothing of HBM does."""
    known = (*KINDS, *family.kinds, *COMMIT_KINDS)
    return next((kind for part, kind in known if part in name), "")


class StageNames:
    """Follows the stream, so that a product is known by its matrix."""

    def __init__(self, plan: StreamPlan, family: Family) -> None:
        self._stages = (*family.stages, *STAGES)
        slots = [
            f"{segment}.{matrix}"
            for segment in plan.order
            for matrix in _matrices(plan.segments[segment])
        ]
        self._matrices = iter(slots)
        self._matrix = ""

    def follow(self, event: Event, kind: str) -> None:
        """Notes that a slot was taken."""
        if kind == "weights" and event.op == "dma_wait":
            self._matrix = next(self._matrices)

    def of(self, segment: Segment) -> Mapping[str, int]:
        """Cycles of a segment by stage."""
        found: Counter[str] = Counter()
        for file, cycles in segment.sources.items():
            found[self._stage(file)] += cycles
        if shared := found.pop("", 0):
            others = [stage for stage in found if not stage.startswith("product")]
            found[max(others, key=found.__getitem__, default=OTHER)] += shared
        return found

    def _stage(self, file: str) -> str:
        """Empty for what all stages call."""
        if STREAM in file and self._matrix:
            return f"product {self._matrix}"
        if file.endswith(SHARED):
            return ""
        stage = next((stage for part, stage in self._stages if part in file), OTHER)
        # Jitted functions of jax are traced once and keep the place of their first caller.
        return "" if stage == EMBEDDING and self._matrix else stage


def _matrices(segment: PlannedSegment) -> list[str]:
    """What each slot holds, several matrices with "+" between them."""
    held: list[dict[str, None]] = [{} for _ in range(segment.num_slots)]
    for tile in segment.tiles:
        held[tile.slot][tile.matrix.name] = None
    return ["+".join(names) for names in held]
