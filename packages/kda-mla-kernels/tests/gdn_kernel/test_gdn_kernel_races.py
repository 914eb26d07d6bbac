"""Transfers of the stage and of its commit: no races, none left, and broken copies are caught."""

import numpy as np
import pytest
from gdn_kernel_harness import Net, commit_call, stage_call
from kda_mla_kernels.block import Block
from kda_mla_kernels.gdn.kernel import DeltaNet
from kda_mla_kernels.gdn.kernel.commit import _Turns

MODES = pytest.mark.parametrize("mode", ["on_wait", "eager"])
# Three sequences in two buffers, two layers with one record buffer, six turns in three slots.
NET, BLOCK, ROWS = Net(), Block(3, 1), (3, 1, 4)
TOKENS = NET.tokens(3, 1)


@pytest.fixture
def faults(capfd):
    """Runs something and says what the interpreter found, however it says so."""

    def found(run):
        try:
            run()
        except Exception as error:
            if "race" not in str(error).lower():
                raise
            return {"race"}
        printed = "".join(capfd.readouterr())
        marks = {"race": "RACE DETECTED", "semaphore": "non-zero count"}
        return {name for name, mark in marks.items() if mark in printed}

    return found


@pytest.fixture
def fresh():
    """Compiled calls of a mutant belong to it alone."""
    yield
    stage_call.cache_clear()
    commit_call.cache_clear()


def step(**interpret):
    return NET.run(BLOCK, NET.memory, TOKENS, ROWS, **interpret)


def committed(records, **interpret):
    return NET.commit(BLOCK, NET.memory, records, ROWS, [1, 0, 1], **interpret)


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
    np.testing.assert_array_equal(seen[1].delta, moved.delta)
    np.testing.assert_array_equal(seen[1].tail, moved.tail)


class _NoWait:
    """A copy that is started and never waited for."""

    def __init__(self, copy):
        self.start = copy.start

    def wait(self):
        pass


def _without_waits(monkeypatch, name):
    made = getattr(DeltaNet, name)
    monkeypatch.setattr(DeltaNet, name, lambda *arguments: _NoWait(made(*arguments)))


@pytest.mark.parametrize("load", ["_load_state", "_load_tail"])
def test_reading_before_the_load_is_waited_for_is_seen(monkeypatch, fresh, load):
    _without_waits(monkeypatch, load)
    stage_call.cache_clear()
    assert np.isnan(step()[0]).any()  # what has not arrived is NaN


def test_a_record_that_is_overwritten_on_its_way_is_seen(monkeypatch, fresh):
    _, right = step()
    send = DeltaNet._send_record

    def late(self, scratch, records, layer):
        copy = send(self, scratch, records, layer)
        return copy if isinstance(layer, int) else _NoWait(copy)  # only drain waits

    monkeypatch.setattr(DeltaNet, "_send_record", late)
    stage_call.cache_clear()
    assert not np.array_equal(step()[1], right)


def test_a_record_that_nobody_waits_for_is_seen(monkeypatch, fresh, faults):
    monkeypatch.setattr(DeltaNet, "drain", lambda *arguments: None)
    stage_call.cache_clear()
    assert faults(lambda: step(dma_execution_mode="eager")) == {"semaphore"}


def test_a_slot_that_is_filled_before_its_state_has_left_is_seen(monkeypatch, fresh):
    _, records = step()
    every = [1, 1, 1]
    right = NET.commit(BLOCK, NET.memory, records, ROWS, every)
    wait = _Turns.wait_stores

    def late(self, turn):
        if isinstance(turn, int):  # only the last two turns are waited for
            wait(self, turn)

    monkeypatch.setattr(_Turns, "wait_stores", late)
    commit_call.cache_clear()
    assert not np.array_equal(
        NET.commit(BLOCK, NET.memory, records, ROWS, every).delta, right.delta
    )
