"""The whole model in plain JAX, one sequence, no cache, straight from the checkpoint's tensors.

This is the text to read to understand the model, and the truth that backends are compared with.
Equations and rounding points follow the Kimi K3 modelling code.

Letters: N tokens, D hidden, V vocabulary, H heads, K KDA head dim, C MLA latent width, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from kda_mla_kernels import kda, mla, moe, norm, residual
from kda_mla_kernels.numerics import Numerics

from megakernel_kimi.config import KimiConfig
from megakernel_kimi.tensors import LM_HEAD, PREFIX

__all__ = ["Trace", "forward"]

Tensors = Mapping[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass
class KdaTrace:
    """One KDA layer."""

    conv_inputs: list[jax.Array]
    """q, k, v [N, H K] before the convolution"""
    conv_outputs: list[jax.Array]
    """q, k, v [N, H, K] after convolution and SiLU, before the unit length"""
    rate: jax.Array
    """[N, H, K] the decay's projection, without its bias"""
    write: jax.Array
    """[N, H] beta before the sigmoid"""
    out: jax.Array
    """[N, H, K] what the recurrence gives, before the gated norm"""
    state: jax.Array
    """f32 [H, K, K] (key, value) after the last token"""


@jax.tree_util.register_dataclass
@dataclass
class Trace:
    """Everything a comparison may want to look at, filled by :func:`forward`.

    Lists hold one entry per layer, or per layer of the kind that the name says.
    """

    attn_mix: list[jax.Array] = field(default_factory=list)
    """[N, D] what the mixer's norm reads"""
    attn_in: list[jax.Array] = field(default_factory=list)
    """[N, D] after it"""
    attn_out: list[jax.Array] = field(default_factory=list)
    """[N, D] output of the mixer"""
    mlp_mix: list[jax.Array] = field(default_factory=list)
    mlp_in: list[jax.Array] = field(default_factory=list)
    mlp_out: list[jax.Array] = field(default_factory=list)
    prefix: list[jax.Array] = field(default_factory=list)
    """[N, D] the sum inside the current block after each layer: a drafter's features"""
    kda: list[KdaTrace] = field(default_factory=list)
    mla_rows: list[jax.Array] = field(default_factory=list)
    """[N, C + shared dims] what an MLA layer caches"""
    moe: list[moe.LatentMoeTrace] = field(default_factory=list)
    router_weights: list[jax.Array] = field(default_factory=list)
    """f32 [N, E] per MoE layer, 0 where an expert was not chosen"""
    embedding: jax.Array | None = None
    """[N, D]"""
    blocks: jax.Array | None = None
    """[blocks, N, D] finished blocks; the first is the embedding"""
    output_mix: jax.Array | None = None
    """[N, D]"""
    final_norm: jax.Array | None = None
    """[N, D] input of the head"""


@dataclass(frozen=True)
class _Model:
    """A config, a policy and the tensors of one layer (or of the whole model)."""

    config: KimiConfig
    numerics: Numerics
    tensors: Tensors
    prefix: str

    def at(self, suffix: str) -> _Model:
        return _Model(self.config, self.numerics, self.tensors, self.prefix + suffix)

    def tensor(self, name: str) -> jax.Array:
        return jnp.asarray(self.tensors[self.prefix + name])

    def project(self, x: jax.Array, name: str) -> jax.Array:
        """``round(W x)`` with a stored [out, in] matrix."""
        weight = self.numerics.round(self.tensor(name + ".weight"))
        return self.numerics.round(self.numerics.dot_rows(x, weight))

    def norm(self, x: jax.Array, name: str, eps: float | None = None) -> jax.Array:
        eps = self.config.rms_norm_eps if eps is None else eps
        return norm.stepwise_rms_norm(x, self.tensor(name + ".weight"), eps, self.numerics)

    def mlp(self, name: str) -> moe.MlpWeights:
        return moe.MlpWeights(
            *(self.tensor(f"{name}{part}_proj.weight") for part in ("gate", "up", "down"))
        )


