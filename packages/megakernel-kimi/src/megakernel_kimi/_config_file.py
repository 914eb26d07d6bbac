"""Reading ``config.json``: which of its fields are honoured, required, refused or ignored.

Nothing is ignored by accident. A field that changes the maths is either taken over or must have
the one value that is supported; a field that cannot change it stands in a list of its own; any
other field is refused, since it may be what makes a new checkpoint different.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kda_mla_kernels.errors import ConfigError

__all__ = ["MODEL_TYPES", "read_fields", "read_json"]

TEXT_MODEL_TYPE = "kimi_linear"
MODEL_TYPES = frozenset({"kimi_k3", TEXT_MODEL_TYPE})

_INTEGERS = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "attn_res_block_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "first_k_dense_replace",
    "intermediate_size",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
)
_NUMBERS = {
    "rms_norm_eps": "rms_norm_eps",
    "routed_scaling_factor": "routed_scaling_factor",
    "activation_situ_beta": "situ_beta",
    "activation_situ_linear_beta": "situ_linear_beta",
}
_LINEAR_INTEGERS = {
    "num_heads": "kda_heads",
    "head_dim": "kda_head_dim",
    "short_conv_kernel_size": "conv_kernel_size",
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Fields whose other values are other maths.
_REQUIRED = {
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
}
# The same, where a missing field or null means the supported value.
_IF_PRESENT: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "sliding_window": None,
}
_LINEAR_REQUIRED = {"use_full_rank_gate": True}

# Fields that cannot change the text decoder's results, and why.
_IGNORED = frozenset(
    {
        # training only
        "initializer_range",
        "attention_dropout",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "output_router_logits",
        "ignore_index",
        # vision and its placeholder
        "vision_config",
        "media_placeholder_token_id",
        # nothing is rotated (mla_use_nope)
        "rope_theta",
        # one group is no grouping (num_expert_group)
        "use_grouped_topk",
        # about the file or the library that wrote it
        "architectures",
        "auto_map",
        "transformers_version",
        "_name_or_path",
        # how a library runs it
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "pretraining_tp",
        "is_encoder_decoder",
        "chunk_size_feed_forward",
        # a default length of generation
        "max_length",
        # the head dims that count have names of their own
        "head_dim",
    }
)
_READ = frozenset(
    {
        "model_type",
        "text_config",
        "dtype",
        "torch_dtype",
        "num_key_value_heads",
        "linear_attn_config",
        "quantization_config",
        "moe_renormalize",
    }
)
_LINEAR_READ = {"full_attn_layers", "kda_layers", "gate_lower_bound"}


def read_json(path: Path) -> Mapping[str, Any]:
    """Content of a ``config.json``, given its path or its folder's."""
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_fields(config: Mapping[str, Any], ignore: frozenset[str]) -> dict[str, Any]:
    """Checked values by the names of ``KimiConfig``'s fields."""
    text = _text_part(config)
    # What the outer level repeats (token ids, dtype, tying) counts only where the text has none.
    merged = {**{k: v for k, v in config.items() if k != "model_type"}, **text}
    _check_fixed(merged, _REQUIRED, required=True)
    _check_fixed(merged, _IF_PRESENT, required=False)
    _check_dtype(merged)
    _check_quantization(merged.get("quantization_config"))
    values: dict[str, Any] = {name: _integer(merged, name) for name in _INTEGERS}
    values |= {ours: _number(merged, name) for name, ours in _NUMBERS.items()}
    values |= {name: _integer(merged, name) for name in _TOKENS if merged.get(name) is not None}
    values["moe_renormalize"] = _boolean(merged, "moe_renormalize")
    heads = merged.get("num_key_value_heads")
    if heads not in (None, values["num_attention_heads"]):
        raise ConfigError(
            f"num_key_value_heads is {heads!r}; only num_attention_heads"
            f" ({values['num_attention_heads']}) is supported"
        )
    values |= _linear_attention(merged, values["num_hidden_layers"], ignore)
    known = {*_INTEGERS, *_NUMBERS, *_TOKENS, *_REQUIRED, *_IF_PRESENT, *_IGNORED, *_READ}
    _refuse_unknown(merged, known | ignore, "")
    return values


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model_type is {model_type!r}; supported are {', '.join(sorted(MODEL_TYPES))}"
        )
    if model_type == TEXT_MODEL_TYPE:
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config is {text!r}; a kimi_k3 config must hold an object there")
    if text.get("model_type", TEXT_MODEL_TYPE) != TEXT_MODEL_TYPE:
        raise ConfigError(
            f"text_config.model_type is {text['model_type']!r}; only {TEXT_MODEL_TYPE!r} is"
            " supported"
        )
    return text


