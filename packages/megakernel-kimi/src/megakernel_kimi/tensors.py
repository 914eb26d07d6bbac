"""Names, shapes and dtypes of a checkpoint's text tensors, and the parameter counts they imply.

Shapes are those of the files: matrices are [out, in]. Experts are MXFP4 pairs of byte arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megakernel_kimi.config import KimiConfig

__all__ = [
    "LM_HEAD",
    "PREFIX",
    "ParameterCounts",
    "TensorSpec",
    "active_parameters",
    "count_parameters",
    "dense_tensors",
    "expert_tensors",
    "global_tensors",
    "layer_tensors",
    "tensors",
]

PREFIX = "language_model.model."
LM_HEAD = "language_model.lm_head.weight"

_HEAD_PADDING = 128
"""``A_log`` has one entry per head, padded to a multiple of this; only the heads' are read."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: Literal["BF16", "F32", "U8"] = "BF16"
    """As safetensors spells it."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by how they are stored. Scales of MXFP4 groups are not parameters."""

    mxfp4: int
    bf16: int
    f32: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.mxfp4 + self.bf16 + self.f32


def global_tensors(config: KimiConfig) -> dict[str, TensorSpec]:
    """Tensors outside the layers."""
    hidden, vocab = config.hidden_size, config.vocab_size
    return {
        f"{PREFIX}embed_tokens.weight": TensorSpec((vocab, hidden)),
        f"{PREFIX}norm.weight": TensorSpec((hidden,)),
        f"{PREFIX}output_attn_res_norm.weight": TensorSpec((hidden,)),
        f"{PREFIX}output_attn_res_proj.weight": TensorSpec((1, hidden)),
        LM_HEAD: TensorSpec((vocab, hidden)),
    }


def layer_tensors(config: KimiConfig, layer: int) -> dict[str, TensorSpec]:
    """Tensors of one layer, routed experts excepted."""
    hidden = config.hidden_size
    own = {
        f"{name}.weight": TensorSpec((hidden,))
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attention_res_norm",
            "mlp_res_norm",
        )
    }
    for name in ("self_attention_res_proj", "mlp_res_proj"):
        own[f"{name}.weight"] = TensorSpec((1, hidden))
    attention = _kda if config.layer_kind(layer) == "kda" else _mla
    own |= {f"self_attn.{name}": spec for name, spec in attention(config).items()}
    if layer < config.first_k_dense_replace:
        own |= _mlp("mlp.", hidden, config.intermediate_size)
    else:
        own |= {f"block_sparse_moe.{name}": spec for name, spec in _moe(config).items()}
    return {f"{PREFIX}layers.{layer}.{name}": spec for name, spec in own.items()}


