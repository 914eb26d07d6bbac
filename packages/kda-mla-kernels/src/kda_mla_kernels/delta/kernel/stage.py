"""A delta rule's part of a decode stage: convolution, rule, and the record of what it did.

A row's bits do not depend on its neighbours nor on how many tokens a sequence has: what acts on
rows alone sees all of them in one shape, and the delta rule runs one token at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.delta.kernel.convolution import convolve_rows
from kda_mla_kernels.delta.kernel.rule import (
    HeadToken,
    as_columns,
    decayed_states,
    delta_rule,
    split_heads,
    spread,
)
from kda_mla_kernels.delta.kernel.shape import DeltaMemory, DeltaShape, Span
from kda_mla_kernels.norm import l2_norm
from kda_mla_kernels.numerics import Numerics

__all__ = ["DeltaScratch", "DeltaStage", "TokenInputs"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaScratch:
    """What a stage keeps in VMEM; only the record outlives a layer, until it is sent."""

    tails: Any
    """[S, tail rows, C] held dtype"""
    states: Any
    """f32 [slots, Hv, K, V]: sequence s in slot s mod slots"""
    queries: Any
    """f32 [P, Hk·K]"""
    keys: Any
    """f32 [P, Hk·K], as the record has them: loads of a token need not wait for the stores of the
    one before, which go to the record"""
    values: Any
    """f32 [P, Hv·V]"""
    decay: Any
    """f32 [P, spread width], as the shape spreads it"""
    beta: Any
    """f32 [P, Hv·V], each head's beta V times"""
    outputs: Any
    """f32 [P, Hv·V]"""
    record: Any
    """f32 [P, record width], on its way to HBM until the next layer of this kind"""
    tail_sem: Any
    state_sems: Any
    record_sem: Any


@dataclass(frozen=True)
class TokenInputs:
    """What the delta rule is prepared from, of all rows: f32 values."""

    channels: jax.Array
    """[P, C] inputs of the convolution"""
    taps: jax.Array
    """[W, C]"""
    decay: jax.Array
    """[P, decay width] in [0, 1]"""
    beta: jax.Array
    """[P, Hv]"""


