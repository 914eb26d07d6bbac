"""One rank's kernel weights, read from a checkpoint array by array and a few rows at a time.

Whoever packs a checkpoint, into memory or onto disk, takes the rows from here, so that both get the
same bytes. Nothing larger than one sublayer's matrices or one expert is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import numpy as np
from kda_mla_kernels.backend import Share
from kda_mla_kernels.errors import CheckpointError
from kda_mla_kernels.moe.kernel import ExpertShape
from kda_mla_kernels.quant import NotLosslessError
from vmem_pool.stream import StreamPlan, slots

from megakernel_kimi.kernel.stream import head_columns, key_up, stream_plan, value_up
from megakernel_kimi.kernel.weights import (
    KernelWeights,
    beta_rows,
    bias_columns,
    weight_shapes,
)
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.loading import RankReader, expert_prefix
from megakernel_kimi.tensors import LM_HEAD, PREFIX
from megakernel_kimi.weights import KdaWeights, MlaWeights, MlpWeights, MoeWeights

__all__ = ["RankRows", "join_rows", "row_shapes"]

Matrices = dict[str, np.ndarray]
Shapes = Mapping[str, jax.ShapeDtypeStruct]

EXPERTS = "experts."
TABLE_ROWS_AT_ONCE = 1024


def row_shapes(layout: KimiLayout, shape: ExpertShape, dtype: np.dtype) -> Shapes:
    """Every array of one rank's :class:`KernelWeights` by the path of its field, in their order.

    The first size counts what can be read one by one: slots of the stream, vocabulary rows, layers,
    and for ``experts.*`` the experts of one layer after the other, [Ne · E, ...].
    """
    found = jax.tree_util.tree_leaves_with_path(weight_shapes(layout, shape, dtype))
    named = {".".join(key.name for key in path): leaf for path, leaf in found}
    return {
        name: jax.ShapeDtypeStruct((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), leaf.dtype)
        if name.startswith(EXPERTS)
        else leaf
        for name, leaf in named.items()
    }


def join_rows(
    layout: KimiLayout, shape: ExpertShape, arrays: Mapping[str, np.ndarray]
) -> KernelWeights:
    """The weights of which :func:`row_shapes` lists the arrays; no copies are made."""
    dtype = arrays["embedding"].dtype
    leaves, form = jax.tree.flatten(weight_shapes(layout, shape, dtype))
    ordered = [arrays[name] for name in row_shapes(layout, shape, dtype)]
    return jax.tree.unflatten(form, [x.reshape(y.shape) for x, y in zip(ordered, leaves)])


@dataclass(frozen=True)
class RankRows:
    """Rows of one rank's arrays.

    Attributes:
        reader: of the checkpoint, whose tensors have been checked.
        shape: form and widths of routed experts.
    """

    reader: RankReader
    shape: ExpertShape

    @property
    def layout(self) -> KimiLayout:
        return self.reader.layout

    @cached_property
    def shapes(self) -> Shapes:
        """See :func:`row_shapes`."""
        return row_shapes(self.layout, self.shape, self.reader.dtype)

    @cached_property
    def plan(self) -> StreamPlan:
        return stream_plan(self.layout, self.reader.dtype)

    def rows(self, name: str, start: int = 0) -> Iterator[np.ndarray]:
        """The rows of an array from ``start`` to its end, in arrays of one or more.

        Raises:
            CheckpointError: a scale of an expert is such that decoding would not be exact, or FP8
                would round a weight.
        """
        if name == "image":
            fetch = _Segments(self)
            yield from (slot[None] for slot in slots(self.plan, fetch, start))
        elif name == "embedding":
            yield from self._table(start)
        else:
            read = self._readers[name]
            for row in range(start, self.shapes[name].shape[0]):
                yield np.asarray(read(row), self.shapes[name].dtype)[None]

    @cached_property
    def _readers(self) -> dict[str, Callable[[int], np.ndarray]]:
        return {
            "hidden": self._hidden,
            "beta": self._beta,
            "router": self._router,
            "low_gain": self._low_gain,
            "experts.gate_up": partial(self._expert, self._gate_up),
            "experts.down": partial(self._expert, self._down),
            "experts.scales": partial(self._expert, self._scales),
            "kda.taps": self._taps,
            "kda.slope": self._slope,
            "kda.dt_bias": partial(self._kda_vector, "dt_bias"),
            "kda.norm": partial(self._kda_vector, "norm"),
        }

    def _table(self, start: int) -> Iterator[np.ndarray]:
        """The embedding; zeros behind this rank's part of the vocabulary."""
        share, total = (
            self.layout.vocabulary_of(self.reader.rank),
            self.shapes["embedding"].shape[0],
        )
        for first in range(start, total, TABLE_ROWS_AT_ONCE):
            size = min(TABLE_ROWS_AT_ONCE, total - first)
            begin, end = (min(share.start + at, share.stop) for at in (first, first + size))
            yield self.reader.table(f"{PREFIX}embed_tokens.weight", Share(begin, end, size))

    def _hidden(self, sublayer: int) -> np.ndarray:
        """Mixing vector and norm weight."""
        index, is_ffn = divmod(sublayer, 2)
        if index < self.layout.config.num_hidden_layers:
            return np.stack(self.reader.entry(index, "ffn" if is_ffn else "attention"))
        mix = self.reader.mixing(f"{PREFIX}output_attn_res")
        return np.stack([mix, self.reader.vector(f"{PREFIX}norm.weight")])

    def _beta(self, at: int) -> np.ndarray:
        beta = self.reader.beta(self.layout.config.kda_layers[at]).T
        return np.pad(beta, [(0, beta_rows(self.layout) - len(beta)), (0, 0)])

    def _router(self, at: int) -> np.ndarray:
        layout = self.layout
        vectors = self.reader.moe_vectors(layout.config.moe_layers[at])
        bias = vectors["router_bias"]
        padding = bias_columns(layout) - len(bias)
        return np.concatenate([np.pad(bias, (0, padding)), vectors["norm"]])[None]

    def _low_gain(self, at: int) -> np.ndarray:
        norms = self.reader.mla_norms(self.layout.config.mla_layers[at])
        return np.concatenate([norms["q_norm"], norms["row_norm"]])[None]

    def _taps(self, at: int) -> np.ndarray:
        return self._kda(at)["taps"]

    def _slope(self, at: int) -> np.ndarray:
        slope = np.exp(self._kda(at)["a_log"].astype(np.float32))
        return np.repeat(slope, self.layout.config.kda_head_dim)[None]

    def _kda_vector(self, field: str, at: int) -> np.ndarray:
        return self._kda(at)[field].reshape(1, -1)

    def _kda(self, at: int) -> dict[str, np.ndarray]:
        return self.reader.kda_vectors(self.layout.config.kda_layers[at])

    def _expert(self, part: Callable[[int, int], np.ndarray], row: int) -> np.ndarray:
        layout = self.layout
        at, expert = divmod(row, layout.experts)
        layer = layout.config.moe_layers[at]
        try:
            return part(layer, layout.experts_of(self.reader.rank)[expert])
        except NotLosslessError as error:
            raise CheckpointError(f"checkpoint {self.reader.checkpoint.name!r}: {error}") from None

    def _gate_up(self, layer: int, expert: int) -> np.ndarray:
        gate, up = self.reader.gate_up(layer, expert)
        return self.shape.pack_gate_up(gate, up, _gate_up_name(layer, expert))

    def _down(self, layer: int, expert: int) -> np.ndarray:
        return self.shape.pack_down(self.reader.down(layer, expert))

    def _scales(self, layer: int, expert: int) -> np.ndarray:
        gate_up, down = self.reader.expert_scales(layer, expert)
        if self.shape.form == "fp8":  # exponents leave out groups of zeros, so codes are needed
            name = _gate_up_name(layer, expert)
            gate_up = self.shape.gate_up_scales(*self.reader.gate_up(layer, expert), name)
        return self.shape.pack_scales(gate_up, down)


