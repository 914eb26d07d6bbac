"""The tensors of a checkpoint: names, shapes and dtypes, one table for all that reads them.

Matrices are stored [out, in]. Names follow the published Qwen3.5 checkpoints; the vision tower and
the multi-token-prediction head (``mtp.``) are not read.
"""

from __future__ import annotations

from megakernel_qwen.config import QwenConfig

__all__ = ["HEAD", "expected_tensors", "layer_prefix", "text_prefix"]

HEAD = "lm_head.weight"
MULTIMODAL_PREFIX = "model.language_model."
BARE_PREFIX = "model."


def text_prefix(names: set[str] | frozenset[str]) -> str:
    """The prefix of the text model's tensors: multimodal checkpoints nest it."""
    nested = any(name.startswith(MULTIMODAL_PREFIX) for name in names)
    return MULTIMODAL_PREFIX if nested else BARE_PREFIX


def layer_prefix(prefix: str, layer: int) -> str:
    return f"{prefix}layers.{layer}."


def _gdn_tensors(config: QwenConfig) -> dict[str, tuple[int, ...]]:
    hidden, values = config.hidden_size, config.linear_value_width
    heads = config.linear_num_value_heads
    return {
        "linear_attn.in_proj_qkv.weight": (config.conv_channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (config.conv_channels, 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _gqa_tensors(config: QwenConfig) -> dict[str, tuple[int, ...]]:
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        "self_attn.q_proj.weight": (2 * queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _common_tensors(config: QwenConfig) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }


def expected_tensors(config: QwenConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the text model needs."""
    table = {
        prefix + "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        prefix + "norm.weight": (config.hidden_size,),
    }
    if not config.tied_embeddings:
        table[HEAD] = (config.vocab_size, config.hidden_size)
    for layer, kind in enumerate(config.layer_types):
        mixer = _gdn_tensors(config) if kind == "linear_attention" else _gqa_tensors(config)
        for name, shape in (_common_tensors(config) | mixer).items():
            table[layer_prefix(prefix, layer) + name] = shape
    return table
