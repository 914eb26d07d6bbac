"""Transfers of the stage and of its commit: no races, none left, and broken copies are caught."""

import numpy as np
import pytest
from kda_mla_kernels.attention.split import Split
from kda_mla_kernels.block import Block
from kda_mla_kernels.mla.kernel import LatentAttention
from kda_mla_kernels.mla.kernel.sweep import LatentSweep
from mla_kernel_harness import Net, stage_call, where

# Tiles of 3 + 1 + 2 in two buffers; two layers with one record buffer; six items in four.
WHOLE, BLOCK, AT = Net(), Block(3, 1), where([3, 1, 4], [300, 0, 128])
# A rank that holds some of them; the second sequence has nothing there.
SHARE, THERE = Net(split=Split(128, 2), layers=1), where([3, 1, 4], [600, -128, 128])


@pytest.fixture
def mutant(monkeypatch):
    """Replaces a method; compiled calls before and after have nothing to do with it."""

    def plant(owner, name, method):
        stage_call.cache_clear()
        monkeypatch.setattr(owner, name, method)

    yield plant
    stage_call.cache_clear()


def step(net=WHOLE, at=AT, **interpret):
    return net.run(BLOCK, net.memory, net.tokens(3, 1), at, **interpret)


@pytest.mark.parametrize(
    ("mode", "net", "at"),
    [("on_wait", WHOLE, AT), ("eager", WHOLE, AT), ("on_wait", SHARE, THERE)],
    ids=["on_wait", "eager", "share"],
)
def test_a_step_and_its_commit_are_ordered_and_leave_nothing_behind(faults, mode, net, at):
    out, records = step(net, at)
    moved = net.commit(BLOCK, net.memory, records, at, [1, 1, 1])
    options, seen = dict(dma_execution_mode=mode, detect_races=True), []

    def run():
        seen.append(step(net, at, **options))
        seen.append(net.commit(BLOCK, net.memory, records, at, [1, 1, 1], **options))

    assert faults(run) == set()
    np.testing.assert_array_equal(seen[0][0], out)
    np.testing.assert_array_equal(seen[0][1], records)
    np.testing.assert_array_equal(seen[1].latent, moved.latent)
    np.testing.assert_array_equal(seen[1].shared, moved.shared)


def test_a_tile_that_is_read_before_its_wait_is_seen(mutant):
    mutant(LatentSweep, "_wait", lambda *arguments: None)
    assert np.isnan(step(dma_execution_mode="on_wait")[0]).any()


def test_a_tile_that_is_loaded_into_the_buffer_in_use_is_seen(mutant):
    right, _ = step(dma_execution_mode="eager")
    mutant(LatentSweep, "_buffer", lambda self, number: number * 0)
    assert not np.array_equal(step(dma_execution_mode="eager")[0], right)


def test_a_record_that_nobody_waits_for_is_seen(mutant, faults):
    mutant(LatentAttention, "drain", lambda *arguments: None)
    assert faults(lambda: step(dma_execution_mode="eager")) == {"semaphore"}
