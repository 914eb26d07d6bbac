"""THE kernel: a whole decode step, or a verify step, in one call.

It reads weights and state and returns logits, tokens and the records that a commit applies. The
weight stream runs through all of it: nothing here waits for a load to be started.

Letters: M rows, P padded rows, D hidden, F feature layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels.backend.budget import buffers, fit_ring
from kda_mla_kernels.block import Where, by_sublanes
from kda_mla_kernels.gdn.kernel import GdnMemory
from kda_mla_kernels.gqa.kernel import GqaMemory
from kda_mla_kernels.head import Candidates
from kda_mla_kernels.norm import rms_norm
from vmem_pool.stream import Ring, Stream, StreamPlan, matvec, ring_scratch

from megakernel_qwen.kernel.plan import StepPlan
from megakernel_qwen.kernel.weights import KernelWeights, gate_rows, weight_shapes

__all__ = [
    "KernelRecords",
    "Scalars",
    "StepOutputs",
    "StepScratch",
    "planned_stream",
    "run_step",
    "step_scratch",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scalars:
    """What a step is told in SMEM."""

    tokens: Any
    """i32 [M]"""
    where: Where
    kinds: Any
    """i32 [3, layers], see ``KernelModel.kinds``"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelRecords:
    """What a step would have done to the state, and to which part of it."""

    gdn: Any
    """f32 [Nl, P, record width]"""
    gqa: Any
    """[Nf, P, record width]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutputs:
    """What a step returns, per rank."""

    tokens: Any
    """i32 [P, 1], VMEM: each row's best token of the whole vocabulary, equal on all ranks"""
    logits: Any
    """f32 [P, columns of the rank's head], VMEM"""
    candidates: Candidates | None
    """this rank's best, VMEM, if the plan asks for them"""
    features: Any
    """[F, P, D], VMEM"""
    gdn: Any
    """f32 [Nl, P, record width], HBM"""
    gqa: Any
    """[Nf, P, record width], HBM"""

    @property
    def records(self) -> KernelRecords:
        """What the commit applies."""
        return KernelRecords(self.gdn, self.gqa)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepScratch:
    """VMEM and semaphores of a step."""

    ring: Ring | None
    embedding: Any
    delta_net: Any
    attention: Any
    feed_forward: Any
    reduce: Any
    arg_max: Any
    x: Any
    """[P, D] the residual stream"""
    normed: Any
    """[P, D] input of a projection"""
    partial: Any
    """f32 [P, D] this rank's part of a projection's sum"""
    gdn_in: Any
    gdn_out: Any
    gqa_in: Any
    gqa_out: Any
    gates: Any
    """[2, B, D] gate projections of a linear layer, in turns"""
    gates_sems: Any


@cache
def planned_stream(plan: StepPlan) -> StreamPlan:
    """The model's stream with the ring that fits beside everything else in VMEM.

    Raises:
        ConfigError: none does; the message names the largest buffers.
    """
    model, outputs = plan.model, StepOutputs(**plan.output_shapes())
    weights = weight_shapes(model.layout, model.held)
    others = buffers(
        _work(plan),
        {"logits": outputs.logits, "candidates": outputs.candidates, "features": outputs.features},
        {"mixer_gain": weights.mixer_gain, "mlp_gain": weights.mlp_gain},
        weights.gdn,
        weights.gqa,
    )
    return fit_ring(model.stream, others)


def step_scratch(plan: StepPlan) -> StepScratch:
    """The entry of ``scratch_shapes``."""
    return replace(_work(plan), ring=ring_scratch(planned_stream(plan)))


