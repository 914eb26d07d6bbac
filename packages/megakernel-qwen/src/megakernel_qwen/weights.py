"""The weights of a model as the ranks hold them, and how they are read from a checkpoint.

Every array has a leading rank axis, sharded over the mesh; rank r's part is all it ever needs.
Matrices are [in, out] (tables stay [rows, hidden]); projections that read the same input stand side
by side in one matrix. Small vectors are f32.

Letters: D hidden, C convolution channels, W taps, Hv value heads, F feed-forward width of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from kda_mla_kernels.backend import Share, ShareReader, Track, place, untracked
from kda_mla_kernels.checkpoint import Checkpoint

from megakernel_qwen.config import QwenConfig
from megakernel_qwen.layout import QwenLayout
from megakernel_qwen.tensors import HEAD, expected_tensors, layer_prefix, text_prefix

__all__ = [
    "GdnWeights",
    "GqaWeights",
    "LayerWeights",
    "MlpWeights",
    "QwenWeights",
    "RankReader",
    "load_weights",
    "rank_readers",
]

STORED_DTYPES = ("bfloat16", "float16", "float32")
"""What a tensor may be stored in. Narrower ones need scales, which this family's loader lacks."""

Array = Any
"""A numpy array while loading, a jax array afterwards."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GdnWeights:
    """A gated delta net."""

    in_proj: Array
    """[D, convolution channels | z | b | a]"""
    taps: Array
    """f32 [W, C]"""
    a_log: Array
    """f32 [Hv]"""
    dt_bias: Array
    """f32 [Hv]"""
    norm: Array
    """f32 [value dim], a plain gain"""
    out_proj: Array
    """[values, D]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GqaWeights:
    """Gated softmax attention."""

    in_proj: Array
    """[D, queries | gates | keys | values]"""
    q_gain: Array
    """f32 [head dim], 1 + weight"""
    k_gain: Array
    """f32 [head dim], 1 + weight"""
    out_proj: Array
    """[queries, D]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MlpWeights:
    """A gated feed-forward layer."""

    gate_up: Array
    """[D, gate | up]"""
    down: Array
    """[F, D]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    mixer_gain: Array
    """f32 [D], 1 + weight of the norm before the mixer"""
    mixer: GdnWeights | GqaWeights
    mlp_gain: Array
    """f32 [D], 1 + weight of the norm before the feed-forward layer"""
    mlp: MlpWeights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QwenWeights:
    """A whole model.

    ``layers`` holds one entry per layer or, stacked, one entry per layer of a period with the
    periods as the axis after the ranks (for ``lax.scan``).
    """

    embedding: Array
    """[vocabulary rows of the rank, D]"""
    layers: tuple[LayerWeights, ...]
    final_gain: Array
    """f32 [D], 1 + weight"""
    head: Array | None
    """[vocabulary rows of the rank, D]; None when tied to the embedding"""

    @property
    def head_table(self) -> Array:
        return self.embedding if self.head is None else self.head


