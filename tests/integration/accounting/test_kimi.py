"""What is assumed about experts, and what Kimi K3 takes in HBM."""

import importlib.util

import numpy as np
import pytest
from kda_mla_kernels.moe.kernel import memory
from megakernel_kimi.presets import kimi_k3
from vmem_pool.aot.report import ENVIRONMENT

from benchmarks.accounting.experts.busiest import busiest_share
from benchmarks.accounting.families.kimi import KIMI, distinct_experts

CHOSEN, EXPERTS = 16, 896
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


@pytest.fixture
def case(monkeypatch):
    """Steps of the published model on devices that are not there."""
    from benchmarks.accounting.cases import Case

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def make(rows, context=4096, form="mxfp4"):
        return Case(rows, 1, 100, 1, context, KIMI.topology, {}, KIMI.name, form)

    return make


def test_one_row_reads_all_it_chose_and_many_rows_fewer():
    assert distinct_experts(1, CHOSEN, EXPERTS) == CHOSEN
    assert distinct_experts(8, CHOSEN, EXPERTS) == round(EXPERTS * (1 - (1 - 1 / 56) ** 8)) == 120
    assert distinct_experts(10_000, CHOSEN, EXPERTS) == EXPERTS


def test_the_busiest_of_several_groups_reads_more_than_its_share():
    alone = busiest_share(1, CHOSEN, EXPERTS, rows=2)
    assert alone == pytest.approx(EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** 2), rel=0.01)
    assert CHOSEN / 4 < busiest_share(4, CHOSEN, EXPERTS, rows=1) < CHOSEN


@needs_libtpu
@pytest.mark.parametrize("rows", [1, 8])
def test_assumed_routes_have_as_many_experts_as_rows_hit_on_average(case, rows):
    made = case(rows)
    step, _ = made.kernels(made.model)
    experts, entries = (step.contents[at] for at in sorted(step.contents)[-2:])
    distinct, routes = distinct_experts(rows, CHOSEN, EXPERTS), rows * CHOSEN
    assert experts[memory.EXPERTS, 0] == entries[memory.SEEN, routes - 1] == distinct
    assert sorted(experts[memory.EXPERT, :distinct]) == list(range(distinct))
    assert set(np.diff(entries[memory.SEEN, :routes])) <= {0, 1}
    assert entries[memory.SEEN, 0] == 1


@needs_libtpu
def test_a_rank_keeps_its_weights_and_the_latents_of_every_position(case):
    from benchmarks.accounting.capacity import held_bytes

    config, rows, context = kimi_k3(), 8, 65536
    held = held_bytes(case(rows, context))
    assert held.cache == rows * len(config.mla_layers) * context * config.mla_cache_width * 2
    assert 50e9 < held.weights < 51e9
    assert held.fits
    assert held_bytes(case(rows, context, "fp8")).weights > 1.5 * held.weights
    assert not held_bytes(case(16, 1 << 20)).fits
