"""Qwen: a step of dense layers, each of gated delta net or attention and an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from kda_mla_kernels import backend
from kda_mla_kernels.block import Block, Where
from megakernel_qwen.config import QwenConfig
from megakernel_qwen.kernel.abstract import AbstractModel
from megakernel_qwen.kernel.plan import StepPlan
from megakernel_qwen.kernel.step import Scalars, planned_stream, step_scratch
from tpu_collectives import Topology
from vmem_pool.stream import StreamPlan

from benchmarks.accounting.families.family import KernelCase, names_of, numbered

if TYPE_CHECKING:
    from benchmarks.accounting.cases import Case

__all__ = ["PUBLISHED", "QWEN"]

PUBLISHED: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
}
"""Sizes of the published 27B model."""
FEATURE_LAYERS = (5, 19, 33, 47, 61)
"""Layers that the published drafter reads."""


class Qwen:
    """See :class:`~benchmarks.accounting.families.family.Family`."""

    name = "qwen-27b"
    topology = "tpu7x:2x2x1"
    max_static_bytes = 6.46e9
    stages: Sequence[tuple[str, str]] = (
        ("/gdn/", "gated delta net"),
        ("/delta/", "gated delta net"),
        ("/gqa/", "attention"),
    )
    kinds: Sequence[tuple[str, str]] = (
        (".gates", "gates"),
        (".delta_net", "state"),
        (".attention", "cache"),
    )

    def model(self, case: Case) -> AbstractModel:
        """See the protocol."""
        return AbstractModel.of(
            QwenConfig.from_json(case.config or PUBLISHED),
            Topology.from_name(case.topology),
            rows=case.sequences * case.tokens,
            context=case.context,
            feature_layers=FEATURE_LAYERS if case.tokens > 1 else (),
        )

    def stream(self, model: backend.AbstractModel, block: Block) -> StreamPlan:
        """See the protocol."""
        return planned_stream(StepPlan(_shared(model), block))

    def layers(self, model: backend.AbstractModel) -> int:
        """See the protocol."""
        return _shared(model).layout.config.num_layers

    def held(self, model: backend.AbstractModel) -> tuple[Sequence[Any], Sequence[Any]]:
        """See the protocol."""
        caches = model.caches
        return (caches.tail, caches.delta), (caches.keys, caches.values)

    def kernels(self, case: Case, model: backend.AbstractModel) -> list[KernelCase]:
        """See the protocol."""
        shared = _shared(model)
        plan = StepPlan(shared, Block(case.sequences, case.tokens))
        where = Where(np.arange(case.sequences), case.positions)
        scalars = Scalars(np.zeros(plan.block.rows, np.int32), where, shared.kinds)
        commit = plan.replay.scratch(), plan.key_values.scratch()
        return [
            KernelCase("qwen_step", numbered(scalars), names_of(step_scratch(plan))),
            KernelCase("qwen_commit", numbered((where, case.counts)), names_of(commit)),
        ]


def _shared(model: backend.AbstractModel) -> Any:
    """The kernel model."""
    return model.programs.model  # type: ignore[attr-defined]


QWEN = Qwen()
