"""Phases of schedules: how many, how wide, and what the cost model makes of them."""

import jax.numpy as jnp
import pytest
from tpu_collectives import Topology
from tpu_collectives.levels import tree_levels
from tpu_collectives.steps import Kind, all_reduce_steps
from tpu_collectives.table import modelled_us
from tpu_collectives.wire import LANES

POD = Topology.from_name("tpu7x:2x2x4")
HOST_THEN_LANE = tree_levels(POD, ("host", "lane"))


@pytest.mark.parametrize(
    ("scatter", "kinds", "columns"),
    [
        (0, "RR", [7168, 7168]),
        (1, "SRG", [896, 896, 896]),
        (2, "SSGG", [1024, 256, 256, 1024]),
    ],
)
def test_each_scattered_level_is_gathered_again(scatter, kinds, columns):
    steps = all_reduce_steps(HOST_THEN_LANE, scatter, 7168)
    assert "".join(step.kind.name[0] for step in steps) == kinds
    assert [step.columns for step in steps] == columns


@pytest.mark.parametrize("width", [1, 100, 128, 5120, 7168])
@pytest.mark.parametrize("scatter", [0, 1, 2])
def test_every_block_is_a_whole_number_of_lane_groups(scatter, width):
    steps = all_reduce_steps(HOST_THEN_LANE, scatter, width)
    assert all(step.columns % LANES == 0 for step in steps)
    last = steps[-1]
    assert last.columns * (last.level.size if last.kind is Kind.GATHER else 1) >= width


@pytest.mark.parametrize(
    ("rows", "scatter", "expected"), [(1, 0, 6.9), (8, 0, 14.4), (8, 1, 10.9), (16, 1, 12.8)]
)
def test_two_levels_of_32_ranks_cost_what_the_published_fit_says(rows, scatter, expected):
    cost = modelled_us(HOST_THEN_LANE, scatter, rows, 7168, jnp.bfloat16)
    assert cost == pytest.approx(expected, abs=0.06)


def test_three_levels_use_the_link_between_siblings():
    levels = tree_levels(POD, ("chip", "core", "lane"))
    assert modelled_us(levels, 0, 1, 7168, jnp.bfloat16) == pytest.approx(7.5, abs=0.06)
