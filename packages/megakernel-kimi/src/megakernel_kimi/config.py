"""The shape of a Kimi K3 text decoder, as its ``config.json`` describes it.

Layers are counted from 0 here; the lists in the file count from 1. Letters used by the properties:
L a layer, N the number of layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from kda_mla_kernels.errors import ConfigError

from megakernel_kimi._config_file import read_fields, read_json

__all__ = ["KimiConfig", "LayerKind"]

LayerKind = Literal["kda", "mla"]

_POSITIVE_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "kda_heads",
    "kda_head_dim",
    "conv_kernel_size",
    "attn_res_block_size",
    "intermediate_size",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
)
_POSITIVE_NUMBERS = (
    "rms_norm_eps",
    "lora_norm_eps",
    "situ_beta",
    "situ_linear_beta",
    "routed_scaling_factor",
)
_LEAST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""Numbers beyond which float32, in which they are used, has 0 and infinity."""


@dataclass(frozen=True)
class KimiConfig:
    """Everything that decides the maths and the shapes. All sizes are counts of elements.

    Raises:
        ConfigError: a value is out of range or two of them do not fit together.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    """Rows of the embedding and of the logits, reserved slots included."""
    max_position_embeddings: int
    rms_norm_eps: float
    """Of every norm but the two below."""

    attn_res_block_size: int
    """Layers of one attention-residual block."""

    num_attention_heads: int
    """Of the MLA layers."""
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Key dims shared by all heads. The name is historical: nothing is rotated."""
    v_head_dim: int
    mla_layers: tuple[int, ...]
    """Layers with full attention, ascending; all others are KDA layers."""

    kda_heads: int
    kda_head_dim: int
    """Of queries, keys and values alike."""
    conv_kernel_size: int
    gate_lower_bound: float
    """The log decay of a KDA channel lies between this and 0."""

    first_k_dense_replace: int
    """Layers before this one have a dense MLP, the others experts."""
    intermediate_size: int
    """Of the dense MLPs."""
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    """Of one expert, shared or routed."""
    routed_expert_hidden_size: int
    """Width of the latent that routed experts read and write."""
    moe_renormalize: bool
    routed_scaling_factor: float
    situ_beta: float
    situ_linear_beta: float

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    lora_norm_eps: float = 1e-6
    """Of the norms behind ``q_a`` and ``kv_a``. The file does not hold it: the checkpoint's own
    code builds these two with its class default, 1e-6, and not with ``rms_norm_eps``."""

    def __post_init__(self) -> None:
        for name in _POSITIVE_SIZES:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in _POSITIVE_NUMBERS:
            if not _LEAST <= getattr(self, name) <= _LARGEST:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be above 0 and finite in float32"
                )
        if not -_LARGEST <= self.gate_lower_bound <= -_LEAST:
            raise ConfigError(
                f"gate_lower_bound is {self.gate_lower_bound}; it must be below 0 and finite in"
                " float32, since it bounds the logarithm of a decay"
            )
        if self.conv_kernel_size < 2:
            raise ConfigError(
                f"conv_kernel_size is {self.conv_kernel_size}; it must be at least 2: a"
                " convolution of one tap remembers nothing"
            )
        layers = self.num_hidden_layers
        if list(self.mla_layers) != sorted(set(self.mla_layers) & set(range(layers))):
            raise ConfigError(
                f"mla_layers is {self.mla_layers}; it must hold distinct layers in ascending"
                f" order, each in 0..{layers - 1}"
            )
        if not 0 <= self.first_k_dense_replace <= layers:
            raise ConfigError(
                f"first_k_dense_replace is {self.first_k_dense_replace}; it must lie in 0..{layers}"
            )
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_token is {self.num_experts_per_token}; there are only"
                f" {self.num_experts} experts"
            )
        for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
            if getattr(self, name) % 32:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be a multiple of 32, the group of"
                    " inputs that shares one MXFP4 scale"
                )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < self.vocab_size:
                raise ConfigError(f"{name} is {token}; it must lie in 0..{self.vocab_size - 1}")

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        lora_norm_eps: float = 1e-6,
        ignore: frozenset[str] = frozenset(),
    ) -> KimiConfig:
        """Reads the content of a ``config.json``.

        Args:
            config: a K3 config (``model_type`` ``kimi_k3``, text part nested in ``text_config``)
                or a text part alone (``kimi_linear``).
            lora_norm_eps: of the norms behind ``q_a`` and ``kv_a``.
            ignore: names of further fields of the file that are known not to change the text
                decoder's maths.

        Raises:
            ConfigError: a field is missing, unknown, of the wrong type, or asks for maths that is
                not supported. One sentence: the field, its value, what is supported.
        """
        values = read_fields(config, ignore)
        names = {field.name for field in fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in names}, lora_norm_eps=lora_norm_eps)

    @classmethod
    def from_file(cls, path: str | Path, **options: Any) -> KimiConfig:
        """Reads a ``config.json`` or the folder that holds it; options as in :meth:`from_dict`.

        Raises:
            ConfigError: also if the file is missing or is not a JSON object.
        """
        return cls.from_dict(read_json(Path(path)), **options)

    # Layers

    def layer_kind(self, layer: int) -> LayerKind:
        """Attention of a layer."""
        return "mla" if layer in self._mla_set else "kda"

    @cached_property
    def _mla_set(self) -> frozenset[int]:
        return frozenset(self.mla_layers)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Attention of every layer."""
        return tuple(self.layer_kind(layer) for layer in range(self.num_hidden_layers))

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Layers with linear attention, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self._mla_set)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with a dense MLP, ascending."""
        return tuple(range(self.first_k_dense_replace))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, ascending."""
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    def attention_index(self, layer: int) -> int:
        """Place of a layer among those of its attention kind."""
        return sum(self.layer_kind(i) == self.layer_kind(layer) for i in range(layer))

    # Attention residual

    def starts_block(self, layer: int) -> bool:
        """Whether the prefix is stored as a finished block before this layer's attention."""
        return layer % self.attn_res_block_size == 0

    @property
    def num_blocks(self) -> int:
        """Finished blocks after the last layer; the first of them is the embedding."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    def blocks_before_attention(self, layer: int) -> int:
        """Finished blocks that the mix before a layer's attention reads: ceil(L / block size)."""
        return -(-layer // self.attn_res_block_size)

    def blocks_before_mlp(self, layer: int) -> int:
        """Finished blocks that the mix before a layer's MLP reads: floor(L / block size) + 1."""
        return layer // self.attn_res_block_size + 1

    # Widths

    @property
    def kda_width(self) -> int:
        """All KDA heads together, for each of q, k, v and the gate."""
        return self.kda_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Query and key dims of one MLA head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_scale(self) -> float:
        """Factor of the attention scores."""
        return self.qk_head_dim**-0.5

    @property
    def mla_value_width(self) -> int:
        """All MLA heads' values together."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def mla_cache_width(self) -> int:
        """Cached values of one token and MLA layer: the normed latent and the shared key dims."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Of the shared experts, which are stored as one MLP."""
        return self.num_shared_experts * self.moe_intermediate_size
