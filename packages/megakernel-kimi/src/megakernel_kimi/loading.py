"""Reading a checkpoint into per-rank arrays, one layer of one rank in host memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from kda_mla_kernels.backend import SPLIT, Share, ShareReader, Track, place, untracked
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.errors import CheckpointError
from kda_mla_kernels.moe import PackedExperts
from kda_mla_kernels.quant import Mxfp4
from kda_mla_kernels.quant.mxfp4 import GROUP

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


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"{PREFIX}layers.{index}."


def attention_prefix(index: int) -> str:
    return layer_prefix(index) + "self_attn."


def moe_prefix(index: int) -> str:
    return layer_prefix(index) + "block_sparse_moe."


def expert_prefix(index: int, expert: int) -> str:
    return f"{experts_prefix(index)}{expert}."


@dataclass(frozen=True)
class RankReader(ShareReader):
    """Reads one rank's share of each tensor."""

    layout: KimiLayout
    rank: int

    def layer(self, index: int) -> LayerWeights:
        """Everything of a layer."""
        config = self.layout.config
        kda, dense = config.layer_kind(index) == "kda", index in config.dense_layers
        (attention_mix, attention_norm), (ffn_mix, ffn_norm) = map(
            partial(self.entry, index), ("attention", "ffn")
        )
        return LayerWeights(
            attention_mix=attention_mix,
            attention_norm=attention_norm,
            attention=self.kda(index) if kda else self.mla(index),
            ffn_mix=ffn_mix,
            ffn_norm=ffn_norm,
            ffn=self.dense(index) if dense else self.moe(index),
        )

    def entry(self, index: int, sublayer: Literal["attention", "ffn"]) -> list[np.ndarray]:
        """Mixing vector and norm weight of a sublayer."""
        mix, norm = {
            "attention": ("self_attention_res", "input_layernorm"),
            "ffn": ("mlp_res", "post_attention_layernorm"),
        }[sublayer]
        name = layer_prefix(index)
        return [self.mixing(name + mix), self.vector(f"{name}{norm}.weight")]

    def mixing(self, name: str) -> np.ndarray:
        """Mixing vector of an attention residual: norm times projection."""
        return self.vector(name + "_norm.weight") * self.vector(name + "_proj.weight")[0]

    def kda(self, index: int) -> KdaWeights:
        name, dim = attention_prefix(index), self.layout.config.kda_head_dim
        width = self.layout.kda_heads_of(self.rank).times(dim)
        columns = [self.matrix(f"{name}{part}_proj.weight", width) for part in "qkvg"]
        columns += [self.beta(index), self.matrix(name + "f_a_proj.weight")]
        return KdaWeights(
            in_proj=np.concatenate(columns, axis=1),
            decay=self.matrix(name + "f_b_proj.weight", width),
            **self.kda_vectors(index),
            out_proj=self.matrix(name + "o_proj.weight", None, width),
        )

    def beta(self, index: int) -> np.ndarray:
        """The projection to the rank's write strengths."""
        heads = self.layout.kda_heads_of(self.rank)
        return self.matrix(attention_prefix(index) + "b_proj.weight", heads)

    def kda_vectors(self, index: int) -> dict[str, np.ndarray]:
        """What is no matrix of a KDA layer, by field."""
        name, heads = attention_prefix(index), self.layout.kda_heads_of(self.rank)
        dim = self.layout.config.kda_head_dim
        width = heads.times(dim)
        taps = [self.read(f"{name}{part}_conv1d.weight", width)[:, 0] for part in "qkv"]
        return {
            "taps": np.concatenate(taps).astype(np.float32).T,
            "a_log": self.vector(name + "A_log", heads),
            "dt_bias": self.vector(name + "dt_bias", width).reshape(-1, dim),
            "norm": self.vector(name + "o_norm.weight"),
        }

    def lane(self, name: str, whole: int) -> np.ndarray:
        """The lane's columns of a matrix that every host has as a whole."""
        return self.matrix(name, self.layout.lane_of(self.rank, whole))

    def mla(self, index: int) -> MlaWeights:
        name = attention_prefix(index)
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
            **self.mla_norms(index),
            q_b=self.matrix(name + "q_b_proj.weight", heads.times(config.qk_head_dim)),
            key_up=both[:, :own],
            value_up=both[:, own:],
            out_proj=self.matrix(name + "o_proj.weight", None, values),
        )

    def mla_norms(self, index: int) -> dict[str, np.ndarray]:
        """Norm weights of low-rank queries and of latents, by field."""
        name = attention_prefix(index)
        return {
            "q_norm": self.vector(name + "q_a_layernorm.weight"),
            "row_norm": self.vector(name + "kv_a_layernorm.weight"),
        }

    def dense(self, index: int) -> MlpWeights:
        return self.mlp(layer_prefix(index) + "mlp.", self.layout.dense_of(self.rank))

    def mlp(self, name: str, channels: Share) -> MlpWeights:
        columns = [self.matrix(f"{name}{part}_proj.weight", channels) for part in ("gate", "up")]
        return MlpWeights(
            gate_up=np.concatenate(columns, axis=1),
            down=self.matrix(name + "down_proj.weight", None, channels),
        )

    def moe(self, index: int) -> MoeWeights:
        return replace(self.moe_without_experts(index), experts=self.experts(index))

    def moe_without_experts(self, index: int) -> MoeWeights:
        """What every token passes; ``experts`` is None."""
        name, config = moe_prefix(index), self.layout.config
        columns = [
            self.lane(name + "gate.weight", config.num_experts),
            self.lane(name + "routed_expert_down_proj.weight", config.routed_expert_hidden_size),
        ]
        shared = self.layout.shared_of(self.rank)
        return MoeWeights(
            in_proj=np.concatenate(columns, axis=1),
            **self.moe_vectors(index),
            up=self.lane(name + "routed_expert_up_proj.weight", config.hidden_size),
            shared=self.mlp(name + "shared_experts.", shared),
            experts=None,
        )

    def moe_vectors(self, index: int) -> dict[str, np.ndarray]:
        """The choice's bias and the norm weight of the experts' sum, by field."""
        name = moe_prefix(index)
        return {
            "router_bias": self.vector(name + "gate.e_score_correction_bias"),
            "norm": self.vector(name + "routed_expert_norm.weight"),
        }

    def experts(self, index: int) -> PackedExperts:
        """The rank's channels of its experts, as they are stored."""
        held = [self.expert(index, expert) for expert in self.layout.experts_of(self.rank)]
        return jax.tree.map(lambda *parts: np.stack(parts), *held)

    def expert(self, index: int, expert: int) -> PackedExperts:
        gate, up = self.gate_up(index, expert)
        down = self.down(index, expert)
        return PackedExperts(
            gate_up=np.concatenate([gate.packed, up.packed]),
            gate_up_scales=np.concatenate([gate.scales, up.scales]),
            down=down.packed.T,
            down_scales=down.scales.T,
        )

    def gate_up(self, index: int, expert: int) -> tuple[Mxfp4, Mxfp4]:
        """The rank's channels of one expert's gate and up: rows of [channels, latent]."""
        name, channels = expert_prefix(index, expert), self.channels
        return tuple(self.quantised(f"{name}{part}.weight", channels) for part in ("w1", "w3"))  # type: ignore[return-value]

    def down(self, index: int, expert: int) -> Mxfp4:
        """The rank's channels of one expert's down: inputs of [latent, channels]."""
        return self.quantised(expert_prefix(index, expert) + "w2.weight", None, self.channels)

    def expert_scales(self, index: int, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """The scales of :meth:`gate_up`, gate first, and of :meth:`down`."""
        name, channels = expert_prefix(index, expert), self.channels
        parts = [self.stored(f"{name}{part}.weight_scale", channels) for part in ("w1", "w3")]
        down = self.stored(name + "w2.weight_scale", None, channels, GROUP)
        return np.concatenate(parts), down

    @property
    def channels(self) -> Share:
        """The rank's channels of each of its experts."""
        return self.layout.expert_channels_of(self.rank)

    def stored(
        self, name: str, rows: Share | None, inputs: Share | None = None, per_entry: int = 1
    ) -> np.ndarray:
        """Rows and inputs of a packed array that holds ``per_entry`` inputs in an entry."""
        if inputs is None:
            return self.read(name, rows)
        start, stop = inputs.start // per_entry, inputs.stop // per_entry
        return self.read(name, rows, Share(start, stop, stop - start))

    def quantised(self, name: str, rows: Share | None, inputs: Share | None = None) -> Mxfp4:
        """Rows and inputs of a packed matrix, in whole groups.

        Raises:
            CheckpointError: a scale is such that decoding would not be exact.
        """
        packed = self.stored(name + "_packed", rows, inputs, 2)
        weight = Mxfp4(packed, self.stored(name + "_scale", rows, inputs, GROUP))
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
