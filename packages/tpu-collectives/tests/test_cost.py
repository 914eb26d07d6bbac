"""The cost model against the modelled and measured times of the collectives notes."""

import pytest
from tpu_collectives.cost import Phase, phase_us, schedule_us

ROW = 7168 * 2  # one bf16 row of the widest model


@pytest.mark.parametrize(("rows", "expected"), [(1, 10.9), (2, 14.2), (8, 34.1)])
def test_a_direct_all_reduce_of_32_ranks_costs_what_the_table_says(rows, expected):
    assert phase_us(Phase(31, rows * ROW)) == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(("rows", "expected"), [(1, 6.9), (2, 8.0), (4, 10.1), (16, 23.0)])
def test_two_full_levels_of_8_and_4_cost_what_the_table_says(rows, expected):
    phases = [Phase(7, rows * ROW), Phase(3, rows * ROW)]
    assert schedule_us(phases) == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(("rows", "expected"), [(1, 7.5), (8, 12.1)])
def test_siblings_then_chips_then_hosts_cost_what_the_table_says(rows, expected):
    phases = [Phase(1, rows * ROW, sibling=True), Phase(3, rows * ROW), Phase(3, rows * ROW)]
    assert schedule_us(phases) == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(
    ("phases", "measured"),
    [
        ([Phase(7, 8 * 1024 * 2)], 3.87),
        ([Phase(7, 8 * 1024 * 2), Phase(7, 8 * 1024 * 2)], 7.28),
        ([Phase(7, 8 * 1024 * 4), Phase(7, 8 * 1024 * 4)], 9.41),
    ],
)
def test_measured_exchanges_of_eight_cores_are_met_within_20_percent(phases, measured):
    assert schedule_us(phases) == pytest.approx(measured, rel=0.20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "at least one message, not 0"),
        ((1, -1), "cannot have -1 bytes"),
        ((2, 8, True), "one sibling, so not 2"),
    ],
)
def test_an_impossible_phase_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Phase(*arguments)
