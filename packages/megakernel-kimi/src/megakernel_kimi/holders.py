"""How many ranks the cached positions of a row are dealt out to, by cost.

If each rank holds all positions, its few heads sweep over all of them, and the sweep takes as long
as if they were many: the matrix unit is filled with latents, not with queries. If the positions are
dealt out to G ranks, each sweeps over one G-th with the heads of all, at the price of two more
dependent exchanges a layer within a host, or three over all ranks.
"""

from __future__ import annotations

from kda_mla_kernels.mla.kernel import PARTIAL_LANES
from tpu_collectives.cost import Phase, schedule_us

from megakernel_kimi.config import KimiConfig

__all__ = ["holders_by_cost", "layer_us"]

VALUES_PER_US = 1e6
"""Cached values of a row that a layer's sweep passes in a microsecond: 0.58 ns for a position of
512 + 64 values in bf16, as predicted steps have it (``docs/kimi-layout.md``). HBM delivers 1.6
times as many."""
QUERY_BYTES, RESULT_BYTES = 2, 4
"""Of a value on its way: queries are bf16, results f32."""


def layer_us(
    config: KimiConfig, *, ranks: int, lanes: int, holders: int, rows: int, positions: int
) -> float:
    """What an MLA layer takes that depends on the choice, as a model in microseconds.

    Args:
        lanes: ranks of a host.
        holders: 1, ``lanes`` or ``ranks``.
        rows: rows of a step. positions: those of each row.
    """
    sweep = rows * positions * config.mla_cache_width / VALUES_PER_US / holders
    if holders == 1:
        return sweep
    heads = rows * config.num_attention_heads // ranks
    queries = heads * config.mla_cache_width * QUERY_BYTES
    results = heads * (config.kv_lora_rank + PARTIAL_LANES) * RESULT_BYTES
    phases = [Phase(lanes - 1, queries)] if lanes > 1 else []
    if holders > lanes:
        phases.append(Phase(ranks // lanes - 1, queries * lanes))
    return sweep + schedule_us([*phases, Phase(holders - 1, results)])


def holders_by_cost(
    config: KimiConfig, *, ranks: int, lanes: int, rows: int, context: int
) -> list[int]:
    """1, ``lanes`` and ``ranks``, the cheapest first, if all rows have filled half of their
    context."""

    def cost(holders: int) -> float:
        used = context // 2
        return layer_us(
            config, ranks=ranks, lanes=lanes, holders=holders, rows=rows, positions=used
        )

    return sorted({1, lanes, ranks}, key=lambda holders: (cost(holders), holders))
