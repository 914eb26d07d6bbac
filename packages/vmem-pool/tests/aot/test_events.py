"""The order of a kernel's events, from its jaxpr; nothing is compiled."""

import numpy as np
import pytest
from event_kernels import LAYERS, TILE, layers
from vmem_pool.aot import TraceError, trace_events

KINDS = np.array([0, 1, 0, 0, 1, 1], np.int32)


def follow(kinds=KINDS):
    call, shapes = layers()
    return trace_events(call, *shapes, kernel="layers", contents={0: kinds})


def test_a_branch_on_given_contents_is_the_one_that_is_followed():
    trace = follow()
    short = [(e.op, e.semaphore.at[0]) for e in trace.events]
    expected = [("dma_start", 0)]
    for number, kind in enumerate(KINDS):
        expected.append(("dma_wait", 0))
        expected += [("dma_start", 1), ("dma_wait", 1)] * kind
        expected += [("dma_start", 0)] * (number + 1 < LAYERS)
    assert short == expected


def test_an_event_knows_its_bytes_its_semaphore_and_its_ends():
    trace = follow()
    scratch = trace.arguments - 1  # the semaphores are the last argument
    assert trace.arguments == 5
    for event in trace.events:
        assert event.amount == TILE
        assert event.semaphore.argument == scratch
        assert event.ends == (1, 3)
        assert event.device is None
        assert event.source.startswith("event_kernels.py:")


def test_operands_in_vmem_are_counted_apart():
    trace = follow()
    assert (trace.copied_in, trace.copied_out) == (4 * LAYERS, TILE)


def test_loops_are_counted_by_their_lines():
    """That over layers, and one without events inside of it."""
    assert sorted(follow().trips.values()) == [3, LAYERS]


def test_a_condition_on_unknown_data_is_refused_with_its_place():
    call, shapes = layers()
    with pytest.raises(TraceError, match=r"depends on data at event_kernels.py:\d+"):
        trace_events(call, *shapes, kernel="layers")


def test_a_kernel_that_is_not_there_is_named_with_those_that_are():
    call, shapes = layers()
    with pytest.raises(TraceError, match=r"no kernel is called other.* \(there are: layers\)"):
        trace_events(call, *shapes, kernel="other")
