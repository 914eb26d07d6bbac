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
from kda_mla_kernels.moe.kernel.stage import EXPERT, FIRST, ORDINAL, ROW
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
TABLE = ".experts.table"
"""Name in the scratch of the list of routes."""


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
        scalars = Scalars(np.zeros(plan.block.rows, np.int32), where, shared.table)
        scratch = names_of(step_scratch(plan))
        before = scalars, model.weight_shapes, model.programs.cache_shapes(), plan.output_shapes()
        table = len(jax.tree.leaves(before)) + scratch.index(TABLE)
        contents = numbered(scalars) | {table: _routes(plan)}
        commit = plan.replay.scratch(), plan.latents.scratch()
        return [
            KernelCase("kimi_step", contents, scratch),
            KernelCase("kimi_commit", numbered((where, case.counts)), names_of(commit)),
        ]


def _shared(model: backend.AbstractModel) -> Any:
    """The kernel model."""
    return model.programs.model  # type: ignore[attr-defined]


def _routes(plan: StepPlan) -> np.ndarray:
    """The table of entries of one layer, its first routes spread evenly: f32 [8, N']."""
    experts, config = plan.experts, plan.model.layout.config
    chosen, rows = config.num_experts_per_token, plan.block.rows
    routes = rows * chosen
    distinct = distinct_experts(rows, chosen, config.num_experts)
    first = np.zeros(experts.entries, np.float32)
    first[np.arange(distinct) * routes // distinct] = 1
    ordinals = np.maximum(np.cumsum(first) - 1, 0)
    table = np.zeros(experts.scratch().table.shape, np.float32)
    table[FIRST, : experts.entries] = first
    table[ORDINAL, : experts.entries] = table[EXPERT, : experts.entries] = ordinals
    table[ROW, : experts.entries] = np.minimum(np.arange(experts.entries) // chosen, rows)
    return table


KIMI = Kimi()