@dataclass(frozen=True)
class DeltaStage:
    """What stages with a delta rule have in common; a call of one layer is a subclass's.

    Layers must be numbered from 0 and come in order: layer 0 finds no record under way.

    Attributes:
        shape: heads and widths.
        block: sequences and tokens.
        numerics: the policy; the delta rule is f32 under all of them.
        eps: of the norm.
        held: dtype of the tails in HBM, the activation dtype or f32.
        slots: states that VMEM holds at a time; more of them load before the rule starts.
        together: tokens that are scheduled as one piece of code, from 2 on with a slot for every
            sequence. A single token leaves the vector unit idle, unless it has dozens of heads.

    Raises:
        ValueError: tails that would lose precision, no slots or fewer than ``together`` needs.
    """

    shape: DeltaShape
    block: Block
    numerics: Numerics
    eps: float
    held: Any
    slots: int = field(default=2, kw_only=True)
    together: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        held = jnp.dtype(self.held)
        if held not in (jnp.float32, self.numerics.activation):
            raise ValueError(
                f"tails held as {held} would not keep {self.numerics.activation} activations;"
                f" hold them as {self.numerics.activation} or float32"
            )
        if min(self.slots, self.together) < 1:
            raise ValueError(
                f"states need at least 1 slot and 1 token at a time, not {self.slots} and"
                f" {self.together}"
            )
        if self.together > 1 and self.slots < self.block.sequences:
            raise ValueError(
                f"{self.together} tokens together need a slot for each of"
                f" {self.block.sequences} sequences, not {self.slots}"
            )

    def scratch(self) -> DeltaScratch:
        """An entry of ``scratch_shapes``."""
        shape, rows = self.shape, self.block.padded

        def wide(*sizes: int) -> Any:
            return pltpu.VMEM(sizes, jnp.float32)

        tail = (self.block.sequences, shape.tail_rows, shape.channels)
        return DeltaScratch(
            tails=pltpu.VMEM(tail, jnp.dtype(self.held)),
            states=wide(self.slots, shape.value_heads, shape.key_dim, shape.value_dim),
            queries=wide(rows, shape.key_width),
            keys=wide(rows, shape.key_width),
            values=wide(rows, shape.value_width),
            decay=wide(rows, shape.spread_width),
            beta=wide(rows, shape.value_width),
            outputs=wide(rows, shape.value_width),
            record=wide(rows, shape.record_width),
            tail_sem=pltpu.SemaphoreType.DMA,
            state_sems=pltpu.SemaphoreType.DMA((self.slots,)),
            record_sem=pltpu.SemaphoreType.DMA,
        )

    def start(self, scratch: DeltaScratch, memory: DeltaMemory, where: Where, layer: Any) -> None:
        """Starts loading all tails, and the states of as many sequences as there are slots.

        The buffers are free since the end of the layer before, so this may stand as early as the
        input projection.
        """
        for s in range(self.block.sequences):
            self._load_tail(scratch, memory, where, layer, s).start()
        for s in range(min(self.slots, self.block.sequences)):
            self._load_state(scratch, memory, where, layer, s).start()

    def drain(self, scratch: DeltaScratch, records: Any) -> None:
        """Waits for the record of the last layer."""
        self._send_record(scratch, records, 0).wait()

    def _receive(
        self, scratch: DeltaScratch, memory: DeltaMemory, where: Where, layer: Any, records: Any
    ) -> None:
        """Waits until the record of the layer before has left and the tails are here."""
        pl.when(layer > 0)(lambda: self._send_record(scratch, records, layer).wait())
        for s in range(self.block.sequences):
            self._load_tail(scratch, memory, where, layer, s).wait()

    def _load_tail(
        self, scratch: DeltaScratch, memory: DeltaMemory, where: Where, layer: Any, s: int
    ) -> Any:
        source = memory.tail.at[layer, where.rows[s]]
        return pltpu.make_async_copy(source, scratch.tails.at[s], scratch.tail_sem)

    def _load_state(
        self, scratch: DeltaScratch, memory: DeltaMemory, where: Where, layer: Any, s: Any
    ) -> Any:
        slot = lax.rem(s, self.slots)
        source = memory.delta.at[layer, where.rows[s]]
        return pltpu.make_async_copy(source, scratch.states.at[slot], scratch.state_sems.at[slot])

    def _send_record(self, scratch: DeltaScratch, records: Any, layer: Any) -> Any:
        return pltpu.make_async_copy(scratch.record, records.at[layer], scratch.record_sem)

    def _prepare(self, scratch: DeltaScratch, tokens: TokenInputs) -> None:
        """Everything that acts on a token alone, for all rows at once."""
        shape, record = self.shape, self.shape.record
        tails = scratch.tails[...].astype(jnp.float32)
        convolved = convolve_rows(
            self.block,
            [tails[s, : shape.taps - 1] for s in range(self.block.sequences)],
            tokens.channels,
            tokens.taps,
            self.numerics,
        ).astype(jnp.float32)
        width = shape.key_width
        keys = _unit(convolved[:, width : 2 * width], shape.key_heads)
        scratch.queries[...] = _unit(convolved[:, :width], shape.key_heads) * shape.key_dim**-0.5
        scratch.keys[...] = keys
        scratch.values[...] = convolved[:, 2 * width :]
        scratch.decay[...] = shape.spread_decays(tokens.decay)
        scratch.beta[...] = spread(tokens.beta, shape.value_dim)
        self._put(scratch, record.inputs, tokens.channels)
        self._put(scratch, record.key, keys)
        self._put(scratch, record.decay, tokens.decay)
        self._put(scratch, record.update, None)

    def _put(self, scratch: DeltaScratch, span: Span, part: jax.Array | None) -> None:
        """Writes a part of all rows' records, and zeros where it does not reach."""
        if part is None or span.start + span.size < span.stop:
            rows = self.block.padded
            scratch.record[:, span.whole] = jnp.zeros((rows, span.stop - span.start))
        if part is not None:
            scratch.record[:, span.columns] = part

    def _run_sequences(
        self, scratch: DeltaScratch, memory: DeltaMemory, where: Where, layer: Any
    ) -> None:
        """The delta rule of all sequences, in order; a slot that is done loads its next state."""
        sequences, tokens = self.block.sequences, self.block.tokens
        if self.together > 1:
            self._run_resident(scratch, memory, where, layer)
            return

        @pl.loop(0, sequences)
        def _(s: jax.Array) -> None:
            self._load_state(scratch, memory, where, layer, s).wait()

            @pl.loop(0, tokens)
            def _(t: jax.Array) -> None:
                self._token(scratch, lax.rem(s, self.slots), s * tokens + t)

            @pl.when(s + self.slots < sequences)
            def _() -> None:
                self._load_state(scratch, memory, where, layer, s + self.slots).start()

    def _run_resident(
        self, scratch: DeltaScratch, memory: DeltaMemory, where: Where, layer: Any
    ) -> None:
        """The same with all states in VMEM: no wait keeps tokens apart."""
        for s in range(self.block.sequences):
            self._load_state(scratch, memory, where, layer, s).wait()

        @pl.loop(0, self.block.rows, unroll=gcd(self.block.rows, self.together))
        def _(row: jax.Array) -> None:
            self._token(scratch, lax.div(row, self.block.tokens), row)

    def _token(self, scratch: DeltaScratch, slot: Any, row: Any) -> None:
        """One token of one sequence: moves the state in its slot, leaves output and update."""
        shape, at = self.shape, pl.ds(row, 1)
        queries = as_columns(scratch.queries[at, :], shape.key_heads)
        keys = as_columns(scratch.keys[at, :], shape.key_heads)
        values, beta = scratch.values[at, :], scratch.beta[at, :]
        factors = shape.decay_factors(scratch.decay[at, :])
        outputs: list[jax.Array] = []
        updates: list[jax.Array] = []
        for head in range(shape.key_heads):
            square = (shape.key_dim, shape.value_dim)
            query = jnp.broadcast_to(queries[:, head : head + 1], square)
            key = jnp.broadcast_to(keys[:, head : head + 1], square)
            members, lanes = shape.readers(head)
            states = scratch.states.at[slot, members]
            states[...] = decayed_states(states[...], factors[members])
            own = [split_heads(part[:, lanes], shape.group) for part in (values, beta)]
            results = [
                delta_rule(decayed, HeadToken(query, key, value, rate))
                for decayed, value, rate in zip(states[...], *own, strict=True)
            ]
            states[...] = jnp.stack([moved for moved, _, _ in results])
            outputs += [out for _, out, _ in results]
            updates += [update for _, _, update in results]
        scratch.outputs[at, :] = jnp.concatenate(outputs, axis=1)
        scratch.record[at, shape.record.update.columns] = jnp.concatenate(updates, axis=1)

    def _heads(self, scratch: DeltaScratch) -> list[jax.Array]:
        """Each head's outputs [P, V], rounded; zero in padding rows."""
        shape, rows = self.shape, self.block.padded
        real = lax.broadcasted_iota(jnp.int32, (rows, shape.value_width), 0) < self.block.rows
        outputs = self.numerics.round(jnp.where(real, scratch.outputs[...], 0.0))
        return split_heads(outputs, shape.value_heads)


def _unit(x: jax.Array, heads: int) -> jax.Array:
    """Each head's vector at unit length."""
    return jnp.concatenate([l2_norm(part) for part in split_heads(x, heads)], axis=1)
