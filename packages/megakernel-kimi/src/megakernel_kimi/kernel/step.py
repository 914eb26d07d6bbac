"""THE kernel: a whole decode step, or a verify step, in one call.

It reads weights and state and returns logits, tokens and the records that a commit applies. The
weight stream runs through all of it; routed experts are loaded as soon as they are chosen.

Letters: M rows, P padded rows, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from vmem_pool.stream import Stream, matvec

from megakernel_kimi.kernel.experts import mixture_of_experts, router_loads
from megakernel_kimi.kernel.loads import Turns
from megakernel_kimi.kernel.mixers import beta_loads, kimi_delta_attention, latent_attention
from megakernel_kimi.kernel.plan import DENSE, MLA, MOE, StepPlan, SublayerTable
from megakernel_kimi.kernel.refs import (
    Memory,
    Refs,
    Scalars,
    StepOutputs,
    StepScratch,
    planned_stream,
)
from megakernel_kimi.kernel.weights import MIX, NORM, KernelWeights

__all__ = ["run_step"]


@dataclass(frozen=True)
class Step:
    """The stages of one call as methods."""

    refs: Refs

    def start(self) -> None:
        """Starts every load that needs nothing but the arguments."""
        refs, plan, scratch = self.refs, self.refs.plan, self.refs.scratch
        plan.barrier.signal()
        # Before the ring, whose loads would keep them waiting: the first stages need them.
        plan.embedding.start(
            scratch.embedding, refs.weights.embedding, refs.scalars.tokens, plan.first_id()
        )
        self._vectors.start(jnp.int32(0))
        beta_loads(refs).start(jnp.int32(0))
        plan.kda.start(scratch.kda, refs.memory.kda, refs.scalars.where, 0)
        refs.stream.start()
        router_loads(refs).start(jnp.int32(0))
        plan.mla.start(scratch.mla, refs.memory.mla, refs.scalars.counted, 0)

    def embed(self) -> None:
        """prefix = the tokens' embedding."""
        refs, plan, scratch = self.refs, self.refs.plan, self.refs.scratch
        own = plan.embedding(
            scratch.embedding, refs.weights.embedding, refs.scalars.tokens, plan.first_id()
        )
        plan.barrier.wait()
        handle = plan.reduce.start(scratch.reduce, own, 0)
        plan.residual.reset(scratch.residual)
        self._vectors.take(jnp.int32(0))
        self._add(plan.reduce.finish(handle))

    def sublayer(self, number: jax.Array, pos: Any) -> Any:
        """A mixer or a feed-forward part; returns where the stream stands."""
        refs, plan, scratch = self.refs, self.refs.plan, self.refs.scratch
        at = refs.sublayer(number)
        self._vectors.start(number + 1)
        self._keep_feature(at)
        self._read(number)
        pl.when(at.closes == 1)(lambda: plan.residual.close_block(scratch.residual, at.blocks))
        pos = lax.cond(at.kind < DENSE, self._mixer, self._feed_forward, at.kind, at.index, pos)
        self._exchange(at, number)
        return pos

    def _exchange(self, at: SublayerTable, number: Any) -> None:
        """Adds the sublayer's result to the prefix; the next read is prepared in the meantime."""
        is_sum, plan, scratch = at.kind != MOE, self.refs.plan, self.refs.scratch

        @pl.when(is_sum)
        def _() -> None:
            own = scratch.partial[...][: plan.block.rows]
            plan.reduce.start(scratch.reduce, own, at.sums)

        @pl.when(jnp.logical_not(is_sum))
        def _() -> None:
            columns = scratch.around.out[...]
            plan.gather_hidden.start(scratch.gather_hidden, columns, at.index)

        self._prepare(number + 1)

        @pl.when(is_sum)
        def _() -> None:
            self._add(plan.reduce.finish(plan.reduce.resume(scratch.reduce, at.sums)))

        @pl.when(jnp.logical_not(is_sum))
        def _() -> None:
            handle = plan.gather_hidden.resume(scratch.gather_hidden, at.index)
            (whole,) = plan.gather_hidden.finish(handle, (plan.residual.hidden,))
            plan.residual.add(scratch.residual, whole)

    def head(self, pos: Any) -> None:
        """Logits of this rank's vocabulary and the best token of all."""
        refs, plan, scratch = self.refs, self.refs.plan, self.refs.scratch
        layers = plan.model.layout.config.num_hidden_layers
        if layers in plan.model.feature_layers:
            last = plan.model.feature_layers.index(layers)
            refs.out.features[last] = scratch.residual.prefix[...]
        self._read(jnp.int32(2 * layers))
        reader = refs.stream.segment("head", pos)
        matvec(
            reader,
            "head",
            scratch.normed,
            refs.out.logits,
            group=1,
            precision=plan.model.numerics.precision,
        )
        reader.done()
        plan.choose(scratch.arg_max, refs.out)

    def drain(self) -> None:
        """Waits for the records of the last layers."""
        self.refs.plan.kda.drain(self.refs.scratch.kda, self.refs.out.kda)
        self.refs.plan.mla.drain(self.refs.scratch.mla, self.refs.out.mla)

    @property
    def _vectors(self) -> Turns:
        scratch = self.refs.scratch.vectors
        return Turns(self.refs.weights.hidden, scratch.hidden, scratch.hidden_sems)

    def _prepare(self, number: Any) -> None:
        """What a sublayer's mixture can do before the prefix is complete."""
        vectors = self._vectors.take(number)[MIX : MIX + 1, :]
        blocks = self.refs.sublayer(number).blocks
        self.refs.plan.residual.prepare(self.refs.scratch.residual, blocks, vectors)

    def _read(self, number: Any) -> None:
        """normed = norm(mixture of the finished blocks and the prefix)."""
        plan, scratch = self.refs.plan, self.refs.scratch
        vectors = self._vectors.taken(number)
        mixed = plan.residual.mix(scratch.residual, vectors[MIX : MIX + 1, :])
        eps = plan.model.layout.config.rms_norm_eps
        scratch.normed[...] = self.refs.normed(mixed, vectors[NORM : NORM + 1, :], eps)

    def _add(self, total: jax.Array) -> None:
        """prefix += the sum of all ranks' partial results [M, D], rounded."""
        plan = self.refs.plan
        update = plan.model.numerics.round(plan.block.pad(total))
        plan.residual.add(self.refs.scratch.residual, update)

    def _mixer(self, kind: jax.Array, index: jax.Array, pos: Any) -> Any:
        return lax.cond(
            kind == MLA,
            lambda: latent_attention(self.refs, index, pos),
            lambda: kimi_delta_attention(self.refs, index, pos),
        )

    def _feed_forward(self, kind: jax.Array, index: jax.Array, pos: Any) -> Any:
        return lax.cond(
            kind == DENSE,
            lambda: self._dense(pos),
            lambda: mixture_of_experts(self.refs, index, pos),
        )

    def _dense(self, pos: Any) -> Any:
        plan, scratch = self.refs.plan, self.refs.scratch
        reader = self.refs.stream.segment("dense", pos)
        plan.dense(scratch.dense, reader, scratch.normed, scratch.partial)
        return reader.done()

    def _keep_feature(self, at: SublayerTable) -> None:
        @pl.when(at.feature < len(self.refs.plan.model.feature_layers))
        def _() -> None:
            self.refs.out.features[at.feature] = self.refs.scratch.residual.prefix[...]


def run_step(
    plan: StepPlan,
    scalars: Scalars,
    weights: KernelWeights,
    memory: Memory,
    out: StepOutputs,
    scratch: StepScratch,
) -> None:
    """The kernel body: references in, the whole step out."""
    assert scratch.ring is not None
    stream = Stream(planned_stream(plan), scratch.ring, weights.image)
    step = Step(Refs(plan, scalars, weights, memory, out, scratch, stream))
    step.start()
    step.embed()
    sublayers = 2 * plan.model.layout.config.num_hidden_layers
    pos = lax.fori_loop(0, sublayers, step.sublayer, jnp.int32(0))
    step.head(pos)
    step.drain()
