"""Kimi K3: a step of layers of experts; which experts it reads depends on the tokens.

Experts are chosen by data that no trace has, so a list of routes is assumed: at one row all experts
are distinct, at more rows as many as uniform and independent choices hit on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from kda_mla_kernels import backend
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.moe.kernel.memory import (
    EXPERT,
    EXPERTS,
    HELD,
    HELD_OF,
    ROW,
    SEEN,
    SLOT,
    SLOT_OF,
)
from megakernel_kimi.config import KimiConfig
from megakernel_kimi.kernel.abstract import AbstractModel
from megakernel_kimi.kernel.plan import StepPlan
from megakernel_kimi.kernel.refs import Scalars, planned_stream, step_scratch
from megakernel_kimi.presets import kimi_k3
from tpu_collectives import Topology
from vmem_pool.stream import StreamPlan

from benchmarks.accounting.families.family import KernelCase, names_of, numbered

if TYPE_CHECKING:
    from benchmarks.accounting.cases import Case

__all__ = ["KIMI", "distinct_experts"]

FEATURE_LAYERS = (24, 48, 72)
"""Layers that a drafter might read."""
LISTS = ".experts.experts.numbers", ".experts.entries.numbers"
"""Names in the scratch of the lists of experts and of their entries."""


def distinct_experts(rows: int, chosen: int, experts: int) -> int:
    """Experts that some row chose, on average: E (1 - (1 - k / E) ** rows)."""
    return round(experts * (1 - (1 - chosen / experts) ** rows))


class Kimi:
    """See :class:`~benchmarks.accounting.families.family.Family`."""

    name = "kimi-k3"
    topology = "tpu7x:2x2x4"
    max_static_bytes = 4.95e9
    stages: Sequence[tuple[str, str]] = (
        ("/kda/", "Kimi delta attention"),
        ("/delta/", "Kimi delta attention"),
        ("/mla/", "latent attention"),
        ("/attention/", "latent attention"),
        ("/moe/kernel/routing.py", "expert selection"),
        ("/moe/", "routed experts"),
        ("/residual/", "residual blocks"),
    )
    kinds: Sequence[tuple[str, str]] = (
        (".experts.slot_sems", "routed"),
        (".vectors", "vectors"),
        (".kda", "state"),
        (".mla", "cache"),
    )

    def model(self, case: Case) -> AbstractModel:
        """See the protocol."""
        config = KimiConfig.from_dict(case.config) if case.config else kimi_k3()
        return AbstractModel.of(
            config,
            Topology.from_name(case.topology),
            rows=case.sequences * case.tokens,
            context=case.context,
            feature_layers=FEATURE_LAYERS if case.tokens > 1 else (),
            form=case.form,
            holders=case.holders,
        )

    def stream(self, model: backend.AbstractModel, block: Block) -> StreamPlan:
        """See the protocol."""
        return planned_stream(StepPlan(_shared(model), block))

    def layers(self, model: backend.AbstractModel) -> int:
        """See the protocol."""
        return _shared(model).layout.config.num_hidden_layers

    def held(self, model: backend.AbstractModel) -> tuple[Sequence[Any], Sequence[Any]]:
        """See the protocol."""
        caches = model.caches
        return (caches.tail, caches.delta), (caches.latents, caches.shared)

    def kernels(self, case: Case, model: backend.AbstractModel) -> list[KernelCase]:
        """See the protocol."""
        shared = _shared(model)
        plan = StepPlan(shared, Block(case.sequences, case.tokens))
        where = Where(np.arange(case.sequences), case.positions)
        scalars = Scalars(np.zeros(plan.block.rows, np.int32), where, where, shared.table)
        scratch = names_of(step_scratch(plan))
        before = scalars, model.weight_shapes, model.programs.cache_shapes(), plan.output_shapes()
        first = len(jax.tree.leaves(before))
        routes = {first + scratch.index(name): numbers for name, numbers in _routes(plan).items()}
        contents = numbered(scalars) | routes
        commit = plan.replay.scratch(), plan.latents.scratch()
        return [
            KernelCase("kimi_step", contents, scratch),
            KernelCase("kimi_commit", numbered((where, case.counts)), names_of(commit)),
        ]


def _shared(model: backend.AbstractModel) -> Any:
    """The kernel model."""
    return model.programs.model  # type: ignore[attr-defined]


def _routes(plan: StepPlan) -> dict[str, np.ndarray]:
    """The lists of one layer, with the experts' first routes spread evenly: i32 [8, N] each."""
    schedule, config = plan.experts.schedule, plan.model.layout.config
    chosen, rows = config.num_experts_per_token, plan.block.rows
    routes = rows * chosen
    distinct = distinct_experts(rows, chosen, config.num_experts)
    first = np.zeros(schedule.entries, np.int32)
    first[np.arange(distinct) * routes // distinct] = 1
    seen, place = np.cumsum(first), np.arange(schedule.entries)
    lists = (
        {
            EXPERT: place % distinct,
            SLOT_OF: place % schedule.slots,
            HELD_OF: place % schedule.held_slots,
            EXPERTS: np.full_like(place, distinct),
        },
        {
            ROW: np.minimum(place // chosen, rows),
            SLOT: (seen - 1) % schedule.slots,
            HELD: (seen - 1) % schedule.held_slots,
            SEEN: seen,
        },
    )
    found = {
        name: np.zeros(plan.experts.scratch().experts.numbers.shape, np.int32) for name in LISTS
    }
    for table, fields in zip(found.values(), lists, strict=True):
        for field, values in fields.items():
            table[field, : schedule.entries] = values
    return found


KIMI = Kimi()
