"""The compiled programs: decode, verify, commit and prefill.

Each is a ``shard_map`` over the ranks, jitted with donated caches. Shapes that vary (sequences and
tokens of a verify, the padded length of a chunk) are compiled once each, on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kda_mla_kernels import norm
from kda_mla_kernels.gdn import DeltaStep
from kda_mla_kernels.sampling import Sampling, sample

from megakernel_qwen.layout import RANKS
from megakernel_qwen.weights import QwenWeights
from megakernel_qwen.xla.batch import Batch
from megakernel_qwen.xla.caches import Caches, Records, cache_shapes, commit_records
from megakernel_qwen.xla.forward import HeldLayers, Layers, Stream, embed, gather_logits, run_layers
from megakernel_qwen.xla.mixers import Memory, Rank, chunk_memory, decode_memory, verify_memory

__all__ = ["Fed", "Programs", "as_i32"]

SPLIT, WHOLE = PartitionSpec(RANKS), PartitionSpec()

# Without this XLA may keep bf16 intermediates in f32, and the rounding would depend on fusion.
_COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


class Fed(NamedTuple):
    """What a decode step gives each row: arrays of the host or the device, or traced."""

    tokens: Any
    """i32 [R]"""
    positions: Any
    """i32 [R]"""
    active: Any
    """bool [R]"""


@dataclass(frozen=True)
class Programs:
    """All programs of one model on one mesh."""

    rank: Rank
    mesh: Mesh
    rows: int
    """R, rows of the state and flat rows of decode and verify"""
    slots: int
    """L, key and value slots per row"""
    feature_layers: tuple[int, ...]

    def _compile(
        self,
        body: Callable[..., Any],
        specs: tuple[PartitionSpec, ...],
        results: Any,
        donate: tuple[int, ...],
    ) -> Callable[..., Any]:
        """Wraps a per-rank function; arguments split over ranks lose their rank axis inside."""

        def per_rank(*args: Any) -> Any:
            local = [
                jax.tree.map(lambda x: x[0], arg) if spec == SPLIT else arg
                for arg, spec in zip(args, specs)
            ]
            outputs = body(*local)
            return tuple(
                jax.tree.map(lambda x: x[None], out) if spec == SPLIT else out
                for out, spec in zip(outputs, results)
            )

        mapped = jax.shard_map(
            per_rank, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate, compiler_options=_COMPILER_OPTIONS)

    def _run(
        self, weights: QwenWeights, caches: Caches, batch: Batch, memory: Memory, records: Any
    ) -> Stream:
        hidden = embed(self.rank, weights.embedding, batch.flat(batch.tokens))
        features = jnp.zeros((len(self.feature_layers), *hidden.shape), hidden.dtype)
        stream = Stream(hidden, features, caches, records)
        layers = self._layers(weights)
        return run_layers(self.rank, layers, stream, batch, memory, self.feature_layers)

    def _layers(self, weights: Any) -> Layers:
        return HeldLayers(weights.layers)

    def _head(self, weights: Any, hidden: jax.Array) -> jax.Array:
        """Final norm and logits of the whole vocabulary, on every rank: [M, D] -> f32 [M, V]."""
        eps = self.rank.layout.config.rms_norm_eps
        normed = norm.rms_norm(hidden, weights.final_gain.reshape(-1), eps, self.rank.numerics)
        return self._head_logits(weights, normed)

    def _head_logits(self, weights: Any, normed: jax.Array) -> jax.Array:
        return gather_logits(self.rank, self.rank.numerics.dot_rows(normed, weights.head_table))

    def empty(self) -> Caches:
        """Zeroed caches, split over the ranks."""
        sharding = NamedSharding(self.mesh, PartitionSpec(RANKS))
        shapes = cache_shapes(self.rank.layout, self.rows, self.slots, self.rank.held)

        def zeros() -> Caches:
            return jax.tree.map(lambda x: jnp.zeros((self.mesh.size, *x.shape), x.dtype), shapes)

        return jax.jit(zeros, out_shardings=sharding)()

    def choose(
        self,
        weights: Any,
        caches: Caches,
        fed: Fed,
        sampling: Sampling | None,
        with_logits: bool,
    ) -> tuple[jax.Array, jax.Array | None, Caches]:
        """A decode step, greedy without ``sampling``."""
        found = Sampling.greedy(self.rows) if sampling is None else sampling
        chosen, logits, caches = self.decode(weights, caches, *fed, found)
        return chosen, logits, caches

    @cached_property
    def greedy_step(self) -> Callable[..., tuple[jax.Array, Caches]]:
        """As :meth:`greedy_steps` for one step: tokens i32 [R]."""

        def body(weights: Any, caches: Caches, *given: jax.Array) -> tuple[jax.Array, Caches]:
            fed = Fed(*given)
            chosen, caches = self._greedy(weights, caches, fed)
            return jnp.where(fed.active, chosen, -1), caches

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, SPLIT), donate=(1,))

    def greedy_steps(self, count: int) -> Callable[..., tuple[jax.Array, Caches]]:
        """``(weights, caches, tokens [R], positions [R], active [R])``: tokens i32 [count, R].

        The loop runs on the device; each step feeds what the one before chose.
        """
        if count not in self._greedy_programs:
            self._greedy_programs[count] = self._compile_steps(count)
        return self._greedy_programs[count]

    @cached_property
    def _greedy_programs(self) -> dict[int, Callable[..., tuple[jax.Array, Caches]]]:
        return {}

    def _compile_steps(self, count: int) -> Callable[..., tuple[jax.Array, Caches]]:
        def body(weights: Any, caches: Caches, *given: jax.Array) -> tuple[jax.Array, Caches]:
            def step(carry: tuple[Fed, Caches], _: None) -> tuple[tuple[Fed, Caches], jax.Array]:
                fed, caches = carry
                chosen, caches = self._greedy(weights, caches, fed)
                tokens = jnp.where(fed.active, chosen, fed.tokens)
                following = Fed(tokens, fed.positions + 1, fed.active)
                return (following, caches), jnp.where(fed.active, chosen, -1)

            (_, caches), chosen = lax.scan(step, (Fed(*given), caches), length=count)
            return chosen, caches

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, SPLIT), donate=(1,))

    def _greedy(self, weights: Any, caches: Caches, fed: Fed) -> tuple[jax.Array, Caches]:
        """One step of one token per row on this rank: the best tokens, and the moved state."""
        logits, caches = self._decoded(weights, caches, fed)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), caches

    def _decoded(self, weights: Any, caches: Caches, fed: Fed) -> tuple[jax.Array, Caches]:
        """One step of one token per row on this rank: f32 logits [R, V], and the moved state."""
        columns = (fed.tokens[:, None], fed.positions[:, None], fed.active[:, None])
        batch = Batch(*columns, rows=None, flat_rows=self.rows, alone=True)
        stream = self._run(weights, caches, batch, decode_memory, None)
        return self._head(weights, stream.hidden), stream.caches

    @cached_property
    def decode(self) -> Callable[..., tuple[jax.Array, jax.Array, Caches]]:
        """``(weights, caches, tokens [R], positions [R], active [R], sampling)``."""

        def body(
            weights: Any,
            caches: Caches,
            tokens: jax.Array,
            positions: jax.Array,
            active: jax.Array,
            sampling: Sampling,
        ) -> tuple[jax.Array, jax.Array, Caches]:
            logits, caches = self._decoded(weights, caches, Fed(tokens, positions, active))
            chosen = sample(logits, sampling, positions + 1)
            return jnp.where(active, chosen, -1), logits, caches

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, WHOLE, SPLIT), donate=(1,))

    @cached_property
    def verify(self) -> Callable[..., tuple[jax.Array, jax.Array, Caches, Any]]:
        """``(weights, caches, rows [S], tokens [S, T], positions [S])``."""

        def body(
            weights: QwenWeights,
            caches: Caches,
            rows: jax.Array,
            tokens: jax.Array,
            first: jax.Array,
        ) -> tuple[jax.Array, jax.Array, Caches, Records]:
            s, t = tokens.shape
            positions = first[:, None] + jnp.arange(t)
            live = jnp.ones((s, t), bool)
            batch = Batch(tokens, positions, live, rows, flat_rows=self.rows, alone=True)
            stream = self._run(weights, caches, batch, verify_memory, self._no_records(s, t))
            logits = batch.grid(self._head(weights, stream.hidden))
            assert stream.records is not None
            return logits, self._features(stream, batch), stream.caches, stream.records

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, WHOLE, SPLIT, SPLIT), donate=(1,))

    def _no_records(self, s: int, t: int) -> Records:
        config, layout = self.rank.layout.config, self.rank.layout
        layers, heads = len(config.linear_layers), layout.value_heads
        window = config.linear_conv_kernel_dim - 1 + t
        return Records(
            window=jnp.zeros((layers, s, window, layout.conv_channels), self.rank.held),
            steps=DeltaStep(
                decay=jnp.zeros((layers, self.rows, heads)),
                key=jnp.zeros((layers, self.rows, heads, config.linear_key_head_dim)),
                update=jnp.zeros((layers, self.rows, heads, config.linear_value_head_dim)),
            ),
            tokens=t,
        )

    @staticmethod
    def _features(stream: Stream, batch: Batch) -> jax.Array:
        """[F, M, D] -> [S, T, F, D]."""
        return batch.grid(jnp.moveaxis(stream.features, 0, 1))

    @cached_property
    def commit(self) -> Callable[..., tuple[Caches]]:
        """``(caches, records, rows [S], accepted [S])``."""

        def body(
            caches: Caches, records: Records, rows: jax.Array, accepted: jax.Array
        ) -> tuple[Caches]:
            return (commit_records(caches, records, rows, accepted),)

        return self._compile(body, (SPLIT, SPLIT, WHOLE, WHOLE), (SPLIT,), donate=(0,))

    @cached_property
    def prefill(self) -> Callable[..., tuple[jax.Array, jax.Array, Caches]]:
        """``(weights, caches, row, tokens [N], start, valid)``: logits of the last valid token."""
        return self._prefill(all_logits=False)

    @cached_property
    def prefill_all(self) -> Callable[..., tuple[jax.Array, jax.Array, Caches]]:
        """As :attr:`prefill`, with the logits of every token."""
        return self._prefill(all_logits=True)

    def _prefill(self, all_logits: bool) -> Callable[..., tuple[jax.Array, jax.Array, Caches]]:
        def body(
            weights: QwenWeights,
            caches: Caches,
            row: jax.Array,
            tokens: jax.Array,
            start: jax.Array,
            valid: jax.Array,
        ) -> tuple[jax.Array, jax.Array, Caches]:
            live = jnp.arange(tokens.shape[0]) < valid
            # Padding must not stretch the attention loop beyond the last real token.
            positions = start + jnp.minimum(jnp.arange(tokens.shape[0]), valid - 1)
            batch = Batch(
                tokens[None], positions[None], live[None], row[None], flat_rows=tokens.shape[0]
            )
            stream = self._run(weights, caches, batch, chunk_memory, None)
            hidden = stream.hidden
            if not all_logits:
                hidden = jax.lax.dynamic_slice_in_dim(hidden, valid - 1, 1)
            logits = self._head(weights, hidden)
            return logits, self._features(stream, batch)[0], stream.caches

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, WHOLE, SPLIT), donate=(1,))


def as_i32(values: Any, name: str = "value") -> np.ndarray:
    """Host integers as i32, the only integer type that the programs take.

    Raises:
        ValueError: something else than integers, lists of unequal lengths, or beyond 32 bits.
    """
    try:
        found = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must hold lists of equal length") from None
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers of at most 64 bits, not {values!r}")
    limits = np.iinfo(np.int32)
    if found.size and (found.min() < limits.min or found.max() > limits.max):
        raise ValueError(f"{name} holds an integer beyond 32 bits")
    return found.astype(np.int32)
