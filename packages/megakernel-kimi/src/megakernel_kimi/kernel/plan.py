"""Everything about a decode kernel that is fixed before it is traced: its stages and its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kda_mla_kernels import backend
from kda_mla_kernels.delta import tail_rows
from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.kda.kernel import KdaShape, KimiDeltaAttention, Replay
from kda_mla_kernels.mla import MlaShape
from kda_mla_kernels.mla.kernel import LatentAttention, LatentCommit, default_tile, record_width
from kda_mla_kernels.mlp import Activation, situ
from kda_mla_kernels.mlp.kernel import FeedForward
from kda_mla_kernels.moe import RouterRule
from kda_mla_kernels.moe.kernel import ExpertForm, ExpertShape, RoutedExperts
from kda_mla_kernels.numerics import Numerics
from kda_mla_kernels.residual.kernel import Residual
from tpu_collectives import AllReduce, GroupBy, Topology
from vmem_pool.stream import StreamPlan

from megakernel_kimi.kernel.lanes import LaneGather
from megakernel_kimi.kernel.position_exchange import PositionExchange
from megakernel_kimi.kernel.stream import head_columns, stream_plan
from megakernel_kimi.kernel.sums import Apart, ExpertSums, Together
from megakernel_kimi.layout import KimiLayout

__all__ = [
    "DENSE",
    "KDA",
    "MLA",
    "MOE",
    "KernelModel",
    "StepPlan",
    "SublayerTable",
]


FEW_ROWS = 8
"""Rows up to which VMEM has room for more experts."""
SPILLED_SCORES, SPILLED_RESULTS = 5, 2
"""How often the compiler keeps f32 scores of a tile, and results of all heads, in VMEM: enough for
every step at full size that was compiled (jax 0.10), up to 32 holders."""
KDA, MLA, DENSE, MOE, HEAD = range(5)
"""Kinds of sublayers."""


@dataclass(frozen=True)
class SublayerTable:
    """What the kernel looks up for each sublayer: i32 [2 · layers + 1] each, in SMEM as one table.

    Sublayer 2 l is the mixer of layer l, 2 l + 1 its feed-forward part; the last is the head.
    """

    kind: Any
    """:data:`KDA`, :data:`MLA`, :data:`DENSE`, :data:`MOE`, or :data:`HEAD` at the end"""
    index: Any
    """among the sublayers of its kind"""
    sums: Any
    """sums of hidden rows before this one's, if it has one"""
    blocks: Any
    """residual blocks that are finished when it reads"""
    closes: Any
    """1 where a block is closed behind the read"""
    feature: Any
    """index among the feature layers, or their number where what it reads is none"""