def _kda(config: KimiConfig) -> dict[str, TensorSpec]:
    hidden, width, dim = config.hidden_size, config.kda_width, config.kda_head_dim
    heads = config.kda_heads
    specs = {f"{name}_proj.weight": TensorSpec((width, hidden)) for name in "qkvg"}
    specs |= {
        f"{name}_conv1d.weight": TensorSpec((width, 1, config.conv_kernel_size), "F32")
        for name in "qkv"
    }
    return specs | {
        "o_proj.weight": TensorSpec((hidden, width)),
        "f_a_proj.weight": TensorSpec((dim, hidden)),
        "f_b_proj.weight": TensorSpec((width, dim)),
        "b_proj.weight": TensorSpec((heads, hidden)),
        "A_log": TensorSpec((-(-heads // _HEAD_PADDING) * _HEAD_PADDING,), "F32"),
        "dt_bias": TensorSpec((width,), "F32"),
        "o_norm.weight": TensorSpec((dim,), "F32"),
    }


def _mla(config: KimiConfig) -> dict[str, TensorSpec]:
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.mla_value_width
    query, latent = config.q_lora_rank, config.kv_lora_rank
    key_value = heads * (config.qk_nope_head_dim + config.v_head_dim)
    return {
        "q_a_proj.weight": TensorSpec((query, hidden)),
        "q_a_layernorm.weight": TensorSpec((query,)),
        "q_b_proj.weight": TensorSpec((heads * config.qk_head_dim, query)),
        "kv_a_proj_with_mqa.weight": TensorSpec((config.mla_cache_width, hidden)),
        "kv_a_layernorm.weight": TensorSpec((latent,)),
        "kv_b_proj.weight": TensorSpec((key_value, latent)),
        "g_proj.weight": TensorSpec((width, hidden)),
        "o_proj.weight": TensorSpec((hidden, width)),
    }


def _moe(config: KimiConfig) -> dict[str, TensorSpec]:
    hidden, latent, experts = (
        config.hidden_size,
        config.routed_expert_hidden_size,
        config.num_experts,
    )
    return {
        "gate.weight": TensorSpec((experts, hidden)),
        "gate.e_score_correction_bias": TensorSpec((experts,), "F32"),
        "routed_expert_down_proj.weight": TensorSpec((latent, hidden)),
        "routed_expert_norm.weight": TensorSpec((latent,)),
        "routed_expert_up_proj.weight": TensorSpec((hidden, latent)),
    } | _mlp("shared_experts.", hidden, config.shared_intermediate_size)


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, TensorSpec]:
    return {
        f"{prefix}gate_proj.weight": TensorSpec((width, hidden)),
        f"{prefix}up_proj.weight": TensorSpec((width, hidden)),
        f"{prefix}down_proj.weight": TensorSpec((hidden, width)),
    }


def expert_tensors(config: KimiConfig, layer: int, expert: int) -> dict[str, TensorSpec]:
    """The six tensors of one routed expert: w1 gate, w3 up, w2 down."""
    latent, width = config.routed_expert_hidden_size, config.moe_intermediate_size
    prefix = f"{PREFIX}layers.{layer}.block_sparse_moe.experts.{expert}."
    specs = {}
    for name, out, inputs in (("w1", width, latent), ("w3", width, latent), ("w2", latent, width)):
        specs[f"{prefix}{name}.weight_packed"] = TensorSpec((out, inputs // 2), "U8")
        specs[f"{prefix}{name}.weight_scale"] = TensorSpec((out, inputs // 32), "U8")
    return specs


def dense_tensors(config: KimiConfig) -> dict[str, TensorSpec]:
    """All text tensors but those of routed experts."""
    specs = global_tensors(config)
    for layer in range(config.num_hidden_layers):
        specs |= layer_tensors(config, layer)
    return specs


def tensors(config: KimiConfig) -> Iterator[tuple[str, TensorSpec]]:
    """Every text tensor with its name, layer by layer."""
    yield from global_tensors(config).items()
    for layer in range(config.num_hidden_layers):
        yield from layer_tensors(config, layer).items()
        if layer >= config.first_k_dense_replace:
            for expert in range(config.num_experts):
                yield from expert_tensors(config, layer, expert).items()


def count_parameters(config: KimiConfig) -> ParameterCounts:
    """Parameters of the text decoder, as stored (padding of ``A_log`` included)."""
    return _count(config, config.num_experts)


def active_parameters(config: KimiConfig) -> int:
    """Parameters that one token multiplies: its experts only, and no embedding table."""
    counts = _count(config, config.num_experts_per_token)
    return counts.total - config.vocab_size * config.hidden_size


def _count(config: KimiConfig, experts: int) -> ParameterCounts:
    dense = dense_tensors(config).values()
    expert = 3 * config.routed_expert_hidden_size * config.moe_intermediate_size
    return ParameterCounts(
        mxfp4=len(config.moe_layers) * experts * expert,
        bf16=sum(spec.size for spec in dense if spec.dtype == "BF16"),
        f32=sum(spec.size for spec in dense if spec.dtype == "F32"),
    )
