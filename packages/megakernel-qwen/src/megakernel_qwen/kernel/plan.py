"""Everything about a decode kernel that is fixed before it is traced: its stages and its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kda_mla_kernels import backend
from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.gdn.kernel import DeltaNet, GdnShape, Replay
from kda_mla_kernels.gqa.kernel import Attention, GqaShape, KeyValueCommit, default_tile
from kda_mla_kernels.mlp.kernel import FeedForward
from kda_mla_kernels.numerics import Numerics
from tpu_collectives import Topology
from vmem_pool.stream import StreamPlan

from megakernel_qwen.kernel.stream import head_columns, stream_plan
from megakernel_qwen.layout import QwenLayout

__all__ = ["KernelModel", "StepPlan"]


@dataclass(frozen=True)
class KernelModel:
    """What all kernels of a loaded model share.

    Attributes:
        layout: the model's share of one rank.
        numerics: the policy; weights, caches and the wire have its activation dtype.
        topology: the ranks.
        slots: L, key and value slots of a row.
        feature_layers: layers after which the residual stream is kept.

    Raises:
        ConfigError: a model whose layers are all of one kind.
    """

    layout: QwenLayout
    numerics: Numerics
    topology: Topology
    slots: int
    feature_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        config = self.layout.config
        if not config.linear_layers or not config.full_layers:
            raise ConfigError(
                "the megakernel backend takes models with layers of both kinds, not only"
                f" {config.layer_types[0]}; take backend xla"
            )

    @property
    def held(self) -> jnp.dtype:
        """Dtype of weights, tails, keys and values."""
        return jnp.dtype(self.numerics.activation)

    @cached_property
    def stream(self) -> StreamPlan:
        """The weight stream."""
        return stream_plan(self.layout, self.held)

    @cached_property
    def gdn_shape(self) -> GdnShape:
        """Linear heads of one rank."""
        config, layout = self.layout.config, self.layout
        return GdnShape(
            layout.key_heads,
            layout.value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
            layout.tail_rows - config.linear_conv_kernel_dim + 1,
        )

    @cached_property
    def gqa_shape(self) -> GqaShape:
        """Attention heads of one rank."""
        config, layout = self.layout.config, self.layout
        return GqaShape(
            layout.query_heads,
            layout.kv_heads,
            config.head_dim,
            config.rotary_dim,
            config.rope_theta,
        )

    @cached_property
    def kinds(self) -> np.ndarray:
        """i32 [3, layers]: 1 for attention; index among the layers of its kind; index among the
        feature layers, or their number where it is none."""
        config = self.layout.config
        types = config.layer_types
        is_full = [int(kind == "full_attention") for kind in types]
        index = [types[:i].count(kind) for i, kind in enumerate(types)]
        none = len(self.feature_layers)
        feature = [
            self.feature_layers.index(i) if i in self.feature_layers else none
            for i in range(config.num_layers)
        ]
        return np.array([is_full, index, feature], np.int32)


@dataclass(frozen=True)
class StepPlan(backend.StepPlan):
    """The stages of a step over one block of tokens."""

    model: KernelModel

    @cached_property
    def delta_net(self) -> DeltaNet:
        model = self.model
        eps = model.layout.config.rms_norm_eps
        return DeltaNet(model.gdn_shape, self.block, model.numerics, eps, model.held)

    @cached_property
    def attention(self) -> Attention:
        model = self.model
        return Attention(
            model.gqa_shape,
            self.block,
            model.numerics,
            model.layout.config.rms_norm_eps,
            model.held,
            model.slots,
            default_tile(model.gqa_shape, model.held, model.slots),
        )

    @cached_property
    def feed_forward(self) -> FeedForward:
        return FeedForward(self.model.layout.intermediate, self.block, self.model.numerics)

    @cached_property
    def replay(self) -> Replay:
        return Replay(self.model.gdn_shape, self.block, self.model.held)

    @cached_property
    def key_values(self) -> KeyValueCommit:
        return KeyValueCommit(self.model.gqa_shape, self.block, self.model.held, self.model.slots)

    def output_shapes(self) -> dict[str, Any]:
        """What one rank's step returns, by name."""
        model, rows = self.model, self.block.padded
        config = model.layout.config
        linear, full = len(config.linear_layers), len(config.full_layers)

        def shape(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        features = max(1, len(model.feature_layers))  # an array of no layers cannot be an output
        return {
            "tokens": shape(jnp.int32, rows, 1),
            "logits": shape(jnp.float32, rows, head_columns(model.layout)),
            "candidates": self.candidate_shapes,
            "features": shape(model.held, features, rows, config.hidden_size),
            "gdn": shape(jnp.float32, linear, rows, model.gdn_shape.record_width),
            "gqa": shape(model.held, full, rows, model.gqa_shape.record_width),
        }
