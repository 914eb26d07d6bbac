"""How a model is cut over ranks: every rank owns whole heads and a slice of each wide matrix.

Rank r of R owns query heads, linear key heads (with their value heads), feed-forward columns and
vocabulary rows ``[r·n, (r+1)·n)``, where n is the whole divided by R, rounded up: the last ranks
may own heads of zeros, which change no result. With more ranks than key/value heads, neighbouring
ranks hold copies of one and share its query heads::

    6 query heads per key/value head, 4 ranks for each:   | 0 1 | 2 3 | 4 5 | zeros |

Padding rows of the vocabulary are cut off the logits before anyone sees them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kda_mla_kernels.backend import Share
from kda_mla_kernels.delta import tail_rows
from kda_mla_kernels.errors import ConfigError

from megakernel_qwen.config import QwenConfig

__all__ = ["QwenLayout", "legal_ranks"]

MAX_RANKS = 64
"""Where the search for legal rank counts ends: twice what the largest supported slice has."""
MAX_PADDING = 0.1
"""Bytes of zeros that a rank count may add to the layers' matrices, as a part of them."""


def _obstacle(config: QwenConfig, ranks: int) -> str | None:
    """Why this rank count does not fit, or None."""
    if ranks < 1:
        return "a model needs at least one"
    heads = config.num_key_value_heads
    if heads % ranks and ranks % heads:
        return f"it neither divides num_key_value_heads {heads} nor is a multiple of it"
    sizes = _Sizes(config, ranks)
    if sizes.padding > MAX_PADDING:
        return f"{sizes.what_is_padded} would be padded by {sizes.padding:.0%} of all bytes"
    return None


@dataclass(frozen=True)
class _Sizes:
    """Members per rank, rounded up, of a count that may turn out illegal."""

    config: QwenConfig
    ranks: int

    @property
    def ranks_per_kv_head(self) -> int:
        return max(1, self.ranks // self.config.num_key_value_heads)

    @property
    def group(self) -> int:
        """Query heads of a key/value head on one rank."""
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return -(-group // self.ranks_per_kv_head)

    @property
    def kv_heads(self) -> int:
        return max(1, self.config.num_key_value_heads // self.ranks)

    @property
    def key_heads(self) -> int:
        return -(-self.config.linear_num_key_heads // self.ranks)

    @property
    def intermediate(self) -> int:
        return -(-self.config.intermediate_size // self.ranks)

    @property
    def _parts(self) -> dict[str, tuple[int, int]]:
        """Elements per hidden column of the matrices that each size decides: real, with padding."""
        config = self.config
        queries = config.num_attention_heads
        padded_queries = self.group * self.kv_heads * self.ranks
        key_heads = config.linear_num_key_heads
        per_key_head = (2 * config.linear_key_width + 3 * config.linear_value_width) // key_heads
        linear, full = len(config.linear_layers), len(config.full_layers)
        query = 3 * config.head_dim * full
        wide = 3 * config.num_layers
        return {
            "num_attention_heads": (queries * query, padded_queries * query),
            "linear_num_key_heads": (
                key_heads * per_key_head * linear,
                self.key_heads * self.ranks * per_key_head * linear,
            ),
            "intermediate_size": (
                config.intermediate_size * wide,
                self.intermediate * self.ranks * wide,
            ),
        }

    @property
    def padding(self) -> float:
        """Zeros as a part of the real elements."""
        real, padded = (sum(column) for column in zip(*self._parts.values()))
        return padded / real - 1

    @property
    def what_is_padded(self) -> str:
        worst = max(self._parts.items(), key=lambda item: item[1][1] - item[1][0])[0]
        return f"{worst} {getattr(self.config, worst)}"


def legal_ranks(config: QwenConfig) -> tuple[int, ...]:
    """Rank counts that the model can be cut into, ascending."""
    return tuple(r for r in range(1, MAX_RANKS + 1) if _obstacle(config, r) is None)


@dataclass(frozen=True)
class QwenLayout:
    """Per-rank sizes of a config on a number of ranks.

    Raises:
        ConfigError: the ranks do not fit the model; the message lists the counts that do.
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
    def _sizes(self) -> _Sizes:
        return _Sizes(self.config, self.ranks)

    @property
    def query_heads(self) -> int:
        """Padding included, as in all sizes of a rank."""
        return self._sizes.group * self.kv_heads

    @property
    def kv_heads(self) -> int:
        return self._sizes.kv_heads

    @property
    def key_heads(self) -> int:
        """Linear key heads."""
        return self._sizes.key_heads

    @property
    def value_heads(self) -> int:
        """Linear value heads."""
        return self.key_heads * self._value_heads_per_key_head

    @property
    def _value_heads_per_key_head(self) -> int:
        return self.config.linear_num_value_heads // self.config.linear_num_key_heads

    def queries_of(self, rank: int) -> Share:
        """The query heads of a rank."""
        copies = self._sizes.ranks_per_kv_head
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        if copies == 1:
            return Share.of(self.config.num_attention_heads, self.query_heads, rank)
        head, member = divmod(rank, copies)
        return Share.of(group, self.query_heads, member, first=head * group)

    def linear_keys_of(self, rank: int) -> Share:
        """The linear key heads of a rank."""
        return Share.of(self.config.linear_num_key_heads, self.key_heads, rank)

    def linear_values_of(self, rank: int) -> Share:
        """The linear value heads of a rank."""
        return self.linear_keys_of(rank).times(self._value_heads_per_key_head)

    def intermediate_of(self, rank: int) -> Share:
        """The feed-forward columns of a rank."""
        return Share.of(self.config.intermediate_size, self.intermediate, rank)

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
        """Rows that the tail of a short convolution has in memory: its W-1 inputs, then padding."""
        return tail_rows(self.config.linear_conv_kernel_dim)

    @property
    def intermediate(self) -> int:
        return self._sizes.intermediate

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
