"""Packs a checkpoint into what the decode kernel reads, one layer of one rank at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from kda_mla_kernels.backend import Track, place, untracked
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.kda.kernel import KdaVectors
from kda_mla_kernels.moe import PackedExperts
from kda_mla_kernels.moe.kernel import ExpertImages, ExpertShape
from kda_mla_kernels.quant import Mxfp4
from vmem_pool.stream import StreamPlan, slots

from megakernel_kimi.checkpoint import check_tensors
from megakernel_kimi.kernel.stream import head_columns, key_up, stream_plan, value_up
from megakernel_kimi.kernel.weights import (
    MIX,
    NORM,
    KernelWeights,
    beta_rows,
    bias_columns,
    table_rows,
    weight_shapes,
)
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.loading import RankReader
from megakernel_kimi.tensors import LM_HEAD, PREFIX
from megakernel_kimi.weights import KdaWeights, LayerWeights, MlaWeights, MlpWeights, MoeWeights

__all__ = ["load_kernel_weights"]

Matrices = dict[str, np.ndarray]


def kda_matrices(layout: KimiLayout, kda: KdaWeights) -> Matrices:
    """The streamed matrices of a KDA layer."""
    parts = _columns(kda.in_proj, layout.kda_columns)
    front = np.concatenate([parts[0], parts[1], parts[3]], axis=1)
    return {"front": front, "rate": kda.decay, "out": kda.out_proj}


def mla_matrices(layout: KimiLayout, mla: MlaWeights) -> Matrices:
    """The streamed matrices of an MLA layer."""
    low, rows, gate = _columns(mla.in_proj, layout.mla_columns)
    heads = range(layout.mla_heads)
    return {
        "front": np.concatenate([low, rows], axis=1),
        "gate": gate,
        "query": mla.q_b,
        **{key_up(head): mla.key_up[head] for head in heads},
        **{value_up(head): mla.value_up[head].T for head in heads},
        "out": mla.out_proj,
    }


def moe_matrices(layout: KimiLayout, moe: MoeWeights) -> Matrices:
    """The streamed matrices of a layer of experts."""
    router, latent = _columns(moe.in_proj, (layout.router_columns, layout.latent_columns))
    front = np.concatenate([latent, router], axis=1)
    return {"front": front, **_gated(moe.shared), "up": moe.up}


def _gated(mlp: MlpWeights) -> Matrices:
    return {"gate_up": mlp.gate_up, "down": mlp.down}


def _columns(matrix: np.ndarray, widths: Sequence[int]) -> list[np.ndarray]:
    return np.split(matrix, np.cumsum(widths)[:-1], axis=1)


class _Packer:
    """One rank's weights, read layer by layer in the order of the stream."""

    def __init__(self, reader: RankReader, shape: ExpertShape, done: Iterator[int]) -> None:
        self.reader, self.shape, self.done = reader, shape, done
        self.plan: StreamPlan = stream_plan(reader.layout, reader.dtype)
        shapes = weight_shapes(reader.layout, shape, reader.dtype)
        self.found: KernelWeights = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        self._layer: tuple[int, LayerWeights] | None = None
        self._segment: tuple[int, Matrices] | None = None

    def pack(self) -> KernelWeights:
        """Everything this rank needs."""
        table = self.reader.vocabulary(f"{PREFIX}embed_tokens.weight")
        self.found.embedding[: len(table)] = table
        last = self.found.hidden[-1]
        last[MIX] = self.reader.mixing(f"{PREFIX}output_attn_res")
        last[NORM] = self.reader.vector(f"{PREFIX}norm.weight")
        for at, slot in enumerate(slots(self.plan, self._fetch)):
            self.found.image[at] = slot
        assert self.found.embedding.shape[0] == table_rows(self.reader.layout)
        return self.found

    def _fetch(self, segment: int, name: str) -> np.ndarray:
        if self._segment is None or self._segment[0] != segment:
            self._segment = segment, self._read(segment)
        return self._segment[1][name]

    def _read(self, segment: int) -> Matrices:
        layout, kind = self.reader.layout, self.plan.order[segment]
        if kind == "head":
            table = self.reader.vocabulary(LM_HEAD)
            return {"head": np.pad(table, [(0, head_columns(layout) - len(table)), (0, 0)]).T}
        layer = self._read_layer(segment // 2)
        if kind == "kda":
            return kda_matrices(layout, layer.attention)  # type: ignore[arg-type]
        if kind == "mla":
            return mla_matrices(layout, layer.attention)  # type: ignore[arg-type]
        if kind == "dense":
            return _gated(layer.ffn)  # type: ignore[arg-type]
        return moe_matrices(layout, layer.ffn)  # type: ignore[arg-type]

    def _read_layer(self, index: int) -> LayerWeights:
        """Reads a layer once; what is not streamed is kept on the way."""
        if self._layer is None or self._layer[0] != index:
            layer = self.reader.layer(index)
            self._layer = index, layer
            self._keep(index, layer)
            next(self.done, None)
        return self._layer[1]

    def _keep(self, index: int, layer: LayerWeights) -> None:
        config, found = self.reader.layout.config, self.found
        found.hidden[2 * index] = np.stack([layer.attention_mix, layer.attention_norm])
        found.hidden[2 * index + 1] = np.stack([layer.ffn_mix, layer.ffn_norm])
        at = config.attention_index(index)
        if isinstance(layer.attention, KdaWeights):
            self._keep_kda(at, layer.attention)
        else:
            gains = [layer.attention.q_norm, layer.attention.row_norm]
            found.low_gain[at, 0] = np.concatenate(gains)
        if isinstance(layer.ffn, MoeWeights):
            self._keep_experts(config.moe_layers.index(index), layer.ffn)

    def _keep_kda(self, at: int, kda: KdaWeights) -> None:
        layout, vectors = self.reader.layout, self.found.kda
        beta = _columns(kda.in_proj, layout.kda_columns)[2].T
        self.found.beta[at] = np.pad(beta, [(0, beta_rows(layout) - len(beta)), (0, 0)])
        assert isinstance(vectors, KdaVectors)
        vectors.taps[at] = kda.taps
        slope = np.exp(kda.a_log.astype(np.float32))
        vectors.slope[at, 0] = np.repeat(slope, layout.config.kda_head_dim)
        vectors.dt_bias[at, 0] = kda.dt_bias.reshape(-1)
        vectors.norm[at, 0] = kda.norm

    def _keep_experts(self, at: int, moe: MoeWeights) -> None:
        layout, row = self.reader.layout, self.found.router[at, 0]
        row[: layout.config.num_experts] = moe.router_bias
        row[bias_columns(layout) :] = moe.norm
        packed = _packed(self.shape, moe.experts)
        for kept, part in zip(jax.tree.leaves(self.found.experts), jax.tree.leaves(packed)):
            kept[at] = part


def _packed(shape: ExpertShape, experts: PackedExperts) -> ExpertImages:
    """A rank's experts of one layer, from [E, out, in] as stored (down turned around)."""
    width = shape.channels
    gate, up = (
        Mxfp4(experts.gate_up[:, part], experts.gate_up_scales[:, part])
        for part in (slice(0, width), slice(width, None))
    )
    down = Mxfp4(*(np.swapaxes(x, 1, 2) for x in (experts.down, experts.down_scales)))
    return shape.pack(gate, up, down)


def load_kernel_weights(
    checkpoint: Checkpoint,
    layout: KimiLayout,
    shape: ExpertShape,
    mesh: Mesh,
    dtype: np.dtype[Any],
    track: Track = untracked,
) -> KernelWeights:
    """Checks every tensor of the model, then reads and packs it, rank by rank.

    One rank's share is in host memory at a time. Args and errors as for
    :func:`~megakernel_kimi.loading.load_weights`; ``track`` counts the layers of all ranks.

    Args:
        shape: form and widths of routed experts.
    """
    check_tensors(checkpoint, layout.config)
    layers = layout.ranks * layout.config.num_hidden_layers
    done = iter(track(range(layers), "weights"))

    def read(rank: int) -> KernelWeights:
        return _Packer(RankReader(checkpoint, dtype, layout, rank), shape, done).pack()

    loaded = place(mesh, read)
    next(done, None)
    return loaded
