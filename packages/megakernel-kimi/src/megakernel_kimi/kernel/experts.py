"""The mixture of experts of a layer, from the normed rows to columns of what the prefix gets.

Off-chip exchanges: latent and router logits in one message within the host, the sum of routed and
shared experts, and, with the caller, the gather of the output's columns within the host. The shared
experts run in the shadow of the first. With several rows, whose messages are long, their sum
travels while the routed experts are worked on.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from kda_mla_kernels.backend import RANKS
from vmem_pool.stream import matvec

from megakernel_kimi.kernel.loads import Turns
from megakernel_kimi.kernel.refs import Refs
from megakernel_kimi.kernel.weights import bias_columns

__all__ = ["mixture_of_experts", "router_loads"]


def router_loads(refs: Refs) -> Turns:
    """Biases of the choice and weights of the sum's norm, layer by layer of experts."""
    vectors = refs.scratch.vectors
    return Turns(refs.weights.router, vectors.router, vectors.router_sems)


def mixture_of_experts(refs: Refs, index: Any, pos: Any) -> Any:
    """Expert layer ``index``: leaves this rank's columns of what the prefix gets in ``around.out``.

    Returns where the stream stands.
    """
    plan, scratch = refs.plan, refs.scratch
    model, around = plan.model, scratch.around
    config, precision, round_ = model.layout.config, model.numerics.precision, model.numerics.round
    reader = refs.stream.segment("moe", pos)
    matvec(reader, "front", scratch.normed, around.front, precision=precision)
    handle = plan.gather_latent.start(scratch.gather_latent, around.front[...], index)
    plan.shared.widen(scratch.shared, reader, scratch.normed)
    plan.shared.narrow(scratch.shared, reader, scratch.partial)
    sums = plan.sum_experts.start(scratch.sum_experts, scratch.partial, index)
    wholes = (config.routed_expert_hidden_size, config.num_experts)
    latent, logits = plan.gather_latent.finish(handle, wholes)
    vectors = router_loads(refs).take(index)
    bias = vectors[:, : config.num_experts]
    scores, first = jax.nn.sigmoid(logits), _first_expert(refs)
    plan.experts.start(scratch.experts, refs.weights.experts, index, scores, bias, first)
    sums = plan.sum_experts.advance(sums)
    own = plan.experts(scratch.experts, refs.weights.experts, index, round_(latent))
    routed, shared = plan.sum_experts.finish(sums, own)
    around.normed[...] = _normed(refs, routed, vectors[:, bias_columns(model.layout) :])
    _next_loads(refs, index)
    # All its slots at once: as compiled, a loop over pairs of them takes half as long again.
    matvec(reader, "up", around.normed, around.up, group=4, precision=precision)
    out = round_(around.up[...]).astype(jnp.float32) + round_(shared).astype(jnp.float32)
    around.out[...] = round_(out)
    return reader.done()


def _first_expert(refs: Refs) -> Any:
    """Id of this rank's first expert."""
    layout = refs.plan.model.layout
    if layout.has_every_expert:
        return 0
    return lax.div(lax.axis_index(RANKS), jnp.int32(layout.expert_tp)) * layout.experts


def _normed(refs: Refs, routed: jax.Array, gain: jax.Array) -> jax.Array:
    model = refs.plan.model
    eps = model.layout.config.rms_norm_eps
    return refs.normed(model.numerics.round(routed), gain, eps)


def _next_loads(refs: Refs, index: Any) -> None:
    @pl.when(index + 1 < len(refs.plan.model.layout.config.moe_layers))
    def _() -> None:
        router_loads(refs).start(index + 1)
