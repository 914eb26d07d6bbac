"""The configuration of the Qwen3.5 / 3.6 / 3.8 dense family, from a checkpoint's ``config.json``.

Everything the maths depends on is either a field here or refused by name: a value that this package
does not implement never passes silently.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kda_mla_kernels.errors import ConfigError

__all__ = ["LayerKind", "QwenConfig", "token_ids"]

LayerKind = Literal["linear_attention", "full_attention"]

MODEL_TYPES = frozenset({"qwen3_5", "qwen3_5_text"})

MAX_LAYERS = 10_000
"""Far above any model of the family: a damaged config must not make a list of a billion layers."""

# Fields that change the result, with the only values that are implemented. A missing field means
# the first of them.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "rope_scaling": (None,),
    "num_experts": (0, None),
    "mlp_bias": (False,),
    "quantization_config": (None,),
}

_ROPE_FIXED: dict[str, tuple[Any, ...]] = {
    "rope_type": ("default",),
    "type": ("default",),  # its older name
}

# For text alone the three position rows of a multimodal model are equal: sections do not matter.
_ROPE_READ = frozenset(
    {"rope_theta", "partial_rotary_factor", "mrope_interleaved", "mrope_section"}
)

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)

_READ = frozenset(_REQUIRED) | {
    "rms_norm_eps",
    "linear_conv_kernel_dim",
    "layer_types",
    "full_attention_interval",
    "rope_parameters",
    "rope_theta",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "max_position_embeddings",
    "eos_token_id",
    "model_type",
}

# Fields of training, bookkeeping, vision or the multi-token-prediction head: no effect on decoding.
_IGNORED = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "hidden_dropout",
        "initializer_range",
        "mlp_only_layers",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True)
class QwenConfig:
    """Dimensions and constants of one checkpoint. Heads and dims are counts over all ranks."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    layer_types: tuple[LayerKind, ...]
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    tied_embeddings: bool
    max_position_embeddings: int
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            count, divisor = getattr(self, many), getattr(self, few)
            if count % divisor:
                raise ConfigError(f"{many} {count} is not a multiple of {few} {divisor}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"partial_rotary_factor gives {self.rotary_dim} rotary dims of {self.head_dim};"
                " it must be an even number between 2 and head_dim"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the gated-delta-net layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the softmax-attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def period(self) -> int:
        """Layers after which the pattern of layer kinds repeats (all layers, if it never does)."""
        total = self.num_layers
        for size in range(1, total):
            if total % size == 0 and self.layer_types == self.layer_types[:size] * (total // size):
                return size
        return total

    @property
    def linear_key_width(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values together."""
        return 2 * self.linear_key_width + self.linear_value_width

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> QwenConfig:
        """Reads a whole ``config.json``: a multimodal one (its text part) or a bare text one.

        Raises:
            ConfigError: unknown ``model_type``, a missing field, or a value that is not
                implemented; the message names the field, the value and what is supported.
        """
        _check_model_type(config.get("model_type"))
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config {text!r} must be an object")
        _check_model_type(text.get("model_type", "qwen3_5_text"))
        rope = _rope_parameters(text)
        _refuse_unsupported(text, config, rope)
        head_dim = _count(text, "head_dim")
        factor = _number(rope, "partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        return cls(
            **{name: _count(text, name) for name in _REQUIRED if name != "num_hidden_layers"},
            linear_conv_kernel_dim=_count(text, "linear_conv_kernel_dim", 4),
            layer_types=_layer_types(text),
            rms_norm_eps=_number(text, "rms_norm_eps", 1e-6),
            rope_theta=_number(rope, "rope_theta", text.get("rope_theta", 1e7)),
            rotary_dim=int(head_dim * factor),
            tied_embeddings=_tied(text, config),
            max_position_embeddings=_count(text, "max_position_embeddings", 262144),
            eos_ids=token_ids(text.get("eos_token_id", config.get("eos_token_id"))),
        )


def _tied(text: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    value = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if not isinstance(value, bool):
        raise ConfigError(f"tie_word_embeddings {value!r} must be true or false")
    return value


def _check_model_type(model_type: Any) -> None:
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model_type {model_type!r} is not one of {', '.join(sorted(MODEL_TYPES))}"
        )


def _rope_parameters(text: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = text.get("rope_parameters")
    if rope is None:
        return {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters {rope!r} must be an object")
    return rope


def _refuse_unsupported(
    text: Mapping[str, Any], config: Mapping[str, Any], rope: Mapping[str, Any]
) -> None:
    outer = {"quantization_config": config.get("quantization_config")}
    for source, table in ((text, _FIXED), (outer, _FIXED), (rope, _ROPE_FIXED)):
        for name, supported in table.items():
            value = source.get(name, supported[0])
            if value not in supported:
                allowed = " or ".join(repr(item) for item in supported)
                raise ConfigError(f"{name} {value!r} is not supported; it must be {allowed}")
    unknown = sorted(set(text) - _READ - _IGNORED - set(_FIXED))
    unknown += [
        f"rope_parameters.{name}" for name in sorted(set(rope) - _ROPE_READ - {*_ROPE_FIXED})
    ]
    if unknown:
        warnings.warn(f"config fields without a known meaning: {', '.join(unknown)}", stacklevel=3)


def _layer_types(text: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    layers = _count(text, "num_hidden_layers")
    interval = _count(text, "full_attention_interval", 4)
    if layers > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers {layers} must be at most {MAX_LAYERS}")
    kinds = text.get("layer_types")
    if kinds is None:
        full = range(interval - 1, layers, interval)
        kinds = ["full_attention" if i in full else "linear_attention" for i in range(layers)]
    if not isinstance(kinds, list):
        raise ConfigError(f"layer_types {kinds!r} must be a list with one entry per layer")
    if len(kinds) != layers:
        raise ConfigError(f"layer_types lists {len(kinds)} layers, num_hidden_layers is {layers}")
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise ConfigError(
                f"layer type {kind!r} is not supported; it must be linear_attention or"
                " full_attention"
            )
    return tuple(kinds)


def _count(source: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = source.get(name, default)
    if value is None:
        raise ConfigError(f"config.json lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} {value!r} must be a positive integer")
    return value


def _number(source: Mapping[str, Any], name: str, default: float) -> float:
    value = source.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} {value!r} must be a positive number")
    return float(value)


def token_ids(value: Any) -> tuple[int, ...]:
    """The value of an ``eos_token_id``: none, one or several.

    Raises:
        ConfigError: something else than ids.
    """
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in values):
        raise ConfigError(f"eos_token_id {value!r} must be an id or a list of ids")
    return tuple(values)