@dataclass(frozen=True)
class KernelModel:
    """What all kernels of a loaded model share.

    Attributes:
        layout: the model's share of one rank.
        numerics: the policy; weights, caches and the wire have its activation dtype.
        topology: the ranks.
        slots: positions that a row has room for.
        feature_layers: layers whose entering prefix is kept.
        form: container of the experts, ``mxfp4`` or ``fp8``.

    Raises:
        ConfigError: a model that lacks one of the kinds of layers, or lanes that are not the
            ranks of a host.
    """

    layout: KimiLayout
    numerics: Numerics
    topology: Topology
    slots: int
    feature_layers: tuple[int, ...] = ()
    form: ExpertForm = "mxfp4"

    def __post_init__(self) -> None:
        config = self.layout.config
        kinds = {
            "KDA": config.kda_layers,
            "MLA": config.mla_layers,
            "dense": config.dense_layers,
            "mixture-of-experts": config.moe_layers,
        }
        missing = [name for name, layers in kinds.items() if not layers]
        if missing:
            raise ConfigError(
                "the megakernel backend takes models with layers of all kinds, and this one has no"
                f" {' and no '.join(missing)} layer; take backend xla"
            )
        lanes = self.topology.ranks // self.topology.hosts
        if (self.topology.ranks, lanes) != (self.layout.ranks, self.layout.lanes):
            raise ConfigError(
                f"the layout has {self.layout.ranks} ranks in hosts of {self.layout.lanes}, the"
                f" topology {self.topology.ranks} in hosts of {lanes}; they must agree"
            )

    @property
    def held(self) -> jnp.dtype:
        """Dtype of weights, tails and latents."""
        return jnp.dtype(self.numerics.activation)

    @cached_property
    def stream(self) -> StreamPlan:
        """The weight stream."""
        return stream_plan(self.layout, self.held)

    @cached_property
    def kda_shape(self) -> KdaShape:
        """KDA heads of one rank."""
        config, heads = self.layout.config, self.layout.kda_heads
        taps, dim = config.conv_kernel_size, config.kda_head_dim
        return KdaShape(heads, heads, dim, dim, taps, tail_rows(taps) - taps + 1)

    @cached_property
    def mla_shape(self) -> MlaShape:
        """Widths of latent attention."""
        config = self.layout.config
        return MlaShape(config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank)

    @property
    def rank_slots(self) -> int:
        """L, slots of a row in this rank's latent caches."""
        return self.layout.rank_slots(self.slots)

    @cached_property
    def expert_shape(self) -> ExpertShape:
        """Routed experts of one rank."""
        layout = self.layout
        latent = layout.config.routed_expert_hidden_size
        return ExpertShape(latent, layout.expert_channels, layout.experts, self.form)

    @property
    def activation(self) -> Activation:
        """SiTU with the model's caps."""
        config = self.layout.config
        return partial(
            situ,
            beta=config.situ_beta,
            linear_beta=config.situ_linear_beta,
            numerics=self.numerics,
        )

    @cached_property
    def table(self) -> np.ndarray:
        """i32 [fields of SublayerTable, sublayers]."""
        config, none = self.layout.config, len(self.feature_layers)
        rows: list[SublayerTable] = []
        for layer, mixer in enumerate(config.layer_kinds):
            known = layer in self.feature_layers
            rows += [
                SublayerTable(
                    kind=KDA if mixer == "kda" else MLA,
                    index=config.attention_index(layer),
                    sums=_sums_before(rows),
                    blocks=config.blocks_before_attention(layer),
                    closes=int(config.starts_block(layer)),
                    feature=self.feature_layers.index(layer) if known else none,
                )
            ]
            dense = layer in config.dense_layers
            of_kind = config.dense_layers if dense else config.moe_layers
            rows += [
                SublayerTable(
                    kind=DENSE if dense else MOE,
                    index=of_kind.index(layer),
                    sums=_sums_before(rows),
                    blocks=config.blocks_before_mlp(layer),
                    closes=0,
                    feature=none,
                )
            ]
        # What the head reads.
        rows += [SublayerTable(HEAD, 0, _sums_before(rows), config.num_blocks, 0, none)]
        return np.array([list(vars(row).values()) for row in rows], np.int32).T


def _sums_before(rows: list[SublayerTable]) -> int:
    """The embedding's sum, and those of the sublayers that leave partial results."""
    return 1 + sum(row.kind != MOE for row in rows)


