"""Checkpoints of two layers with random weights, written in the published format."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from kda_mla_kernels.numerics import F32
from megakernel_qwen import reference
from megakernel_qwen.config import QwenConfig
from megakernel_qwen.tensors import expected_tensors
from safetensors.numpy import save_file
from tpu_collectives.testing import quick_options

NESTED = "model.language_model."


def small_config(**changes):
    """A ``config.json``; a change to ``...`` takes the field out of the text part."""
    text = {
        "full_attention_interval": 2,
        "head_dim": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 512,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "vocab_size": 48,
    }
    text = {name: value for name, value in (text | changes).items() if value is not ...}
    return {"model_type": "qwen3_5", "text_config": text}


def random_tensors(config, prefix=NESTED, dtype=ml_dtypes.bfloat16):
    """Every tensor of a model at the scale of trained ones: neighbouring layers matter."""
    random, tensors = np.random.default_rng(7), {}
    for name, shape in expected_tensors(QwenConfig.from_json(config), prefix).items():
        scale = 0.2 if len(shape) == 1 else 1.0 if "embed" in name else shape[-1] ** -0.5
        values = random.normal(size=shape) * scale
        tensors[name] = (values + name.endswith("linear_attn.norm.weight")).astype(dtype)
    return tensors


def write(folder, config, tensors, **files):
    """Writes a checkpoint folder; ``files`` are further JSON files by name without suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def reference_logits(config, tensors, tokens):
    """What our reference makes of some tokens."""

    def forward(tokens):
        return reference.forward(QwenConfig.from_json(config), F32, tensors, tokens)[0]

    quick = jax.jit(forward, compiler_options=quick_options())
    return np.asarray(quick(jnp.asarray(tokens)))