def _check_fixed(
    config: Mapping[str, Any], expected: Mapping[str, Any], *, required: bool, prefix: str = ""
) -> None:
    for name, value in expected.items():
        if config.get(name) is None:
            if required:
                raise ConfigError(f"{prefix}{name} is missing; it must be {value!r}")
        elif config[name] != value or isinstance(config[name], bool) != isinstance(value, bool):
            only = "null" if value is None else repr(value)
            raise ConfigError(f"{prefix}{name} is {config[name]!r}; only {only} is supported")


def _check_dtype(config: Mapping[str, Any]) -> None:
    for name in ("dtype", "torch_dtype"):
        if config.get(name) not in (None, "bfloat16"):
            raise ConfigError(f"{name} is {config[name]!r}; only 'bfloat16' is supported")


_QUANTIZATION = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
_QUANTIZED_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
}


def _check_quantization(quantization: Any) -> None:
    """The experts' encoding. Which tensors are quantised is read from the tensors, not from the
    ignore list, which does not name all that are not."""
    if not isinstance(quantization, Mapping):
        raise ConfigError(
            f"quantization_config is {quantization!r}; only experts in mxfp4-pack-quantized are"
            " supported"
        )
    _check_fixed(quantization, _QUANTIZATION, required=True, prefix="quantization_config.")
    _check_fixed(
        quantization, {"kv_cache_scheme": None}, required=False, prefix="quantization_config."
    )
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("quantization_config.config_groups is missing; one group is needed")
    for name, group in groups.items():
        prefix = f"quantization_config.config_groups.{name}."
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise ConfigError(f"{prefix}weights is missing; it must describe the encoding")
        _check_fixed(group["weights"], _QUANTIZED_WEIGHTS, required=True, prefix=prefix)
        unquantized = {"input_activations": None, "output_activations": None}
        _check_fixed(group, unquantized, required=False, prefix=prefix)


def _linear_attention(
    config: Mapping[str, Any], num_layers: int, ignore: frozenset[str]
) -> dict[str, Any]:
    prefix = "linear_attn_config."
    linear = config.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise ConfigError(f"linear_attn_config is {linear!r}; it must be an object")
    _check_fixed(linear, _LINEAR_REQUIRED, required=True, prefix=prefix)
    values: dict[str, Any] = {
        ours: _integer(linear, name, prefix) for name, ours in _LINEAR_INTEGERS.items()
    }
    values["gate_lower_bound"] = _number(linear, "gate_lower_bound", prefix)
    full, kda = (_layers(linear, name, prefix) for name in ("full_attn_layers", "kda_layers"))
    listed = sorted(full + kda)
    if len(listed) != num_layers or listed != list(range(1, num_layers + 1)):
        raise ConfigError(
            f"{prefix}full_attn_layers is {full} and {prefix}kda_layers is {kda}; together they"
            f" must hold each of 1..{num_layers} once"
        )
    values["mla_layers"] = tuple(layer - 1 for layer in sorted(full))
    known = {*_LINEAR_INTEGERS, *_LINEAR_REQUIRED, *_LINEAR_READ}
    _refuse_unknown(linear, known | ignore, prefix)
    return values


def _refuse_unknown(config: Mapping[str, Any], known: set[str], prefix: str) -> None:
    for name, value in config.items():
        # A null field says nothing, so it cannot change anything.
        if name not in known and value is not None:
            raise ConfigError(
                f"{prefix}{name} is {value!r}; this field is not known, so it may change the"
                " maths; if it does not, take it out of the config, or pass its name to"
                " KimiConfig.from_dict as ignore="
            )


def _present(config: Mapping[str, Any], name: str, prefix: str) -> Any:
    if config.get(name) is None:
        raise ConfigError(f"{prefix}{name} is missing; it is needed to build the model")
    return config[name]


def _integer(config: Mapping[str, Any], name: str, prefix: str = "") -> int:
    value = _present(config, name, prefix)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{prefix}{name} is {value!r}; it must be a whole number")
    return value


def _number(config: Mapping[str, Any], name: str, prefix: str = "") -> float:
    value = _present(config, name, prefix)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{prefix}{name} is {value!r}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{prefix}{name} is too large for a floating-point number") from None


def _boolean(config: Mapping[str, Any], name: str) -> bool:
    value = _present(config, name, "")
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return value


def _layers(config: Mapping[str, Any], name: str, prefix: str) -> list[int]:
    value = _present(config, name, prefix)
    if not isinstance(value, list) or any(type(layer) is not int for layer in value):
        raise ConfigError(f"{prefix}{name} is {value!r}; it must be a list of layers from 1")
    return value