def _work(plan: StepPlan) -> StepScratch:
    """All scratch but the ring."""
    model, rows = plan.model, plan.block.padded
    hidden, layout = model.layout.config.hidden_size, model.layout
    gdn, gqa = model.gdn_shape, model.gqa_shape

    def held(*shape: int) -> Any:
        return pltpu.VMEM(shape, model.held)

    return StepScratch(
        ring=None,
        embedding=plan.embedding.scratch(),
        delta_net=plan.delta_net.scratch(),
        attention=plan.attention.scratch(),
        feed_forward=plan.feed_forward.scratch(),
        reduce=plan.reduce.scratch(),
        arg_max=plan.arg_max.scratch(),
        x=held(rows, hidden),
        normed=held(rows, hidden),
        partial=pltpu.VMEM((rows, hidden), jnp.float32),
        gdn_in=held(rows, gdn.channels + gdn.value_width),
        gdn_out=held(rows, gdn.value_width),
        gqa_in=held(rows, gqa.projected_width),
        gqa_out=held(rows, gqa.query_width),
        gates=held(2, gate_rows(layout), hidden),
        gates_sems=pltpu.SemaphoreType.DMA((2,)),
    )


@dataclass(frozen=True)
class Step:
    """The references of one call, and its stages as methods. It exists while tracing."""

    plan: StepPlan
    scalars: Scalars
    weights: KernelWeights
    gdn: GdnMemory
    gqa: GqaMemory
    out: StepOutputs
    scratch: StepScratch
    stream: Stream

    def start(self) -> None:
        """Starts every load that needs nothing but the arguments."""
        plan, where = self.plan, self.scalars.where
        plan.barrier.signal()
        # Before the ring, whose loads would keep them waiting: the first stages need them.
        plan.embedding.start(
            self.scratch.embedding,
            self.weights.embedding,
            self.scalars.tokens,
            self.plan.first_id(),
        )
        self._load_gates(0).start()
        plan.delta_net.start(self.scratch.delta_net, self.gdn, where, 0)
        self.stream.start()
        plan.attention.start(self.scratch.attention, self.gqa, where, 0)

    def embed(self) -> None:
        """x = the tokens' embedding."""
        partial = self.plan.embedding(
            self.scratch.embedding,
            self.weights.embedding,
            self.scalars.tokens,
            self.plan.first_id(),
        )
        self.plan.barrier.wait()
        total = self.plan.reduce(self.scratch.reduce, partial, 0)
        self.scratch.x[...] = self.plan.model.numerics.round(self.plan.block.pad(total))

    def layer(self, layer: jax.Array, pos: Any) -> Any:
        """``x += mixer(norm(x))``, then ``x += mlp(norm(x))``; returns where the stream stands."""
        is_full, index, feature = (self.scalars.kinds[part, layer] for part in range(3))
        self._norm(self.weights.mixer_gain[layer])
        pos = self._mixer(is_full, index, pos)
        self._add_sum(1 + 2 * layer)
        self._norm(self.weights.mlp_gain[layer])
        reader = self.stream.segment("mlp", pos)
        scratch = self.scratch
        self.plan.feed_forward(scratch.feed_forward, reader, scratch.normed, scratch.partial)
        self._add_sum(2 + 2 * layer)
        if self.plan.model.feature_layers:
            self._keep_feature(feature)
        return reader.done()

    def head(self, pos: Any) -> None:
        """Logits of this rank's vocabulary and the best token of all."""
        scratch = self.scratch
        self._norm(self.weights.final_gain[...])
        reader = self.stream.segment("head", pos)
        precision = self.plan.model.numerics.precision
        matvec(reader, "head", scratch.normed, self.out.logits, precision=precision)
        reader.done()
        self.plan.choose(scratch.arg_max, self.out)

    def drain(self) -> None:
        """Waits for the records of the last layers."""
        self.plan.delta_net.drain(self.scratch.delta_net, self.out.gdn)
        self.plan.attention.drain(self.scratch.attention, self.out.gqa)

    @property
    def _counts(self) -> tuple[int, int]:
        """Linear and attention layers."""
        config = self.plan.model.layout.config
        return len(config.linear_layers), len(config.full_layers)

    def _norm(self, gain: jax.Array) -> None:
        """normed = norm(x)."""
        model = self.plan.model
        eps = model.layout.config.rms_norm_eps
        self.scratch.normed[...] = by_sublanes(
            lambda x: rms_norm(x, gain, eps, model.numerics), self.scratch.x[...]
        )

    def _add_sum(self, use: Any) -> None:
        """x += the sum of all ranks' partial results."""
        round_ = self.plan.model.numerics.round
        partial = self.scratch.partial[...][: self.plan.block.rows]
        total = round_(self.plan.block.pad(self.plan.reduce(self.scratch.reduce, partial, use)))
        x = self.scratch.x[...].astype(jnp.float32)
        self.scratch.x[...] = round_(x + total.astype(jnp.float32))

    def _mixer(self, is_full: jax.Array, index: jax.Array, pos: Any) -> Any:
        return lax.cond(
            is_full == 1,
            lambda: self._gated_attention(index, pos),
            lambda: self._gated_delta_net(index, pos),
        )

    def _gated_delta_net(self, index: jax.Array, pos: Any) -> Any:
        """partial = this rank's heads of a gated delta net; then the next one's loads start."""
        plan, scratch, where = self.plan, self.scratch, self.scalars.where
        numerics = plan.model.numerics
        reader = self.stream.segment("linear_attention", pos)
        matvec(reader, "in_proj", scratch.normed, scratch.gdn_in, precision=numerics.precision)
        out = plan.delta_net(
            scratch.delta_net,
            self.gdn,
            self.weights.gdn,
            scratch.gdn_in,
            self._project_gates(index),
            where,
            index,
            self.out.gdn,
        )

        @pl.when(index + 1 < self._counts[0])
        def _() -> None:
            self._load_gates(index + 1).start()
            plan.delta_net.start(scratch.delta_net, self.gdn, where, index + 1)

        scratch.gdn_out[...] = out
        matvec(reader, "out_proj", scratch.gdn_out, scratch.partial, precision=numerics.precision)
        return reader.done()

    def _gated_attention(self, index: jax.Array, pos: Any) -> Any:
        """partial = this rank's heads of an attention layer; then the next one's loads start."""
        plan, scratch, where = self.plan, self.scratch, self.scalars.where
        precision = plan.model.numerics.precision
        reader = self.stream.segment("full_attention", pos)
        matvec(reader, "in_proj", scratch.normed, scratch.gqa_in, precision=precision)
        out = plan.attention(
            scratch.attention,
            self.gqa,
            self.weights.gqa,
            scratch.gqa_in,
            where,
            index,
            self.out.gqa,
        )

        @pl.when(index + 1 < self._counts[1])
        def _() -> None:
            plan.attention.start(scratch.attention, self.gqa, where, index + 1)

        scratch.gqa_out[...] = out
        matvec(reader, "out_proj", scratch.gqa_out, scratch.partial, precision=precision)
        return reader.done()

    def _load_gates(self, index: Any) -> Any:
        slot = lax.rem(jnp.int32(index), jnp.int32(2))
        return pltpu.make_async_copy(
            self.weights.gates.at[index],
            self.scratch.gates.at[slot],
            self.scratch.gates_sems.at[slot],
        )

    def _project_gates(self, index: jax.Array) -> jax.Array:
        """f32 [P, 2·Hv]: b, then a, rounded."""
        numerics, layout = self.plan.model.numerics, self.plan.model.layout
        self._load_gates(index).wait()
        table = self.scratch.gates[lax.rem(index, jnp.int32(2))]
        both = numerics.dot_rows(self.scratch.normed[...], table)
        return numerics.round(both[:, : 2 * layout.value_heads]).astype(jnp.float32)

    def _keep_feature(self, feature: jax.Array) -> None:
        @pl.when(feature < len(self.plan.model.feature_layers))
        def _() -> None:
            self.out.features[feature] = self.scratch.x[...]


def run_step(
    plan: StepPlan,
    scalars: Scalars,
    weights: KernelWeights,
    gdn: GdnMemory,
    gqa: GqaMemory,
    out: StepOutputs,
    scratch: StepScratch,
) -> None:
    """The kernel body: references in, the whole step out."""
    assert scratch.ring is not None
    stream = Stream(planned_stream(plan), scratch.ring, weights.image)
    step = Step(plan, scalars, weights, gdn, gqa, out, scratch, stream)
    step.start()
    step.embed()
    layers = plan.model.layout.config.num_layers
    pos = lax.fori_loop(0, layers, step.layer, jnp.int32(0))
    step.head(pos)
    step.drain()