@dataclass
class _Residual:
    """The attention residual: finished blocks and the sum inside the current one."""

    prefix: jax.Array | None
    """[N, D]; None right after a block was closed"""
    blocks: jax.Array
    """[blocks, N, D]"""

    def read(self, model: _Model, name: str) -> jax.Array:
        """What a sublayer reads, mixed by the tensors ``{name}_norm`` and ``{name}_proj``."""
        weight, projection = (model.tensor(f"{name}_{part}.weight") for part in ("norm", "proj"))
        vector = residual.fold(weight, projection[0])
        assert self.prefix is not None, "a sublayer reads after the mixer has started the block"
        eps = model.config.rms_norm_eps
        return residual.mix(self.blocks, self.prefix, vector, eps, model.numerics)

    def close_block(self) -> None:
        """Keeps the prefix as a finished block; the next sum starts a new one."""
        assert self.prefix is not None, "a block cannot be closed twice"
        self.blocks = jnp.concatenate([self.blocks, self.prefix[None]])
        self.prefix = None

    def add(self, update: jax.Array, numerics: Numerics) -> jax.Array:
        """Adds a sublayer's output and returns the new prefix."""
        wide = update.astype(jnp.float32)
        past = 0.0 if self.prefix is None else self.prefix.astype(jnp.float32)
        self.prefix = numerics.round(past + wide)
        return self.prefix


def kimi_delta_attention(model: _Model, x: jax.Array, trace: Trace) -> jax.Array:
    """Linear attention over a whole sequence: normed [N, D] -> [N, D]."""
    config, numerics, tokens = model.config, model.numerics, x.shape[0]
    heads, dim = config.kda_heads, config.kda_head_dim
    before, after = [], []
    for part in "qkv":
        channels = model.project(x, f"{part}_proj")
        taps = model.tensor(f"{part}_conv1d.weight")[:, 0].T
        start = jnp.zeros((1, taps.shape[0] - 1, taps.shape[1]), channels.dtype)
        convolved = kda.causal_convolution(start, channels[None], taps, numerics)
        before.append(channels)
        after.append(convolved.reshape(tokens, heads, dim))
    q, k = kda.unit_heads(after[0], after[1])
    rate = model.project(model.project(x, "f_a_proj"), "f_b_proj").reshape(tokens, heads, dim)
    write = model.project(x, "b_proj")
    a_log, dt_bias = model.tensor("A_log")[:heads], model.tensor("dt_bias").reshape(heads, dim)
    log_decay, beta = kda.gates(rate, write, a_log, dt_bias, config.gate_lower_bound)
    inputs = kda.DeltaInputs(q, k, after[2].astype(jnp.float32), log_decay, beta)
    state, out = kda.sequence(jnp.zeros((heads, dim, dim)), inputs)
    out = numerics.round(out)
    trace.kda.append(KdaTrace(before, after, rate, write, out, state))
    gate = model.project(x, "g_proj").reshape(tokens, heads, dim)
    gated = norm.sigmoid_gated_rms_norm(
        out, gate, model.tensor("o_norm.weight"), config.rms_norm_eps, numerics
    )
    return model.project(gated.reshape(tokens, -1), "o_proj")


def latent_attention(model: _Model, x: jax.Array, trace: Trace) -> jax.Array:
    """Softmax attention over latents over a whole sequence: normed [N, D] -> [N, D]."""
    config, numerics, tokens = model.config, model.numerics, x.shape[0]
    heads, width = config.num_attention_heads, config.kv_lora_rank
    low = model.norm(model.project(x, "q_a_proj"), "q_a_layernorm", config.lora_norm_eps)
    q = model.project(low, "q_b_proj").reshape(tokens, heads, config.qk_head_dim)
    latent, shared = jnp.split(model.project(x, "kv_a_proj_with_mqa"), [width], axis=-1)
    latent = model.norm(latent, "kv_a_layernorm", config.lora_norm_eps)
    rows = jnp.concatenate([latent, shared], axis=-1)
    trace.mla_rows.append(rows)
    up = mla.split_up(model.tensor("kv_b_proj.weight"), heads, config.qk_nope_head_dim)
    out = mla.expanded_attention(q[None], rows[None], up, jnp.arange(tokens)[None], numerics)[0]
    gate = model.project(x, "g_proj").reshape(out.shape)
    gated = mla.output_gate(out, gate, numerics)
    return model.project(gated.reshape(tokens, -1), "o_proj")


