"""The weights as the decode kernel reads them, and how they are packed while loading.

Letters: D hidden, B gate rows, N embedding rows of a rank; Nl linear layers, Nf attention layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from kda_mla_kernels.backend import Track, place, untracked
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.embedding import table_rows
from kda_mla_kernels.gdn.kernel import GdnVectors
from kda_mla_kernels.gqa.kernel import GqaVectors
from vmem_pool.stream import StreamPlan, slots

from megakernel_qwen.kernel.stream import head_columns, stream_plan
from megakernel_qwen.layout import QwenLayout
from megakernel_qwen.weights import GdnWeights, GqaWeights, RankReader, rank_readers

__all__ = ["KernelWeights", "gate_rows", "load_kernel_weights", "weight_shapes"]

Array = Any
GATE_TILE_ROWS = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelWeights:
    """A whole model on every rank: arrays or their shapes outside, references in the kernel."""

    image: Array
    """u8 [slots, slot rows, 128], the weight stream"""
    gates: Array
    """[Nl, B, D] rows b, then a of the linear layers' gate projections"""
    embedding: Array
    """[N, D], zero rows behind the vocabulary"""
    mixer_gain: Array
    """f32 [layers, 1, D]"""
    mlp_gain: Array
    """f32 [layers, 1, D]"""
    final_gain: Array
    """f32 [1, D]"""
    gdn: GdnVectors
    gqa: GqaVectors


def gate_rows(layout: QwenLayout) -> int:
    """B: both gates of every value head of a rank, in whole tiles."""
    return -(-2 * layout.value_heads // GATE_TILE_ROWS) * GATE_TILE_ROWS


def weight_shapes(layout: QwenLayout, dtype: Any) -> KernelWeights:
    """Shapes and dtypes of one rank's weights."""
    config = layout.config
    layers, hidden = config.num_layers, config.hidden_size
    linear, full = len(config.linear_layers), len(config.full_layers)

    def vectors(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32)

    return KernelWeights(
        image=jax.ShapeDtypeStruct(stream_plan(layout, dtype).image_shape, np.uint8),
        gates=jax.ShapeDtypeStruct((linear, gate_rows(layout), hidden), dtype),
        embedding=jax.ShapeDtypeStruct((table_rows(layout.vocab_rows), hidden), dtype),
        mixer_gain=vectors(layers, 1, hidden),
        mlp_gain=vectors(layers, 1, hidden),
        final_gain=vectors(1, hidden),
        gdn=GdnVectors(
            taps=vectors(linear, config.linear_conv_kernel_dim, layout.conv_channels),
            a_log=vectors(linear, 1, layout.value_heads),
            dt_bias=vectors(linear, 1, layout.value_heads),
            norm=vectors(linear, 1, config.linear_value_head_dim),
        ),
        gqa=GqaVectors(
            q_gain=vectors(full, 1, config.head_dim), k_gain=vectors(full, 1, config.head_dim)
        ),
    )


class _Packer:
    """One rank's weights, read layer by layer in the order of the stream."""

    def __init__(self, reader: RankReader, plan: StreamPlan) -> None:
        self.reader, self.plan, self.layout = reader, plan, reader.layout
        self.gdn: list[GdnWeights] = []
        self.gqa: list[GqaWeights] = []
        self.gates: list[np.ndarray] = []
        self._matrices: dict[str, np.ndarray] = {}
        self._held = -1

    def image(self, done: Iterator[int]) -> np.ndarray:
        """The stream; what is not part of it is collected on the way."""
        found = np.empty(self.plan.image_shape, np.uint8)
        for at, slot in enumerate(slots(self.plan, self._fetch)):
            found[at] = slot
            next(done, None)
        return found

    def _fetch(self, segment: int, name: str) -> np.ndarray:
        if segment != self._held:
            self._matrices, self._held = self._read(segment), segment
        return self._matrices[name]

    def _read(self, segment: int) -> dict[str, np.ndarray]:
        kind = self.plan.order[segment]
        if kind == "head":
            table = self.reader.head()
            wide = head_columns(self.layout) - len(table)
            return {"head": np.pad(table, [(0, wide), (0, 0)]).T}
        if kind == "mlp":
            mlp = self.reader.layer_mlp(segment // 2)
            return {"gate_up": mlp.gate_up, "down": mlp.down}
        mixer = self.reader.layer_mixer(segment // 2)
        if isinstance(mixer, GqaWeights):
            self.gqa.append(mixer)
            return {"in_proj": mixer.in_proj, "out_proj": mixer.out_proj}
        self.gdn.append(mixer)
        streamed = sum(self.layout.gdn_columns[:2])
        gates = mixer.in_proj[:, streamed:].T
        self.gates.append(np.pad(gates, [(0, gate_rows(self.layout) - len(gates)), (0, 0)]))
        return {"in_proj": mixer.in_proj[:, :streamed], "out_proj": mixer.out_proj}


def load_kernel_weights(
    checkpoint: Checkpoint,
    layout: QwenLayout,
    mesh: Mesh,
    dtype: np.dtype,
    track: Track = untracked,
) -> KernelWeights:
    """Checks every tensor of the model, then reads and packs it, rank by rank.

    One rank's share is in host memory at a time. Args and errors as for
    :func:`~megakernel_qwen.weights.load_weights`; ``track`` counts the slots of all ranks.
    """
    readers = rank_readers(checkpoint, layout, dtype)
    plan = stream_plan(layout, dtype)
    done = iter(track(range(layout.ranks * plan.num_slots + 1), "weights"))
    next(done, None)  # starts counting
    loaded = place(mesh, lambda rank: _pack(readers[rank], plan, done))
    next(done, None)
    return loaded


def _pack(reader: RankReader, plan: StreamPlan, done: Iterator[int]) -> KernelWeights:
    packer = _Packer(reader, plan)
    shapes = weight_shapes(reader.layout, reader.dtype)
    image = packer.image(done)
    layers = range(reader.layout.config.num_layers)
    table = reader.embedding()

    def stacked(parts: Sequence[np.ndarray], like: jax.ShapeDtypeStruct) -> np.ndarray:
        return (
            np.concatenate([np.ravel(part) for part in parts] or [np.empty(0)])
            .astype(like.dtype)
            .reshape(like.shape)
        )

    return KernelWeights(
        image=image,
        gates=stacked(packer.gates, shapes.gates),
        embedding=np.pad(table, [(0, table_rows(reader.layout.vocab_rows) - len(table)), (0, 0)]),
        mixer_gain=stacked([reader.mixer_gain(i) for i in layers], shapes.mixer_gain),
        mlp_gain=stacked([reader.mlp_gain(i) for i in layers], shapes.mlp_gain),
        final_gain=stacked([reader.final_gain()], shapes.final_gain),
        gdn=GdnVectors(
            *(
                stacked([getattr(w, name) for w in packer.gdn], getattr(shapes.gdn, name))
                for name in ("taps", "a_log", "dt_bias", "norm")
            )
        ),
        gqa=GqaVectors(
            *(
                stacked([getattr(w, name) for w in packer.gqa], getattr(shapes.gqa, name))
                for name in ("q_gain", "k_gain")
            )
        ),
    )
