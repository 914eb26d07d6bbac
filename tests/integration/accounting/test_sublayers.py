"""What belongs to which part of a step, and what the core does while HBM is idle."""

import pytest
from vmem_pool.stream import Matrix, plan_stream

from benchmarks.accounting.idle import hbm_busy, hbm_idle_us
from benchmarks.accounting.machine import CYCLES_PER_US, HBM_BYTES_PER_US
from benchmarks.accounting.parts import SublayerNames, parts_of
from benchmarks.accounting.program import Program, Step, Sublayer
from benchmarks.accounting.reference.builder import ScheduleWriter
from benchmarks.accounting.simulation import simulate

US = int(CYCLES_PER_US)


def written(write, sublayers):
    steps = [
        Step(step.cycles, step.stages, step.event, step.kind, sublayer)
        for step, sublayer in zip(write.program().steps, sublayers)
    ]
    return Program("toy", tuple(steps))


def test_an_exchange_belongs_to_the_sublayer_that_waits_for_it():
    write = ScheduleWriter("toy")
    write.work(US, "first")
    write.send("sum", 7, 64)
    write.work(US, "second")
    write.receive("sum")
    steps = len(write.program().steps)
    first, second = Sublayer(1, "mixer"), Sublayer(2, "experts")
    began = steps - 1  # the wait, with the work before it
    parts = parts_of(simulate(written(write, [first] * began + [second] * (steps - began))))
    assert parts["mixer"].phases == 0
    assert parts["experts"].phases == 1
    assert parts["mixer"].cycles + parts["experts"].cycles == 2 * US


def test_parts_of_equal_kind_add_up_to_the_step():
    write = ScheduleWriter("toy")
    for number in range(4):
        write.load("weights", HBM_BYTES_PER_US, "weights", number)
        write.work(US, "product")
        write.wait("weights", HBM_BYTES_PER_US, "weights", number)
    steps = write.program().steps
    sublayers = [Sublayer(number // 2, "ab"[number // 2 % 2]) for number in range(len(steps))]
    run = simulate(written(write, sublayers))
    parts = parts_of(run)
    assert sum(part.us for part in parts.values()) == pytest.approx(run.us)
    assert sum(part.count for part in parts.values()) == len(set(sublayers))


def test_idle_time_is_named_by_what_the_core_does():
    write = ScheduleWriter("toy")
    write.load("weights", HBM_BYTES_PER_US, "weights")
    write.wait("weights", HBM_BYTES_PER_US, "weights")
    write.work(3 * US, "selection")
    write.load("weights", 2 * HBM_BYTES_PER_US, "weights", 1)
    write.work(US, "product")
    write.wait("weights", 2 * HBM_BYTES_PER_US, "weights", 1)
    run = simulate(write.program())
    idle = hbm_idle_us(run)
    assert idle["selection"] == pytest.approx(3)
    assert idle["product"] == pytest.approx(0)
    busy = sum(span.end - span.start for span in hbm_busy(run))
    assert sum(idle.values()) == pytest.approx(run.us - busy)


def test_a_sublayer_begins_with_the_first_slot_of_its_segment():
    segments = {
        name: [Matrix("only", (1024, columns), "bfloat16")]
        for name, columns in (("mixer", 1024), ("mlp", 2048))
    }
    plan = plan_stream(segments, ["mixer", "mlp", "mixer"], slot_bytes=1 << 20, depth=4)
    write = ScheduleWriter("toy")
    for _ in range(plan.num_slots):
        write.load("ring", 1 << 20, "weights")
        write.wait("ring", 1 << 20, "weights")
    names, kinds = SublayerNames(plan, "before"), []
    for step in write.program().steps:
        if step.event is not None and step.event.op == "dma_wait":
            names.follow(step.event, step.kind)
            kinds.append(names.now.kind)
    sizes = {name: plan.segments[name].num_slots for name in segments}
    assert kinds == [name for name in plan.order for _ in range(sizes[name])]
