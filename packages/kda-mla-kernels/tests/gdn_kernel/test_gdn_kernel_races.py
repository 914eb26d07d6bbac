"""Transfers of the stage and of its commit: no races, none left, and broken copies are caught."""

from dataclasses import replace

import numpy as np
from delta_kernel_harness import ROWS, assert_ordered_in_both_modes
from gdn_kernel_harness import Net
from kda_mla_kernels.block import Block
from kda_mla_kernels.delta.kernel.commit import _Turns
from kda_mla_kernels.gdn.kernel import DeltaNet

# Three sequences in two buffers, two layers with one record buffer, six turns in three slots.
NET, BLOCK = Net(quick=True), Block(3, 1)
# Copies as late as a wait allows.
LATE = {"dma_execution_mode": "on_wait", "detect_races": True}


def step(kind=DeltaNet, mode=LATE):
    return replace(NET, kind=kind).run(BLOCK, NET.memory, NET.tokens(3, 1), ROWS, **mode)


def committed(records, accepted, mode=LATE, tag=""):
    return replace(NET, tag=tag).commit(BLOCK, NET.memory, records, ROWS, accepted, **mode)


def test_steps_and_commits_are_ordered_and_leave_nothing_behind_in_both_modes(faults):
    assert_ordered_in_both_modes(NET, faults)


class _NoWait:
    """A copy that is started and never waited for."""

    def __init__(self, copy):
        self.start = copy.start

    def wait(self):
        pass


class ReadsBeforeWaiting(DeltaNet):
    """The state is read while it is still on its way."""

    def _load_state(self, *arguments):
        return _NoWait(super()._load_state(*arguments))


class OverwritesItsRecord(DeltaNet):
    """The record of a layer is written over that of the layer before; only ``drain`` waits."""

    def _send_record(self, scratch, records, layer):
        copy = super()._send_record(scratch, records, layer)
        return copy if isinstance(layer, int) else _NoWait(copy)


class NeverDrains(DeltaNet):
    """The last record is left on its way."""

    def drain(self, scratch, records):
        pass


def test_reading_before_the_load_is_waited_for_is_seen():
    assert np.isnan(step(ReadsBeforeWaiting)[0]).any()  # what has not arrived is NaN


def test_a_record_that_is_overwritten_on_its_way_is_seen():
    assert not np.array_equal(step(OverwritesItsRecord)[1], step()[1])


def test_a_record_that_nobody_waits_for_is_seen(faults):
    eager = {"dma_execution_mode": "eager"}
    assert faults(lambda: step(NeverDrains, eager)) == {"semaphore"}


def test_a_slot_that_is_filled_before_its_state_has_left_is_seen(monkeypatch):
    _, records = step()
    every = [1, 1, 1]
    right, wait = committed(records, every), _Turns.wait_stores

    def late(self, turn):
        if isinstance(turn, int):  # only the last two turns are waited for
            wait(self, turn)

    monkeypatch.setattr(_Turns, "wait_stores", late)
    mutant = committed(records, every, tag="late")
    assert not np.array_equal(mutant.delta, right.delta)
