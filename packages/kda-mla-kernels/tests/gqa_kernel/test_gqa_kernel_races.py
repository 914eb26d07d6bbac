"""Transfers of the stage and of its commit: no races, none left, and broken copies are caught."""

import numpy as np
import pytest
from gqa_kernel_harness import Net, commit_call, stage_call, where
from kda_mla_kernels.attention.commit import CacheCommit, Group
from kda_mla_kernels.block import Block
from kda_mla_kernels.gqa.kernel import Attention
from kda_mla_kernels.gqa.kernel.sweep import Sweep

MODES = pytest.mark.parametrize("mode", ["on_wait", "eager"])
# Tiles of 3 + 1 + 2 in two buffers; two layers with one record buffer; six items in four.
NET, BLOCK, AT = Net(), Block(3, 1), where([3, 1, 4], [300, 0, 128])


@pytest.fixture
def mutant(monkeypatch):
    """Replaces a method; compiled calls before and after have nothing to do with it."""

    def clear():
        stage_call.cache_clear()
        commit_call.cache_clear()

    def plant(owner, name, method):
        clear()
        monkeypatch.setattr(owner, name, method)

    yield plant
    clear()


def step(**interpret):
    return NET.run(BLOCK, NET.memory, NET.tokens(3, 1), AT, **interpret)


def committed(records, **interpret):
    return NET.commit(BLOCK, NET.memory, records, AT, [1, 1, 1], **interpret)


@MODES
def test_a_step_and_its_commit_are_ordered_and_leave_nothing_behind(faults, mode):
    out, records = step()
    moved = committed(records)
    seen = []

    def run():
        seen.append(step(dma_execution_mode=mode, detect_races=True))
        seen.append(committed(records, dma_execution_mode=mode, detect_races=True))

    assert faults(run) == set()
    np.testing.assert_array_equal(seen[0][0], out)
    np.testing.assert_array_equal(seen[0][1], records)
    np.testing.assert_array_equal(seen[1].keys, moved.keys)
    np.testing.assert_array_equal(seen[1].values, moved.values)


def test_a_tile_that_is_read_before_its_wait_is_seen(mutant):
    mutant(Sweep, "_wait", lambda *arguments: None)
    assert np.isnan(step(dma_execution_mode="on_wait")[0]).any()


def test_a_tile_that_is_loaded_into_the_buffer_in_use_is_seen(mutant):
    right, _ = step(dma_execution_mode="eager")
    mutant(Sweep, "_buffer", lambda self, number: number * 0)
    assert not np.array_equal(step(dma_execution_mode="eager")[0], right)


def test_a_record_that_nobody_waits_for_is_seen(mutant, faults):
    mutant(Attention, "drain", lambda *arguments: None)
    assert faults(lambda: step(dma_execution_mode="eager")) == {"semaphore"}


def test_groups_whose_stores_nobody_waits_for_are_seen(mutant, faults):
    _, records = step()
    mutant(CacheCommit, "_finish", lambda *arguments: None)
    assert faults(lambda: committed(records, dma_execution_mode="eager")) == {"semaphore"}


def test_a_group_that_is_changed_before_it_has_come_is_seen(mutant):
    _, records = step()
    load = Group.load

    class Unawaited:
        def __init__(self, copy):
            self.start = copy.start

        def wait(self):
            pass

    mutant(Group, "load", lambda group: Unawaited(load(group)))
    moved = committed(records, dma_execution_mode="on_wait")
    assert np.isnan(np.asarray(moved.keys)).any()