def _gate_up_name(layer: int, expert: int) -> str:
    return f"{expert_prefix(layer, expert)}w1 and w3"


class _Segments:
    """Matrices of the stream by segment and name; those of one segment are held."""

    def __init__(self, source: RankRows) -> None:
        self.source = source
        self._held: tuple[int, Matrices] | None = None

    def __call__(self, segment: int, name: str) -> np.ndarray:
        if self._held is None or self._held[0] != segment:
            self._held = None
            self._held = segment, self._read(segment)
        return self._held[1][name]

    def _read(self, segment: int) -> Matrices:
        reader, layout = self.source.reader, self.source.layout
        kind, layer = self.source.plan.order[segment], segment // 2
        if kind == "head":
            table = reader.vocabulary(LM_HEAD)
            return {"head": np.pad(table, [(0, head_columns(layout) - len(table)), (0, 0)]).T}
        if kind == "kda":
            return _kda_matrices(layout, reader.kda(layer))
        if kind == "mla":
            return _mla_matrices(layout, reader.mla(layer))
        if kind == "dense":
            return _gated(reader.dense(layer))
        return _moe_matrices(layout, reader.moe_without_experts(layer))


def _kda_matrices(layout: KimiLayout, kda: KdaWeights) -> Matrices:
    parts = _columns(kda.in_proj, layout.kda_columns)
    front = np.concatenate([parts[0], parts[1], parts[3]], axis=1)
    return {"front": front, "rate": kda.decay, "out": kda.out_proj}


def _mla_matrices(layout: KimiLayout, mla: MlaWeights) -> Matrices:
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


def _moe_matrices(layout: KimiLayout, moe: MoeWeights) -> Matrices:
    router, latent = _columns(moe.in_proj, (layout.router_columns, layout.latent_columns))
    front = np.concatenate([latent, router], axis=1)
    return {"front": front, **_gated(moe.shared), "up": moe.up}


def _gated(mlp: MlpWeights) -> Matrices:
    return {"gate_up": mlp.gate_up, "down": mlp.down}


def _columns(matrix: np.ndarray, widths: Sequence[int]) -> list[np.ndarray]:
    return np.split(matrix, np.cumsum(widths)[:-1], axis=1)
