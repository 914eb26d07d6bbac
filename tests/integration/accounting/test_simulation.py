"""Schedules small enough to work out by hand."""

import pytest
from tpu_collectives.cost import Phase, phase_us
from vmem_pool.aot import Event, Semaphore

from benchmarks.accounting.idle import hbm_busy
from benchmarks.accounting.machine import CYCLES_PER_US, HBM_BYTES_PER_US
from benchmarks.accounting.program import Program, Step
from benchmarks.accounting.reference.builder import ScheduleWriter
from benchmarks.accounting.simulation import simulate
from benchmarks.accounting.timeline import ring_fill

SLOTS, TILES = 4, 20
TILE_US = 1.0
TILE_BYTES = round(HBM_BYTES_PER_US * TILE_US)


def stream(work_us, exchange_after=None, message_bytes=0, slots=SLOTS):
    """Tiles of one us each through a ring, with one exchange to seven peers in between."""
    write = ScheduleWriter("toy", slots)
    for tile in range(slots):
        write.load("ring", TILE_BYTES, "weights", tile)
    for tile in range(TILES):
        write.wait("ring", TILE_BYTES, "weights", tile % slots)
        write.work(round(work_us * CYCLES_PER_US), "product")
        if tile + slots < TILES:
            write.load("ring", TILE_BYTES, "weights", tile % slots)
        if tile == exchange_after:
            write.exchange(7, message_bytes)
    return write.program()


def test_slow_memory_sets_the_time_and_the_core_waits_the_rest():
    run = simulate(stream(work_us=0.25))
    assert run.us == pytest.approx(TILES * TILE_US + 0.25)
    assert run.hbm_us == pytest.approx(TILES * TILE_US)
    assert run.waited_us["weights"] == pytest.approx(run.us - TILES * 0.25)


def test_slow_work_sets_the_time_once_the_first_tile_is_there():
    run = simulate(stream(work_us=1.5))
    assert run.us == pytest.approx(TILE_US + TILES * 1.5)
    assert run.waited_us["weights"] == pytest.approx(TILE_US)
    assert run.work_us == pytest.approx(TILES * 1.5)


def test_a_deep_ring_hides_an_exchange_from_slow_memory():
    exchange = phase_us(Phase(7, 0))
    assert exchange < SLOTS * TILE_US
    run = simulate(stream(work_us=0.25, exchange_after=9))
    assert run.us == pytest.approx(TILES * TILE_US + 0.25)
    assert run.waited_us["exchange"] == pytest.approx(exchange)


def test_of_an_exchange_that_is_longer_than_the_ring_the_rest_costs_time():
    message_bytes = 200_000
    exchange = phase_us(Phase(7, message_bytes))
    run = simulate(stream(work_us=0.25, exchange_after=9, message_bytes=message_bytes))
    # Four loads are under way, one for a quarter already; the next starts after the next product.
    hidden = SLOTS * TILE_US - 2 * 0.25
    assert exchange > hidden
    assert run.us == pytest.approx(TILES * TILE_US + 0.25 + exchange - hidden)


def test_slow_work_pays_for_an_exchange_in_full():
    run = simulate(stream(work_us=1.5, exchange_after=9))
    assert run.us == pytest.approx(TILE_US + TILES * 1.5 + phase_us(Phase(7, 0)))


def test_the_ring_is_full_during_a_long_exchange_and_never_fuller():
    times, fill = ring_fill(simulate(stream(0.25, exchange_after=9, message_bytes=200_000)))
    assert times == sorted(times)
    assert max(fill) == SLOTS
    assert min(fill) == 0


def test_memory_is_busy_for_the_time_that_its_bytes_take():
    run = simulate(stream(0.25, exchange_after=9, message_bytes=200_000))
    spans = hbm_busy(run)
    assert len(spans) == 2
    assert sum(span.end - span.start for span in spans) == pytest.approx(TILES * TILE_US)


@pytest.mark.parametrize(("fair", "expected"), [(False, 3.0), (True, 1.5)])
def test_a_small_load_behind_large_ones_waits_for_them_or_shares_with_them(fair, expected):
    write = ScheduleWriter("toy")
    write.load("large", TILE_BYTES * 2.5, "weights")
    write.load("small", TILE_BYTES * 0.5, "state")
    write.load("other", TILE_BYTES * 2.5, "weights")
    write.wait("small", TILE_BYTES * 0.5, "state")
    run = simulate(write.program(), fair=fair)
    assert sum(run.waited_us[kind] for kind in ("state",)) == pytest.approx(expected)
    assert run.us == pytest.approx(5.5)


def test_transfers_in_flight_at_equal_shares_end_when_all_bytes_have_moved():
    first, fair = simulate(stream(0.25)), simulate(stream(0.25), fair=True)
    assert sum(first.bytes.values()) == sum(fair.bytes.values())
    assert fair.us >= first.us


def test_copies_of_operands_hide_behind_nothing():
    program = Program("toy", (Step(2200, {"work": 2200}, None),), TILE_BYTES, 2 * TILE_BYTES)
    assert simulate(program).us == pytest.approx(1.0 + 1.0 + 2.0)


def test_a_wait_for_what_nobody_loads_is_refused():
    wait = Event("dma_wait", "here.py:1", Semaphore(0, ()), 4096, "hbm->vmem")
    with pytest.raises(ValueError, match=r"here.py:1 waits for 4096 bytes on .* nobody loads"):
        simulate(Program("toy", (Step(0, {}, wait, "weights"),)))


def test_cycles_add_up_by_stage():
    run = simulate(stream(work_us=0.5))
    assert run.cycles == {"product": TILES * 1100}
