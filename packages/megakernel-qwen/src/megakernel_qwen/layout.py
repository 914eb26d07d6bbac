"""How a model is cut over ranks: every rank owns whole heads and a slice of each wide matrix.

Rank r of R owns query heads, linear key heads (with their value heads), feed-forward columns and
vocabulary rows ``[r·n/R, (r+1)·n/R)``. With more ranks than key/value heads, neighbouring ranks
hold copies of one. The vocabulary is padded with zero rows to a multiple of R; padding rows are cut
off the logits before anyone sees them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kda_mla_kernels.errors import ConfigError

from megakernel_qwen.config import QwenConfig

__all__ = ["RANKS", "QwenLayout", "legal_ranks"]

RANKS = "ranks"
"""Mesh axis over which everything is split."""

MAX_RANKS = 64
"""Where the search for legal rank counts ends: twice what the largest supported slice has."""


def _obstacle(config: QwenConfig, ranks: int) -> str | None:
    """Why this rank count does not fit, or None."""
    if ranks < 1:
        return "a model needs at least one"
    for name in ("num_attention_heads", "linear_num_key_heads", "intermediate_size"):
        if getattr(config, name) % ranks:
            return f"{name} {getattr(config, name)} is not a multiple of it"
    heads = config.num_key_value_heads
    if heads % ranks and ranks % heads:
        return f"it neither divides num_key_value_heads {heads} nor is a multiple of it"
    return None


def legal_ranks(config: QwenConfig) -> tuple[int, ...]:
    """Rank counts that divide the model, ascending."""
    return tuple(r for r in range(1, MAX_RANKS + 1) if _obstacle(config, r) is None)


@dataclass(frozen=True)
class QwenLayout:
    """Per-rank sizes of a config on a number of ranks.

    Raises:
        ConfigError: the ranks do not divide the model; the message lists the counts that do.
    """

    config: QwenConfig
    ranks: int

    def __post_init__(self) -> None:
        obstacle = _obstacle(self.config, self.ranks)
        if obstacle is not None:
            counts = ", ".join(map(str, legal_ranks(self.config)))
            raise ConfigError(
                f"{self.ranks} ranks do not fit this model: {obstacle}; use one of {counts}"
            )

    @property
    def query_heads(self) -> int:
        return self.config.num_attention_heads // self.ranks

    @property
    def kv_heads(self) -> int:
        return max(1, self.config.num_key_value_heads // self.ranks)

    @property
    def key_heads(self) -> int:
        """Linear key heads."""
        return self.config.linear_num_key_heads // self.ranks

    @property
    def value_heads(self) -> int:
        """Linear value heads."""
        return self.config.linear_num_value_heads // self.ranks

    @property
    def key_width(self) -> int:
        return self.key_heads * self.config.linear_key_head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.config.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def tail_rows(self) -> int:
        """Rows that the tail of a short convolution has in memory: its W-1 inputs, then padding to
        a power of two, which a TPU's tiles add anyway."""
        return 1 << (self.config.linear_conv_kernel_dim - 2).bit_length()

    @property
    def intermediate(self) -> int:
        return self.config.intermediate_size // self.ranks

    @property
    def vocab_rows(self) -> int:
        """Vocabulary rows of a rank, padding included."""
        return -(-self.config.vocab_size // self.ranks)

    @property
    def gdn_columns(self) -> tuple[int, ...]:
        """Widths of the linear input projection's parts: convolution channels, z, b, a."""
        return (self.conv_channels, self.value_width, self.value_heads, self.value_heads)

    @property
    def gqa_columns(self) -> tuple[int, ...]:
        """Widths of the attention input projection's parts: queries, gates, keys, values."""
        queries = self.query_heads * self.config.head_dim
        keys = self.kv_heads * self.config.head_dim
        return (queries, queries, keys, keys)

    def first_kv_head(self, rank: int) -> int:
        """The first key/value head that a rank holds."""
        return rank * self.config.num_key_value_heads // self.ranks