@dataclass(frozen=True)
class RankReader(ShareReader):
    """Reads one rank's share of each tensor."""

    layout: QwenLayout
    prefix: str
    rank: int

    def _gain(self, name: str) -> np.ndarray:
        return 1.0 + self.vector(name)

    def _channels(self) -> tuple[Share, ...]:
        """This rank's queries, keys and values among the convolution channels."""
        config = self.layout.config
        keys = self.layout.linear_keys_of(self.rank).times(config.linear_key_head_dim)
        values = self.layout.linear_values_of(self.rank).times(config.linear_value_head_dim)
        width = config.linear_key_width
        return keys, keys.after(width), values.after(2 * width)

    def gdn(self, name: str) -> GdnWeights:
        heads = self.layout.linear_values_of(self.rank)
        values = heads.times(self.layout.config.linear_value_head_dim)
        taps = [self.read(name + "conv1d.weight", part)[:, 0] for part in self._channels()]
        columns = [self.matrix(name + "in_proj_qkv.weight", part) for part in self._channels()]
        columns.append(self.matrix(name + "in_proj_z.weight", values))
        columns += [self.matrix(f"{name}in_proj_{gate}.weight", heads) for gate in "ba"]
        return GdnWeights(
            in_proj=np.concatenate(columns, axis=1),
            taps=np.concatenate(taps).astype(np.float32).T,
            a_log=self.vector(name + "A_log", heads),
            dt_bias=self.vector(name + "dt_bias", heads),
            norm=self.vector(name + "norm.weight"),
            out_proj=self.matrix(name + "out_proj.weight", None, values),
        )

    def gqa(self, name: str) -> GqaWeights:
        layout, dim = self.layout, self.layout.config.head_dim
        heads = layout.queries_of(self.rank)
        # Stored per head: its query rows, then its gate rows.
        both = self.matrix(name + "q_proj.weight", heads.times(2 * dim))
        query, gate = np.moveaxis(both.reshape(-1, heads.size, 2, dim), 2, 0)
        first = layout.first_kv_head(self.rank)
        keys = Share(first, first + layout.kv_heads, layout.kv_heads).times(dim)
        columns = [query.reshape(-1, heads.size * dim), gate.reshape(-1, heads.size * dim)]
        columns += [self.matrix(f"{name}{part}_proj.weight", keys) for part in "kv"]
        return GqaWeights(
            in_proj=np.concatenate(columns, axis=1),
            q_gain=self._gain(name + "q_norm.weight"),
            k_gain=self._gain(name + "k_norm.weight"),
            out_proj=self.matrix(name + "o_proj.weight", None, heads.times(dim)),
        )

    def mlp(self, name: str) -> MlpWeights:
        wide = self.layout.intermediate_of(self.rank)
        columns = [self.matrix(f"{name}{part}_proj.weight", wide) for part in ("gate", "up")]
        return MlpWeights(
            gate_up=np.concatenate(columns, axis=1),
            down=self.matrix(name + "down_proj.weight", None, wide),
        )

    def mixer_gain(self, index: int) -> np.ndarray:
        return self._gain(layer_prefix(self.prefix, index) + "input_layernorm.weight")

    def layer_mixer(self, index: int) -> GdnWeights | GqaWeights:
        name = layer_prefix(self.prefix, index)
        linear = self.layout.config.layer_types[index] == "linear_attention"
        return self.gdn(name + "linear_attn.") if linear else self.gqa(name + "self_attn.")

    def mlp_gain(self, index: int) -> np.ndarray:
        return self._gain(layer_prefix(self.prefix, index) + "post_attention_layernorm.weight")

    def layer_mlp(self, index: int) -> MlpWeights:
        return self.mlp(layer_prefix(self.prefix, index) + "mlp.")

    def layer(self, index: int) -> LayerWeights:
        return LayerWeights(
            mixer_gain=self.mixer_gain(index),
            mixer=self.layer_mixer(index),
            mlp_gain=self.mlp_gain(index),
            mlp=self.layer_mlp(index),
        )

    def embedding(self) -> np.ndarray:
        return self._vocabulary(self.prefix + "embed_tokens.weight")

    def head(self) -> np.ndarray:
        """The rows of the head, which may be those of the embedding."""
        return self.embedding() if self.layout.config.tied_embeddings else self._vocabulary(HEAD)

    def _vocabulary(self, name: str) -> np.ndarray:
        """This rank's rows of an embedding-shaped table, zero rows behind the vocabulary."""
        config, rows = self.layout.config, self.layout.vocab_rows
        return self.table(name, Share.of(config.vocab_size, rows, self.rank))

    def final_gain(self) -> np.ndarray:
        return self._gain(self.prefix + "norm.weight")


def check_tensors(checkpoint: Checkpoint, config: QwenConfig) -> str:
    """Checks every tensor of the model, and returns what their names begin with.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape or type.
    """
    prefix = text_prefix(frozenset(checkpoint.names()))
    checkpoint.require(expected_tensors(config, prefix), STORED_DTYPES)
    return prefix


def rank_readers(checkpoint: Checkpoint, layout: QwenLayout, dtype: np.dtype) -> list[RankReader]:
    """A reader for every rank, after a check of every tensor of the model.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape or type.
    """
    prefix = check_tensors(checkpoint, layout.config)
    return [RankReader(checkpoint, dtype, layout, prefix, r) for r in range(layout.ranks)]


def _stack(layers: Sequence[LayerWeights]) -> LayerWeights:
    return jax.tree.map(lambda *xs: np.stack(xs), *layers)


def load_weights(
    checkpoint: Checkpoint,
    layout: QwenLayout,
    mesh: Mesh,
    dtype: np.dtype,
    *,
    stacked: bool = False,
    track: Track = untracked,
) -> QwenWeights:
    """Checks every tensor of the model, then reads it layer by layer, rank by rank.

    Args:
        mesh: one axis, ``layout.ranks`` devices in rank order.
        dtype: of matrices and tables; see :func:`kda_mla_kernels.backend.held_dtype`.
        stacked: one entry per layer of a period, with the periods stacked, if there are several.
        track: wraps the loop over layers, to show progress.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape or type, before anything is
            read.
    """
    readers = rank_readers(checkpoint, layout, dtype)
    stacked = stacked and layout.config.period < layout.config.num_layers
    period = layout.config.period if stacked else layout.config.num_layers

    def entry(first: int) -> LayerWeights:
        members = range(first, layout.config.num_layers, period)
        if not stacked:
            return place(mesh, lambda rank: readers[rank].layer(first))
        return place(mesh, lambda rank: _stack([readers[rank].layer(i) for i in members]))

    tied = layout.config.tied_embeddings
    return QwenWeights(
        embedding=place(mesh, lambda rank: readers[rank].embedding()),
        layers=tuple(entry(first) for first in track(range(period), "weights")),
        final_gain=place(mesh, lambda rank: readers[rank].final_gain()),
        head=None if tied else place(mesh, lambda rank: readers[rank].head()),
    )
