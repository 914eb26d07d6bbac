"""How a model is cut over ranks.

Ranks are hosts of ``lanes`` neighbours: rank = host · lanes + lane.

=========================================  ======================================================
attention heads                            over all ranks
shared experts, dense MLPs, vocabulary     over all ranks, the last ones padded by zeros
routed experts                             ``expert_tp`` neighbours share an expert's channels, and
                                           the groups of such neighbours share the experts
router, latent down and up, q_a and kv_a   columns over the lanes of a host, the same on every host,
                                           so that gathering them never leaves it
cached latents                             the same on every rank, or positions over the ``holders``
                                           of a row, each of which attends with all their heads
=========================================  ======================================================

Padding happens here and is zero: it changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass

from kda_mla_kernels.attention.split import Split
from kda_mla_kernels.backend import Share
from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.mla.kernel import LONGEST_TILE
from kda_mla_kernels.quant.mxfp4 import GROUP

from megakernel_kimi.config import KimiConfig

__all__ = ["LANES", "KimiLayout", "default_lanes", "legal_ranks", "widest_expert_tp"]

LANES = 8
"""Ranks of a host, unless the devices say otherwise."""
POSITION_BLOCK = 128
"""Consecutive positions that a rank holds where the positions of a row are dealt out."""


def _divides_heads(config: KimiConfig, ranks: int) -> bool:
    return not (config.num_attention_heads % ranks or config.kda_heads % ranks)


def _splits_experts(config: KimiConfig, ranks: int, expert_tp: int) -> bool:
    """Whether each share has whole MXFP4 groups, and each group of ranks as many experts."""
    if expert_tp < 1 or ranks % expert_tp:
        return False
    whole_groups = config.moe_intermediate_size % (expert_tp * GROUP) == 0
    return whole_groups and config.num_experts % (ranks // expert_tp) == 0


def widest_expert_tp(config: KimiConfig, ranks: int) -> int | None:
    """Most ranks that can share one expert, so that no layer waits for its busiest ranks; None if
    this many ranks cannot hold the experts."""
    legal = [tp for tp in range(1, ranks + 1) if _splits_experts(config, ranks, tp)]
    return max(legal, default=None)


def legal_ranks(config: KimiConfig) -> tuple[int, ...]:
    """Rank counts that the model can be cut into, ascending."""
    return tuple(
        ranks
        for ranks in range(1, min(config.num_attention_heads, config.kda_heads) + 1)
        if _divides_heads(config, ranks) and widest_expert_tp(config, ranks) is not None
    )


def default_lanes(ranks: int) -> int:
    """The largest host of at most :data:`LANES` ranks that divides them."""
    return max(lanes for lanes in range(1, LANES + 1) if ranks % lanes == 0)


def _share_size(whole: int, parts: int) -> int:
    return -(-whole // parts)


@dataclass(frozen=True)
class KimiLayout:
    """Per-rank sizes of a config on a number of ranks. Made by :meth:`of`.

    Raises:
        ConfigError: the ranks do not fit the model, or the lanes or ``expert_tp`` do not fit them.
    """

    config: KimiConfig
    ranks: int
    lanes: int
    """ranks of a host"""
    expert_tp: int
    """ranks that share one expert"""
    holders: int = 1
    """ranks among which the cached positions of a row are dealt out: 1, the lanes of a host, or all
    ranks"""

    @classmethod
    def of(
        cls,
        config: KimiConfig,
        ranks: int,
        *,
        lanes: int | None = None,
        expert_tp: int | None = None,
        holders: int = 1,
    ) -> KimiLayout:
        """With defaults for what is None: hosts of at most 8, the widest ``expert_tp``."""
        counts = legal_ranks(config)
        if ranks not in counts:
            raise ConfigError(
                f"{ranks} ranks do not fit this model: they must divide its"
                f" {config.num_attention_heads} and {config.kda_heads} heads and leave whole groups"
                f" of {GROUP} of {config.moe_intermediate_size} expert channels; use one of"
                f" {', '.join(map(str, counts))}"
            )
        if expert_tp is None:
            expert_tp = widest_expert_tp(config, ranks)
            assert expert_tp is not None, "a legal rank count can hold the experts"
        lanes = default_lanes(ranks) if lanes is None else lanes
        return cls(config, ranks, lanes, expert_tp, holders)

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.ranks % self.lanes:
            raise ConfigError(f"{self.ranks} ranks do not divide into hosts of {self.lanes} lanes")
        if not _splits_experts(self.config, self.ranks, self.expert_tp):
            legal = [
                tp
                for tp in range(1, self.ranks + 1)
                if _splits_experts(self.config, self.ranks, tp)
            ]
            raise ConfigError(
                f"expert_tp {self.expert_tp} does not fit {self.ranks} ranks and experts of"
                f" {self.config.moe_intermediate_size} channels; use one of"
                f" {', '.join(map(str, legal))}"
            )
        if self.holders not in (1, self.lanes, self.ranks):
            *some, most = map(str, sorted({1, self.lanes, self.ranks}))
            choices = f"{', '.join(some)} or {most}" if some else most
            raise ConfigError(
                f"holders {self.holders} do not fit {self.ranks} ranks in hosts of {self.lanes}:"
                f" the positions of a row can be held by {choices}"
            )

    # Sizes of a rank, padding included.

    @property
    def kda_heads(self) -> int:
        return self.config.kda_heads // self.ranks

    @property
    def kda_width(self) -> int:
        """Channels of q, k, v and the gate each."""
        return self.kda_heads * self.config.kda_head_dim

    @property
    def mla_heads(self) -> int:
        return self.config.num_attention_heads // self.ranks

    @property
    def value_width(self) -> int:
        """Values of the MLA heads."""
        return self.mla_heads * self.config.v_head_dim

    @property
    def shared_channels(self) -> int:
        return _share_size(self.config.shared_intermediate_size, self.ranks)

    @property
    def dense_channels(self) -> int:
        return _share_size(self.config.intermediate_size, self.ranks)

    @property
    def vocab_rows(self) -> int:
        return _share_size(self.config.vocab_size, self.ranks)

    @property
    def experts(self) -> int:
        """Experts of which a rank holds a share."""
        return self.config.num_experts * self.expert_tp // self.ranks

    @property
    def has_every_expert(self) -> bool:
        """Whether that is all of them."""
        return self.experts == self.config.num_experts

    @property
    def expert_channels(self) -> int:
        """Channels of each expert that it holds."""
        return self.config.moe_intermediate_size // self.expert_tp

    @property
    def router_columns(self) -> int:
        return _share_size(self.config.num_experts, self.lanes)

    @property
    def latent_columns(self) -> int:
        """Columns of the projection to the experts' latent."""
        return _share_size(self.config.routed_expert_hidden_size, self.lanes)

    @property
    def hidden_columns(self) -> int:
        """Columns of the projection back from it."""
        return _share_size(self.config.hidden_size, self.lanes)

    @property
    def query_columns(self) -> int:
        """Columns of ``q_a``."""
        return _share_size(self.config.q_lora_rank, self.lanes)

    @property
    def row_columns(self) -> int:
        """Columns of ``kv_a``, whose output is what the cache holds."""
        return _share_size(self.config.mla_cache_width, self.lanes)

    @property
    def kda_columns(self) -> tuple[int, ...]:
        """Widths of a KDA input projection's parts: q k v, gate, beta, the decay's first factor."""
        return (3 * self.kda_width, self.kda_width, self.kda_heads, self.config.kda_head_dim)

    @property
    def mla_columns(self) -> tuple[int, ...]:
        """Widths of an MLA input projection's parts: q_a, kv_a, gate."""
        return (self.query_columns, self.row_columns, self.value_width)

    @property
    def attending_heads(self) -> int:
        """MLA heads that attend on a rank: those of all that hold positions of the same row."""
        return self.mla_heads * self.holders

    @property
    def split(self) -> Split | None:
        """How positions are dealt out; None where every rank holds all."""
        return None if self.holders == 1 else Split(POSITION_BLOCK, self.holders)

    def rank_slots(self, slots: int) -> int:
        """Slots of a rank's latent caches, where a row has so many: whole blocks, and whole tiles
        of the longest size, if there is more than one."""
        if self.split is not None:
            slots = _share_size(slots, self.split.stride) * self.split.block
        return slots if slots <= LONGEST_TILE else _share_size(slots, LONGEST_TILE) * LONGEST_TILE

    # Which members a rank has.

    def kda_heads_of(self, rank: int) -> Share:
        return Share.of(self.config.kda_heads, self.kda_heads, rank)

    def mla_heads_of(self, rank: int) -> Share:
        return Share.of(self.config.num_attention_heads, self.mla_heads, rank)

    def shared_of(self, rank: int) -> Share:
        return Share.of(self.config.shared_intermediate_size, self.shared_channels, rank)

    def dense_of(self, rank: int) -> Share:
        return Share.of(self.config.intermediate_size, self.dense_channels, rank)

    def vocabulary_of(self, rank: int) -> Share:
        return Share.of(self.config.vocab_size, self.vocab_rows, rank)

    def experts_of(self, rank: int) -> range:
        first = rank // self.expert_tp * self.experts
        return range(first, first + self.experts)

    def expert_channels_of(self, rank: int) -> Share:
        channels = self.config.moe_intermediate_size
        return Share.of(channels, self.expert_channels, rank % self.expert_tp)

    def lane_of(self, rank: int, whole: int) -> Share:
        """The columns of something that the lanes of a host share."""
        return Share.of(whole, _share_size(whole, self.lanes), rank % self.lanes)

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of every host, for collectives that stay inside."""
        return self._groups(self.lanes)

    @property
    def holding_groups(self) -> list[list[int]]:
        """Ranks that hold the positions of a row together."""
        return self._groups(self.holders)

    def _groups(self, size: int) -> list[list[int]]:
        return [list(range(first, first + size)) for first in range(0, self.ranks, size)]
