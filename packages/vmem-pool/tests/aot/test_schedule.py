"""Cycles between events, from a compiled schedule."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from event_kernels import LAYERS, layers, pairs
from vmem_pool.aot import Options, ScheduleError, read_schedule, report, trace_events

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    target = Path(__file__).parent / "event_kernels.py"
    found = report(f"{target}:build", "tpu7x:2x2x1", Options(keep=folder))
    return folder, found.kernels[0]


def cycles(folder, kinds, trips=None):
    call, shapes = layers()
    trace = trace_events(call, *shapes, kernel="layers", contents={0: np.array(kinds, np.int32)})
    given = trace.trips if trips is None else trips
    return read_schedule(folder, "layers", given).follow(trace.events), trace


def total(folder, kinds, trips=None):
    return sum(segment.cycles for segment in cycles(folder, kinds, trips)[0])


def test_there_is_a_segment_before_each_event_and_one_after_the_last(compiled):
    segments, trace = cycles(compiled[0], [0, 1] * (LAYERS // 2))
    assert len(segments) == len(trace.events) + 1
    assert all(segment.cycles >= 0 for segment in segments)
    assert all(sum(s.sources.values()) == s.cycles for s in segments)


def test_each_layer_costs_what_its_own_branch_costs(compiled):
    folder, _ = compiled
    _, trace = cycles(folder, [1] * LAYERS)
    none, all_ = (total(folder, [kind] * LAYERS, trace.trips) for kind in (0, 1))
    half = total(folder, [0, 1] * (LAYERS // 2), trace.trips)
    assert none < half < all_
    assert abs(2 * half - none - all_) <= 2 * LAYERS


def test_the_longest_path_of_the_report_holds_both_branches_and_the_way_through_it_one(compiled):
    folder, kernel = compiled
    low, high = kernel.cycles
    one_turn = [0] * LAYERS
    assert low <= total(folder, one_turn)
    if kernel.root.children[0].trips == LAYERS:
        assert total(folder, [1] * LAYERS, trips={}) <= high


def test_turns_of_a_loop_without_events_are_counted_as_often_as_they_run(compiled):
    folder, _ = compiled
    kinds = [1] * LAYERS
    _, trace = cycles(folder, kinds)
    (line,) = [line for line, turns in trace.trips.items() if turns == 3]
    once, thrice = total(folder, kinds, {line: 1}), total(folder, kinds, {line: 3})
    longer = total(folder, kinds, {line: 5})
    assert longer - thrice == thrice - once > 0


@pytest.mark.parametrize("change", ["a wait is missing", "a start is repeated"])
def test_a_trace_of_another_program_is_refused(compiled, change):
    folder, _ = compiled
    events = cycles(folder, [0] * LAYERS)[1].events
    wrong = events[:1] + events[2:] if change == "a wait is missing" else events[:1] + events
    with pytest.raises(ScheduleError, match=r"event \d, dma_\w+ at event_kernels.py:\d+"):
        read_schedule(folder, "layers").follow(wrong)


def test_a_missing_kernel_is_named(compiled):
    with pytest.raises(ScheduleError, match=r"no kernel other\.\.\."):
        read_schedule(compiled[0], "other")


def test_a_loop_that_takes_several_transfers_a_turn_turns_once_for_all_of_them(tmp_path):
    target = Path(__file__).parent / "event_kernels.py"
    report(f"{target}:build_pairs", "tpu7x:2x2x1", Options(keep=tmp_path))
    call, shapes = pairs()
    chosen = np.ones(LAYERS, np.int32)
    events = trace_events(call, *shapes, kernel="pairs", contents={0: chosen}).events
    assert sum(event.op == "dma_wait" for event in events) == 2 * LAYERS
    segments = read_schedule(tmp_path, "pairs").follow(events)
    before_waits = [s.cycles for s, e in zip(segments, events) if e.op == "dma_wait"]
    assert before_waits[3::2] == [0] * (LAYERS - 1)  # the second wait of a turn is in the first
    assert min(before_waits[2::2]) > 0
