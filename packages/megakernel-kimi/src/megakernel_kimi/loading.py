"""Reading a checkpoint into per-rank arrays, one layer of one rank in host memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from kda_mla_kernels.backend import SPLIT, Share, ShareReader, Track, place, untracked
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.errors import CheckpointError
from kda_mla_kernels.moe import PackedExperts
from kda_mla_kernels.quant import Mxfp4

from megakernel_kimi.checkpoint import check_tensors, experts_prefix
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.segments import Segment, segments
from megakernel_kimi.tensors import LM_HEAD, PREFIX
from megakernel_kimi.weights import (
    KdaWeights,
    KimiWeights,
    LayerWeights,
    MlaWeights,
    MlpWeights,
    MoeWeights,
)

__all__ = ["RankReader", "load_weights"]


@dataclass(frozen=True)
class RankReader(ShareReader):
    """Reads one rank's share of each tensor."""

    layout: KimiLayout
    rank: int

    def layer(self, index: int) -> LayerWeights:
        """Everything of a layer."""
        name, config = f"{PREFIX}layers.{index}.", self.layout.config
        kda = config.layer_kind(index) == "kda"
        dense = index in config.dense_layers
        return LayerWeights(
            attention_mix=self.mixing(name + "self_attention_res"),
            attention_norm=self.vector(name + "input_layernorm.weight"),
            attention=self.kda(name + "self_attn.") if kda else self.mla(name + "self_attn."),
            ffn_mix=self.mixing(name + "mlp_res"),
            ffn_norm=self.vector(name + "post_attention_layernorm.weight"),
            ffn=self.mlp(name + "mlp.", self.layout.dense_of(self.rank))
            if dense
            else self.moe(index),
        )

    def mixing(self, name: str) -> np.ndarray:
        """Mixing vector of an attention residual: norm times projection."""
        return self.vector(name + "_norm.weight") * self.vector(name + "_proj.weight")[0]

    def kda(self, name: str) -> KdaWeights:
        heads = self.layout.kda_heads_of(self.rank)
        dim = self.layout.config.kda_head_dim
        width = heads.times(dim)
        columns = [self.matrix(f"{name}{part}_proj.weight", width) for part in "qkvg"]
        columns.append(self.matrix(name + "b_proj.weight", heads))
        columns.append(self.matrix(name + "f_a_proj.weight"))
        taps = [self.read(f"{name}{part}_conv1d.weight", width)[:, 0] for part in "qkv"]
        return KdaWeights(
            in_proj=np.concatenate(columns, axis=1),
            decay=self.matrix(name + "f_b_proj.weight", width),
            taps=np.concatenate(taps).astype(np.float32).T,
            a_log=self.vector(name + "A_log", heads),
            dt_bias=self.vector(name + "dt_bias", width).reshape(-1, dim),
            norm=self.vector(name + "o_norm.weight"),
            out_proj=self.matrix(name + "o_proj.weight", None, width),
        )

    def lane(self, name: str, whole: int) -> np.ndarray:
        """The lane's columns of a matrix that every host has as a whole."""
        return self.matrix(name, self.layout.lane_of(self.rank, whole))

    def mla(self, name: str) -> MlaWeights:
        config, heads = self.layout.config, self.layout.mla_heads_of(self.rank)
        values = heads.times(config.v_head_dim)
        columns = [
            self.lane(name + "q_a_proj.weight", config.q_lora_rank),
            self.lane(name + "kv_a_proj_with_mqa.weight", config.mla_cache_width),
            self.matrix(name + "g_proj.weight", values),
        ]
        # Stored per head: its key rows, then its value rows.
        own = config.qk_nope_head_dim
        both = self.table(name + "kv_b_proj.weight", heads.times(own + config.v_head_dim))
        both = both.reshape(heads.size, -1, config.kv_lora_rank)
        return MlaWeights(
            in_proj=np.concatenate(columns, axis=1),
            q_norm=self.vector(name + "q_a_layernorm.weight"),
            row_norm=self.vector(name + "kv_a_layernorm.weight"),
            q_b=self.matrix(name + "q_b_proj.weight", heads.times(config.qk_head_dim)),
            key_up=both[:, :own],
            value_up=both[:, own:],
            out_proj=self.matrix(name + "o_proj.weight", None, values),
        )

    def mlp(self, name: str, channels: Share) -> MlpWeights:
        columns = [self.matrix(f"{name}{part}_proj.weight", channels) for part in ("gate", "up")]
        return MlpWeights(
            gate_up=np.concatenate(columns, axis=1),
            down=self.matrix(name + "down_proj.weight", None, channels),
        )

    def moe(self, index: int) -> MoeWeights:
        name, config = f"{PREFIX}layers.{index}.block_sparse_moe.", self.layout.config
        columns = [
            self.lane(name + "gate.weight", config.num_experts),
            self.lane(name + "routed_expert_down_proj.weight", config.routed_expert_hidden_size),
        ]
        shared = self.layout.shared_of(self.rank)
        return MoeWeights(
            in_proj=np.concatenate(columns, axis=1),
            router_bias=self.vector(name + "gate.e_score_correction_bias"),
            norm=self.vector(name + "routed_expert_norm.weight"),
            up=self.lane(name + "routed_expert_up_proj.weight", config.hidden_size),
            shared=self.mlp(name + "shared_experts.", shared),
            experts=self.experts(index),
        )

    def experts(self, index: int) -> PackedExperts:
        """The rank's channels of its experts, as they are stored."""
        held = [
            self.expert(f"{experts_prefix(index)}{expert}.")
            for expert in self.layout.experts_of(self.rank)
        ]
        return jax.tree.map(lambda *parts: np.stack(parts), *held)

    def expert(self, name: str) -> PackedExperts:
        channels = self.layout.expert_channels_of(self.rank)
        gate, up = (self.quantised(f"{name}{part}.weight", channels) for part in ("w1", "w3"))
        down = self.quantised(f"{name}w2.weight", None, channels)
        return PackedExperts(
            gate_up=np.concatenate([gate.packed, up.packed]),
            gate_up_scales=np.concatenate([gate.scales, up.scales]),
            down=down.packed.T,
            down_scales=down.scales.T,
        )

    def quantised(self, name: str, rows: Share | None, inputs: Share | None = None) -> Mxfp4:
        """Rows and inputs of a packed matrix, in whole groups.

        Raises:
            CheckpointError: a scale is such that decoding would not be exact.
        """

        def stored(suffix: str, inputs_per_entry: int) -> np.ndarray:
            if inputs is None:
                return self.read(name + suffix, rows)
            start, stop = inputs.start // inputs_per_entry, inputs.stop // inputs_per_entry
            return self.read(name + suffix, rows, Share(start, stop, stop - start))

        weight = Mxfp4(stored("_packed", 2), stored("_scale", 32))
        try:
            weight.check_exact(name)
        except ValueError as error:
            raise CheckpointError(f"checkpoint {self.checkpoint.name!r}: {error}") from None
        return weight

    def vocabulary(self, name: str) -> np.ndarray:
        """This rank's rows of a table over the vocabulary."""
        return self.table(name, self.layout.vocabulary_of(self.rank))


