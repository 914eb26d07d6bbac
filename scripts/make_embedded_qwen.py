"""Writes the embedded Qwen checkpoint: config, tokenizer and seeded random weights.

    python scripts/make_embedded_qwen.py [--only weights] [--out FOLDER]

Weights, config and generation settings are the same bytes on every run. The tokenizer is trained on
documentation text of the Python that runs this script (3.11.7 made the one that ships), so another
Python version gives another tokenizer; ``--only weights`` leaves it alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import ml_dtypes
import numpy as np
from megakernel_qwen.chat import template
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

FOLDER = Path(__file__).parents[1] / "packages/megakernel-qwen/src/megakernel_qwen/embedded"
SEED = 38
VOCAB_ROWS = 2048
TEXT_TOKENS = 2000
LAYER_PATTERN = ("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2

# (token, special) in the order of the real ids; "special" decides whether plain decoding skips it.
CONTROL_TOKENS = (
    *((f"<|{name}|>", True) for name in ("endoftext", "im_start", "im_end")),
    *((f"<|{name}|>", True) for name in ("object_ref_start", "object_ref_end")),
    *((f"<|{name}|>", True) for name in ("box_start", "box_end", "quad_start", "quad_end")),
    *((f"<|{name}|>", True) for name in ("vision_start", "vision_end", "vision_pad")),
    *((f"<|{name}|>", True) for name in ("image_pad", "video_pad")),
    *((f"<{name}>", False) for name in ("tool_call", "/tool_call")),
    *((f"<|{name}|>", False) for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad")),
    *((f"<|{name}|>", False) for name in ("repo_name", "file_sep")),
    *((f"<{name}>", False) for name in ("tool_response", "/tool_response", "think", "/think")),
    *((f"<|{name}|>", True) for name in ("audio_start", "audio_end")),
    *((f"<{name}>", True) for name in ("tts_pad", "tts_text_bos", "tts_text_eod")),
    *((name, True) for name in ("<tts_text_bos_single>", "<|audio_pad|>")),
)

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def control_id(token: str) -> int:
    """Control tokens follow the text tokens, in the order of :data:`CONTROL_TOKENS`."""
    return TEXT_TOKENS + [name for name, _ in CONTROL_TOKENS].index(token)


def config() -> dict[str, Any]:
    """``config.json``: the real fields, at sizes that 1, 2, 4 and 8 ranks divide."""
    end = control_id("<|endoftext|>")
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": control_id("<|image_pad|>"),
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "bos_token_id": end,
            "dtype": "bfloat16",
            "eos_token_id": end,
            "full_attention_interval": 4,
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": 128,
            "initializer_range": 0.02,
            "intermediate_size": 256,
            "layer_types": list(LAYER_PATTERN),
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 32,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_value_head_dim": 32,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 4096,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 0,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 8,
            "num_hidden_layers": len(LAYER_PATTERN),
            "num_key_value_heads": 2,
            "output_gate_type": "swish",
            "pad_token_id": None,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000.0,
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": VOCAB_ROWS,
        },
        "tie_word_embeddings": True,
        "video_token_id": control_id("<|video_pad|>"),
        "vision_end_token_id": control_id("<|vision_end|>"),
        "vision_start_token_id": control_id("<|vision_start|>"),
    }


def generation_config() -> dict[str, Any]:
    """``generation_config.json``: both stop ids, and the sampling settings of thinking mode."""
    end = control_id("<|endoftext|>")
    return {
        "bos_token_id": end,
        "do_sample": True,
        "eos_token_id": [control_id("<|im_end|>"), end],
        "pad_token_id": end,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }


def tokenizer_config() -> dict[str, Any]:
    """``tokenizer_config.json``."""
    added = {
        str(control_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for token, special in CONTROL_TOKENS
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def corpus() -> list[str]:
    """Python's own documentation, and the template's fixed texts, often enough to count."""
    fixed = [template.TOOLS_HEADER, template.TOOLS_FOOTER, template.TOOL_INSTRUCTIONS]
    fixed += template.EFFORT_LINES.values()
    fixed += [f"{role}\n" for role in ("system", "user", "assistant")]
    documentation = [topics[name] for name in sorted(topics)]
    return [*documentation, *fixed * 100]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE with Qwen's normaliser, split rule and control tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(token, special=special, normalized=False) for token, special in CONTROL_TOKENS]
    )
    return tokenizer


def weights(settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """All text tensors in BF16, named and shaped as in the real checkpoints.

    Matrices keep the scale of a normalised input; the embedding (also the head) has the standard
    deviation that gives logits one of about 2. The legacy generator is used because NumPy promises
    its numbers for good.
    """
    text = settings["text_config"]
    draw = np.random.RandomState(SEED)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    prefix = "model.language_model."
    tensors = {
        f"{prefix}embed_tokens.weight": draw.standard_normal((vocab, hidden)) * 2 / hidden**0.5,
        f"{prefix}norm.weight": _gain(draw, hidden),
    }
    for layer, kind in enumerate(text["layer_types"]):
        print(f"layer {layer + 1} of {len(text['layer_types'])}: {kind}", flush=True)
        parts = _linear(draw, text) if kind == "linear_attention" else _full(draw, text)
        parts |= _common(draw, text)
        tensors |= {f"{prefix}layers.{layer}.{name}": value for name, value in parts.items()}
    return {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}


def _matrix(draw: np.random.RandomState, rows: int, columns: int, scale: float = 1) -> np.ndarray:
    return draw.standard_normal((rows, columns)) * scale / columns**0.5


def _gain(draw: np.random.RandomState, width: int) -> np.ndarray:
    return draw.standard_normal(width) * 0.02


def _common(draw: np.random.RandomState, text: dict[str, Any]) -> dict[str, np.ndarray]:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    return {
        "input_layernorm.weight": _gain(draw, hidden),
        "post_attention_layernorm.weight": _gain(draw, hidden),
        "mlp.gate_proj.weight": _matrix(draw, inner, hidden),
        "mlp.up_proj.weight": _matrix(draw, inner, hidden),
        "mlp.down_proj.weight": _matrix(draw, hidden, inner),
    }


def _linear(draw: np.random.RandomState, text: dict[str, Any]) -> dict[str, np.ndarray]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    taps = text["linear_conv_kernel_dim"]
    # Decay rates 1..16 and time steps 0.001..0.1, the usual range of gated recurrences.
    step = np.exp(draw.uniform(np.log(1e-3), np.log(1e-1), heads))
    return {
        "linear_attn.in_proj_qkv.weight": _matrix(draw, 2 * keys + values, hidden),
        "linear_attn.in_proj_z.weight": _matrix(draw, values, hidden),
        "linear_attn.in_proj_b.weight": _matrix(draw, heads, hidden),
        "linear_attn.in_proj_a.weight": _matrix(draw, heads, hidden),
        "linear_attn.conv1d.weight": _matrix(draw, 2 * keys + values, taps)[:, None, :],
        "linear_attn.A_log": np.log(draw.uniform(1, 16, heads)),
        "linear_attn.dt_bias": np.log(np.expm1(step)),
        "linear_attn.norm.weight": 1 + _gain(draw, text["linear_value_head_dim"]),
        "linear_attn.out_proj.weight": _matrix(draw, hidden, values),
    }


def _full(draw: np.random.RandomState, text: dict[str, Any]) -> dict[str, np.ndarray]:
    hidden, head = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    return {
        "self_attn.q_proj.weight": _matrix(draw, 2 * queries, hidden),
        "self_attn.k_proj.weight": _matrix(draw, keys, hidden),
        "self_attn.v_proj.weight": _matrix(draw, keys, hidden),
        "self_attn.o_proj.weight": _matrix(draw, hidden, queries),
        "self_attn.q_norm.weight": _gain(draw, head),
        "self_attn.k_norm.weight": _gain(draw, head),
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """JSON with a stable layout."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Writes the files and prints their sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write into")
    parser.add_argument("--only", choices=("all", "weights", "tokenizer"), default="all")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.only != "tokenizer":
        write_json(out / "config.json", config())
        write_json(out / "generation_config.json", generation_config())
        save_file(weights(config()), out / "model.safetensors", metadata={"format": "pt"})
    if arguments.only != "weights":
        write_json(out / "tokenizer_config.json", tokenizer_config())
        train_tokenizer(corpus()).save(str(out / "tokenizer.json"))
    for path in sorted(out.glob("*.json")) + sorted(out.glob("*.safetensors")):
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
