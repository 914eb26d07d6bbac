"""The whole model in plain JAX, one sequence, no cache, straight from the checkpoint's tensors.

This is the text to read to understand the model, and the truth that backends are compared with.
Equations and rounding points follow the Qwen3.5 modelling code.

Letters: N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from kda_mla_kernels import gdn, gqa, mlp, norm
from kda_mla_kernels.numerics import Numerics

from megakernel_qwen.config import QwenConfig
from megakernel_qwen.tensors import HEAD, layer_prefix, text_prefix

__all__ = ["Trace", "forward"]

Tensors = Mapping[str, jax.Array]


@dataclass
class Trace:
    """Everything a comparison may want to look at, filled by :func:`forward`."""

    hidden: list[jax.Array] = field(default_factory=list)
    """[N, D] embedding, then the residual stream after each layer"""
    mixer_out: list[jax.Array] = field(default_factory=list)
    """[N, D] per layer, before the residual sum"""
    mlp_out: list[jax.Array] = field(default_factory=list)
    """[N, D] per layer, before the residual sum"""
    conv_inputs: list[jax.Array] = field(default_factory=list)
    """[N, C] per linear layer, before the convolution"""
    delta_states: list[jax.Array] = field(default_factory=list)
    """f32 [Hv, K, V] per linear layer, after the last token"""
    final_norm: jax.Array | None = None
    """[N, D] input of the head"""


@dataclass(frozen=True)
class _Model:
    """A config, a policy and the tensors of one layer (or of the whole model)."""

    config: QwenConfig
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

    def zero_centred_norm(self, x: jax.Array, name: str) -> jax.Array:
        gain = 1.0 + self.tensor(name + ".weight").astype(jnp.float32)
        return norm.rms_norm(x, gain, self.config.rms_norm_eps, self.numerics)

    def add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return self.numerics.round(x.astype(jnp.float32) + y.astype(jnp.float32))


def gated_delta_net(model: _Model, x: jax.Array, trace: Trace) -> jax.Array:
    """Linear attention over a whole sequence: normed [N, D] -> [N, D]."""
    config, numerics, tokens = model.config, model.numerics, x.shape[0]
    mixed = model.project(x, "in_proj_qkv")
    z, b, a = (model.project(x, f"in_proj_{name}") for name in "zba")
    taps = model.tensor("conv1d.weight")[:, 0].T
    start = jnp.zeros((1, taps.shape[0] - 1, config.conv_channels), mixed.dtype)
    channels = gdn.causal_convolution(start, mixed[None], taps, numerics)[0]
    dims = (config.linear_key_head_dim, config.linear_value_head_dim)
    heads = config.linear_num_value_heads
    q, k, v = gdn.split_heads(channels, config.linear_num_key_heads, dims[0], heads, dims[1])
    log_decay, beta = gdn.gates(a, b, model.tensor("A_log"), model.tensor("dt_bias"), numerics)
    state = jnp.zeros((heads, *dims))
    state, out = gdn.sequence(state, gdn.GdnInputs(q, k, v, log_decay, beta))
    trace.conv_inputs.append(mixed)
    trace.delta_states.append(state)
    gated = norm.gated_rms_norm(
        numerics.round(out),
        z.reshape(tokens, heads, dims[1]),
        model.tensor("norm.weight"),
        config.rms_norm_eps,
        numerics,
    )
    return model.project(gated.reshape(tokens, -1), "out_proj")


def gated_attention(model: _Model, x: jax.Array) -> jax.Array:
    """Softmax attention with an output gate over a whole sequence: normed [N, D] -> [N, D]."""
    config, numerics, tokens = model.config, model.numerics, x.shape[0]
    both = model.project(x, "q_proj").reshape(tokens, -1, 2, config.head_dim)
    q, gate = both[:, :, 0], both[:, :, 1]
    k, v = (model.project(x, f"{name}_proj").reshape(tokens, -1, config.head_dim) for name in "kv")
    positions = jnp.arange(tokens)
    angles = gqa.rotary_angles(positions, config.rotary_dim, config.rope_theta, numerics)
    q = gqa.apply_rotary(model.zero_centred_norm(q, "q_norm"), angles, numerics)
    k = gqa.apply_rotary(model.zero_centred_norm(k, "k_norm"), angles, numerics)
    keys, values = (jnp.moveaxis(part, 0, 1)[None] for part in (k, v))
    out = gqa.plain_attention(q[None], keys, values, positions[None], numerics)[0]
    gated = gqa.output_gate(out, gate, numerics)
    return model.project(gated.reshape(tokens, -1), "o_proj")


def feed_forward(model: _Model, x: jax.Array) -> jax.Array:
    """``down(silu(gate x) · up x)``: normed [N, D] -> [N, D]."""
    gate, up = model.project(x, "gate_proj"), model.project(x, "up_proj")
    return model.project(mlp.swiglu(gate, up, model.numerics), "down_proj")


def forward(
    config: QwenConfig, numerics: Numerics, tensors: Tensors, tokens: jax.Array
) -> tuple[jax.Array, Trace]:
    """Logits of every position of one sequence.

    Args:
        tensors: by checkpoint name, stored orientation, any float dtype.
        tokens: i32 [N].

    Returns:
        f32 logits [N, V] and the trace of everything on the way.
    """
    trace = Trace()
    model = _Model(config, numerics, tensors, text_prefix(frozenset(tensors)))
    x = numerics.round(model.tensor("embed_tokens.weight")[tokens])
    trace.hidden.append(x)
    for index, kind in enumerate(config.layer_types):
        layer = _Model(config, numerics, tensors, layer_prefix(model.prefix, index))
        normed = layer.zero_centred_norm(x, "input_layernorm")
        if kind == "linear_attention":
            mixed = gated_delta_net(layer.at("linear_attn."), normed, trace)
        else:
            mixed = gated_attention(layer.at("self_attn."), normed)
        x = layer.add(x, mixed)
        fed = feed_forward(layer.at("mlp."), layer.zero_centred_norm(x, "post_attention_layernorm"))
        x = layer.add(x, fed)
        trace.mixer_out.append(mixed)
        trace.mlp_out.append(fed)
        trace.hidden.append(x)
    trace.final_norm = model.zero_centred_norm(x, "norm")
    table = tensors[model.prefix + "embed_tokens.weight" if config.tied_embeddings else HEAD]
    return numerics.dot_rows(trace.final_norm, numerics.round(jnp.asarray(table))), trace