def feed_forward(model: _Model, x: jax.Array, layer: int, trace: Trace) -> jax.Array:
    """The dense layer or the mixture of experts: normed [N, D] -> [N, D]."""
    config = model.config
    rule = moe.LatentMoeRule(
        moe.RouterRule(
            config.num_experts_per_token, config.moe_renormalize, config.routed_scaling_factor
        ),
        config.situ_beta,
        config.situ_linear_beta,
        config.rms_norm_eps,
    )
    if layer in config.dense_layers:
        return model.mlp("mlp.")(x, rule.activation(model.numerics), model.numerics)
    at = model.at("block_sparse_moe.")
    weights = moe.LatentMoeWeights(
        router=at.tensor("gate.weight"),
        router_bias=at.tensor("gate.e_score_correction_bias"),
        down=at.tensor("routed_expert_down_proj.weight"),
        norm=at.tensor("routed_expert_norm.weight"),
        up=at.tensor("routed_expert_up_proj.weight"),
        experts=moe.ExpertWeights(
            *(at.tensor(f"experts.{name}.weight") for name in ("w1", "w3", "w2"))
        ),
        shared=at.mlp("shared_experts."),
    )
    out, seen = moe.latent_moe(x, weights, rule, model.numerics)
    trace.moe.append(seen)
    trace.router_weights.append(moe.dense_weights(seen.routes, config.num_experts))
    return out


def decoder_layer(model: _Model, layer: int, stream: _Residual, trace: Trace) -> None:
    """One layer: mixer, then feed-forward, each reading a mixture and adding to the prefix."""
    config, numerics = model.config, model.numerics
    mixed = stream.read(model, "self_attention_res")
    if config.starts_block(layer):
        stream.close_block()
    normed = model.norm(mixed, "input_layernorm")
    linear = config.layer_kind(layer) == "kda"
    mixer = kimi_delta_attention if linear else latent_attention
    out = mixer(model.at("self_attn."), normed, trace)
    stream.add(out, numerics)
    for seen, values in zip((trace.attn_mix, trace.attn_in, trace.attn_out), (mixed, normed, out)):
        seen.append(values)

    mixed = stream.read(model, "mlp_res")
    normed = model.norm(mixed, "post_attention_layernorm")
    out = feed_forward(model, normed, layer, trace)
    trace.prefix.append(stream.add(out, numerics))
    for seen, values in zip((trace.mlp_mix, trace.mlp_in, trace.mlp_out), (mixed, normed, out)):
        seen.append(values)


def forward(
    config: KimiConfig, numerics: Numerics, tensors: Tensors, tokens: jax.Array
) -> tuple[jax.Array, Trace]:
    """Logits of every position of one sequence.

    Args:
        tensors: by checkpoint name, stored orientation, any float dtype, routed experts decoded
            and stacked as :func:`megakernel_kimi.checkpoint.read_tensors` gives them.
        tokens: i32 [N].

    Returns:
        f32 logits [N, V] and the trace of everything on the way.
    """
    trace = Trace()
    model = _Model(config, numerics, tensors, PREFIX)
    trace.embedding = numerics.round(model.tensor("embed_tokens.weight")[tokens])
    stream = _Residual(trace.embedding, jnp.zeros((0, *trace.embedding.shape), numerics.activation))
    for layer in range(config.num_hidden_layers):
        decoder_layer(model.at(f"layers.{layer}."), layer, stream, trace)
    trace.blocks = stream.blocks
    trace.output_mix = stream.read(model, "output_attn_res")
    trace.final_norm = model.norm(trace.output_mix, "norm")
    head = numerics.round(jnp.asarray(tensors[LM_HEAD]))
    return numerics.dot_rows(trace.final_norm, head), trace
