"""Offsets for a kernel's buffers in one VMEM pool, with a proof that no two live ones overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

from vmem_pool.buffers import Buffer, ReceiveArea
from vmem_pool.colouring import Block, place
from vmem_pool.errors import PlanError
from vmem_pool.tiling import LANES, TILE_BYTES

__all__ = ["Declared", "Plan", "plan"]

Declared: TypeAlias = Buffer | ReceiveArea

MIB = 1 << 20
LISTED = 5
"""Buffers that an error names."""


@dataclass(frozen=True)
class Plan:
    """Where each buffer stands. Made by :func:`plan`, which also proves it.

    Args:
        buffers: as declared, in declaration order.
        offsets: first byte of each, by name.
        phases: names of the phases.
        budget_bytes: what the pool may hold.
    """

    buffers: tuple[Declared, ...]
    offsets: Mapping[str, int]
    phases: tuple[str, ...]
    budget_bytes: int

    @cached_property
    def by_name(self) -> Mapping[str, Declared]:
        """Buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool, a multiple of 4096."""
        return max((self.offsets[b.name] + b.bytes for b in self.buffers), default=0)

    @property
    def byte_rows(self) -> int:
        """Rows of the pool as ``uint8 [byte_rows, 128]``."""
        return self.size_bytes // LANES

    @property
    def bound_bytes(self) -> int:
        """What no plan of these buffers can be below: the most that lives at once."""
        return max(self.live_bytes)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes that live in each phase."""
        return tuple(sum(b.bytes for b in self.live(p)) for p in range(len(self.phases)))

    @property
    def peak_phase(self) -> int:
        """The first phase in which most bytes live."""
        return self.live_bytes.index(self.bound_bytes)

    def live(self, phase: int) -> tuple[Declared, ...]:
        """Buffers that live in a phase, by rising offset."""
        found = [buffer for buffer in self.buffers if buffer.lives_in(phase)]
        return tuple(sorted(found, key=lambda buffer: self.offsets[buffer.name]))

    def scratch(self) -> Any:
        """The pool as a ``scratch_shapes`` entry of ``pallas_call``: ``uint8 [byte_rows, 128]``."""
        import jax.numpy as jnp
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.VMEM((self.byte_rows, LANES), jnp.uint8)

    def prove(self) -> None:
        """Checks, phase by phase and without the planner's code, what the plan promises.

        Raises:
            PlanError: an offset that is missing, negative or not on a tile, two buffers that share
                bytes in a phase in which both live, or a pool beyond its budget.
        """
        for buffer in self.buffers:
            at = self.offsets.get(buffer.name)
            if at is None or at < 0 or at % TILE_BYTES:
                raise PlanError(
                    f"buffer {buffer.name} stands at {at}, not at a multiple of {TILE_BYTES} bytes"
                )
        for phase, name in enumerate(self.phases):
            live = self.live(phase)
            for below, above in pairwise(live):
                shared = self.offsets[below.name] + below.bytes - self.offsets[above.name]
                if shared > 0:
                    raise PlanError(
                        f"buffers {below.name} and {above.name} share {shared} bytes in phase"
                        f" {phase} ({name}), in which both live"
                    )
        if self.size_bytes > self.budget_bytes:
            raise PlanError(_over_budget(self))


def plan(
    buffers: Iterable[Declared],
    budget_bytes: int,
    phases: int | Sequence[str] | None = None,
    *,
    loop: bool = False,
) -> Plan:
    """Places buffers so that those which never live together share bytes.

    Args:
        buffers: declarations with distinct names; the result does not depend on anything else.
        budget_bytes: what the pool may hold. A TPU v7 core has 64 MiB of VMEM, of which the
            compiler needs some for spills.
        phases: their names or number; by default as many as the lifetimes mention.
        loop: the last phase is followed by the first, so that lifetimes may wrap around.

    Raises:
        PlanError: duplicate names, a lifetime outside the phases, a lifetime that wraps without a
            loop, or more bytes than the budget; the last lists the largest buffers of the fullest
            phase and how many bytes are missing.
    """
    declared = tuple(buffers)
    names = _phase_names(declared, phases)
    _check(declared, len(names), loop)
    offsets: dict[str, int] = {}
    base = 0
    for area in declared:
        if isinstance(area, ReceiveArea):
            offsets[area.name] = base
            base += area.bytes
    local = [buffer for buffer in declared if isinstance(buffer, Buffer)]
    blocks = [Block(b.bytes // TILE_BYTES, _phase_bits(b, len(names))) for b in local]
    for buffer, tile in zip(local, place(blocks)):
        offsets[buffer.name] = base + tile * TILE_BYTES
    planned = Plan(declared, offsets, names, budget_bytes)
    planned.prove()
    return planned


def _phase_names(
    declared: Sequence[Declared], phases: int | Sequence[str] | None
) -> tuple[str, ...]:
    if phases is None:
        phases = 1 + max((max(b.live) for b in declared if isinstance(b, Buffer)), default=0)
    if isinstance(phases, int):
        phases = [f"phase {number}" for number in range(phases)]
    if not phases:
        raise PlanError("a plan needs at least one phase")
    return tuple(phases)


def _check(declared: Sequence[Declared], num_phases: int, loop: bool) -> None:
    repeated = [name for name, n in Counter(b.name for b in declared).items() if n > 1]
    if repeated:
        raise PlanError(f"buffer names must differ; declared twice: {', '.join(repeated)}")
    for buffer in declared:
        if isinstance(buffer, ReceiveArea):
            continue
        first, last = buffer.live
        if max(first, last) >= num_phases:
            raise PlanError(
                f"buffer {buffer.name} lives in phases {first}..{last}, outside 0..{num_phases - 1}"
            )
        if first > last and not loop:
            raise PlanError(
                f"buffer {buffer.name} lives in phases {first}..{last}, which only wraps around in"
                " a plan with loop=True"
            )


def _phase_bits(buffer: Buffer, num_phases: int) -> int:
    first, last = buffer.live
    upto = (1 << last + 1) - 1
    since = (1 << num_phases) - (1 << first)
    return upto & since if first <= last else upto | since


def _over_budget(planned: Plan) -> str:
    phase = planned.peak_phase
    largest = sorted(planned.live(phase), key=lambda b: -b.bytes)
    listed = ", ".join(f"{b.name} ({b.bytes / MIB:.2f} MiB)" for b in largest[:LISTED])
    missing = planned.size_bytes - planned.budget_bytes
    gaps = planned.size_bytes - planned.bound_bytes
    return (
        f"the plan needs {planned.size_bytes} bytes, {missing} more than its budget of"
        f" {planned.budget_bytes}; {planned.bound_bytes} live in phase {phase}"
        f" ({planned.phases[phase]}) and {gaps} are gaps; the largest there are {listed}"
    )
