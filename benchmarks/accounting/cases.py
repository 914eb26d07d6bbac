"""The kernels that are accounted for, and what their order of events depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from kda_mla_kernels.block import Block, Where
from megakernel_qwen.config import QwenConfig
from megakernel_qwen.kernel.abstract import AbstractModel
from megakernel_qwen.kernel.plan import StepPlan
from megakernel_qwen.kernel.step import Scalars, step_scratch
from tpu_collectives import Topology

__all__ = ["PUBLISHED", "Case", "KernelCase"]

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


@dataclass(frozen=True)
class KernelCase:
    """One kernel of a program.

    Attributes:
        name: how it begins.
        contents: what its scalar inputs hold, by number.
        scratch: names of its last arguments.
    """

    name: str
    contents: dict[int, Any]
    scratch: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A step of one size and its commit.

    Attributes:
        sequences, tokens: S and T; T above 1 is a verify step.
        position: of each sequence's first token, so many keys are read.
        accepted: tokens of each sequence that the commit keeps.
        context: positions that the cache holds.
        topology: of compile-only devices, one rank per device.
        config: as ``config.json``.
    """

    sequences: int
    tokens: int
    position: int
    accepted: int
    context: int
    topology: str
    config: dict[str, Any]

    @property
    def title(self) -> str:
        """For people."""
        if self.tokens > 1:
            return f"verify {self.tokens} tokens"
        return "decode 1 row" if self.sequences == 1 else f"decode {self.sequences} rows"

    @property
    def model(self) -> AbstractModel:
        """The model on devices that are not there."""
        return AbstractModel.of(
            QwenConfig.from_json(self.config),
            Topology.from_name(self.topology),
            rows=self.sequences * self.tokens,
            context=self.context,
            feature_layers=FEATURE_LAYERS if self.tokens > 1 else (),
        )

    def programs(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Jitted functions and arguments that together hold the step and its commit."""
        model = self.model
        if self.tokens == 1:
            decode = model.decode()
            return [(decode.function, decode.arguments)]
        verify = model.verify(self.tokens)
        sharding = jax.tree.leaves(model.caches)[0].sharding
        whole = jax.tree.leaves(verify.arguments[2])[0]
        records = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            verify.function.eval_shape(*verify.arguments)[2],  # type: ignore[attr-defined]
        )
        commit = model.programs.commit, (model.caches, records, whole, whole)
        return [(verify.function, verify.arguments), commit]

    def kernels(self, model: AbstractModel) -> list[KernelCase]:
        """The step, then its commit."""
        shared = model.programs.model
        plan = StepPlan(shared, Block(self.sequences, self.tokens))
        where = Where(np.arange(self.sequences), np.full(self.sequences, self.position, np.int32))
        tokens = np.zeros(self.sequences * self.tokens, np.int32)
        accepted = np.full(self.sequences, self.accepted, np.int32)
        return [
            KernelCase(
                "qwen_step",
                _numbered(Scalars(tokens, where, shared.kinds)),
                _names(step_scratch(plan)),
            ),
            KernelCase(
                "qwen_commit",
                _numbered((where, accepted)),
                _names((plan.replay.scratch(), plan.key_values.scratch())),
            ),
        ]


def _numbered(scalars: Any) -> dict[int, Any]:
    return dict(enumerate(jax.tree.leaves(scalars)))


def _names(scratch: Any) -> tuple[str, ...]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(scratch)
    return tuple(jax.tree_util.keystr(path) for path, _ in leaves)