@dataclass(frozen=True)
class StepPlan(backend.StepPlan):
    """The stages of a step over one block of tokens."""

    model: KernelModel

    @cached_property
    def residual(self) -> Residual:
        config, numerics = self.model.layout.config, self.model.numerics
        sizes = config.hidden_size, config.num_blocks, config.rms_norm_eps
        return Residual(self.block, *sizes, numerics)

    @cached_property
    def kda(self) -> KimiDeltaAttention:
        model = self.model
        config = model.layout.config
        return KimiDeltaAttention(
            model.kda_shape,
            self.block,
            model.numerics,
            config.rms_norm_eps,
            model.held,
            config.gate_lower_bound,
        )

    @cached_property
    def mla(self) -> LatentAttention:
        model = self.model
        return LatentAttention(
            model.mla_shape,
            model.layout.attending_heads,
            self.block,
            model.numerics,
            model.held,
            model.rank_slots,
            default_tile(model.mla_shape, model.held, model.rank_slots),
            model.layout.split,
        )

    @cached_property
    def position_exchange(self) -> PositionExchange | None:
        """The exchanges around :attr:`mla`; None where every rank holds all positions."""
        model, layout = self.model, self.model.layout
        if layout.split is None:
            return None
        within: GroupBy = "host" if layout.holders == layout.lanes else "all"
        sizes = self.block, model.mla_shape, layout.mla_heads, within
        return PositionExchange(model.topology, *sizes, model.numerics)

    def spilled(self) -> dict[str, int]:
        """Bytes of VMEM that the compiler takes for values beyond what every step needs; they grow
        with the heads that attend on a rank."""
        scores = self.block.tokens * self.mla.heads * self.mla.tile * 4
        exchange = self.position_exchange
        results = 0 if exchange is None else exchange.result_bytes
        return {
            "spilled scores": SPILLED_SCORES * scores,
            "spilled results": SPILLED_RESULTS * results,
        }

    @cached_property
    def dense(self) -> FeedForward:
        return self._feed_forward(self.model.layout.dense_channels, group=1)

    @cached_property
    def shared(self) -> FeedForward:
        return self._feed_forward(self.model.layout.shared_channels)

    @cached_property
    def experts(self) -> RoutedExperts:
        model = self.model
        config = model.layout.config
        rule = RouterRule(
            config.num_experts_per_token, config.moe_renormalize, config.routed_scaling_factor
        )
        chunk, ahead = self._pace
        return RoutedExperts(
            model.expert_shape,
            rule,
            self.block,
            model.numerics,
            model.activation,
            chunk,
            ahead,
            whole=model.layout.has_every_expert,
        )

    @cached_property
    def replay(self) -> Replay:
        return Replay(self.model.kda_shape, self.block, self.model.held)

    @cached_property
    def latents(self) -> LatentCommit:
        model = self.model
        split = model.layout.split
        return LatentCommit(model.mla_shape, self.block, model.held, model.rank_slots, split)

    @cached_property
    def sum_experts(self) -> Together | Apart:
        """Sums of routed and of shared experts; those of a single row are too short to pay for
        exchanges of their own."""
        layout = self.model.layout
        routed, shared = layout.config.routed_expert_hidden_size, layout.hidden_columns
        if self.block.rows == 1:
            return Together(self._expert_sums(routed, shared))
        rows, wire = self.block.rows, self.model.held
        whole = AllReduce(self.model.topology, rows, routed, wire, axis=backend.RANKS)
        return Apart(whole, self._expert_sums(0, shared))

    @cached_property
    def gather_low(self) -> LaneGather:
        """Low-rank queries and cached rows of an MLA layer."""
        layout = self.model.layout
        return self._lanes((layout.query_columns, layout.row_columns), self.model.held)

    @cached_property
    def gather_latent(self) -> LaneGather:
        """Latents and, unrounded, router logits."""
        layout = self.model.layout
        return self._lanes((layout.latent_columns, layout.router_columns), jnp.float32)

    @cached_property
    def gather_hidden(self) -> LaneGather:
        """What experts of all kinds add to the prefix."""
        return self._lanes((self.model.layout.hidden_columns,), self.model.held)

    def output_shapes(self) -> dict[str, Any]:
        """What one rank's step returns, by name."""
        model, rows = self.model, self.block.padded
        config = model.layout.config

        def shape(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        features = max(1, len(model.feature_layers))  # an array of no layers cannot be an output
        kda, mla = len(config.kda_layers), len(config.mla_layers)
        return {
            "tokens": shape(jnp.int32, rows, 1),
            "logits": shape(jnp.float32, rows, head_columns(model.layout)),
            "candidates": self.candidate_shapes,
            "features": shape(model.held, features, rows, config.hidden_size),
            "kda": shape(jnp.float32, kda, rows, model.kda_shape.record_width),
            "mla": shape(model.held, mla, rows, record_width(model.mla_shape)),
        }

    @property
    def _pace(self) -> tuple[int, int]:
        """Routes of several rows that are worked on together, and how many more load meanwhile:
        what VMEM has room for (``docs/kimi-layout.md``)."""
        if self.block.rows <= FEW_ROWS:
            return 4, 8
        return (4, 4) if self.model.form == "mxfp4" else (2, 2)

    def _expert_sums(self, routed: int, shared: int) -> ExpertSums:
        return ExpertSums(self.model.topology, self.block, routed, shared, self.model.held)

    def _feed_forward(self, channels: int, group: int = 2) -> FeedForward:
        model = self.model
        return FeedForward(channels, self.block, model.numerics, model.activation, group)

    def _lanes(self, parts: tuple[int, ...], dtype: Any) -> LaneGather:
        return LaneGather(self.model.topology, self.block, parts, dtype)