def load_weights(
    checkpoint: Checkpoint,
    layout: KimiLayout,
    mesh: Mesh,
    dtype: np.dtype,
    track: Track = untracked,
) -> KimiWeights:
    """Checks every tensor of the model, then reads it layer by layer, rank by rank.

    Args:
        mesh: one axis, ``layout.ranks`` devices in rank order.
        dtype: of matrices and tables; see :func:`kda_mla_kernels.backend.held_dtype`.
        track: wraps the loop over layers, to show progress.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape or type, before anything is
            read; or a scale of an expert is such that decoding would not be exact.
    """
    check_tensors(checkpoint, layout.config)
    readers = [RankReader(checkpoint, dtype, layout, rank) for rank in range(layout.ranks)]
    done = iter(track(range(layout.config.num_hidden_layers), "weights"))

    def entry(segment: Segment, member: int) -> LayerWeights:
        return _stacked(mesh, readers, segment.layers(member), done)

    found = KimiWeights(
        embedding=place(mesh, lambda r: readers[r].vocabulary(f"{PREFIX}embed_tokens.weight")),
        segments=tuple(
            tuple(entry(segment, member) for member in range(segment.period))
            for segment in segments(layout.config)
        ),
        output_mix=place(mesh, lambda r: readers[r].mixing(f"{PREFIX}output_attn_res")),
        final_norm=place(mesh, lambda r: readers[r].vector(f"{PREFIX}norm.weight")),
        head=place(mesh, lambda r: readers[r].vocabulary(LM_HEAD)),
    )
    next(done, None)
    return found


def _stacked(
    mesh: Mesh, readers: list[RankReader], layers: range, done: Iterator[int]
) -> LayerWeights:
    """Layers of one form, one after the other in a stack that is filled where it stands."""

    def placed(layer: int) -> LayerWeights:
        next(done, None)
        return place(mesh, lambda r: jax.tree.map(lambda x: x[None], readers[r].layer(layer)))

    first = placed(layers[0])
    if len(layers) == 1:
        return first
    sharding = NamedSharding(mesh, SPLIT)
    stack = _first_of(first, len(layers), sharding)
    for turn, layer in enumerate(layers[1:], start=1):
        stack = _put(stack, placed(layer), turn)
    return stack


@partial(jax.jit, static_argnums=(1, 2))
def _first_of(layer: Any, turns: int, sharding: NamedSharding) -> Any:
    """A stack of which the first entry is given and the others are zero."""

    def widen(x: jax.Array) -> jax.Array:
        rest = [(0, turns - 1 if axis == 1 else 0) for axis in range(x.ndim)]
        return jax.lax.with_sharding_constraint(jnp.pad(x, rest), sharding)

    return jax.tree.map(widen, layer)


@partial(jax.jit, donate_argnums=0)
def _put(stack: Any, layer: Any, turn: jax.Array) -> Any:
    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part, turn, axis=1)

    return jax.tree.map(put, stack, layer)
