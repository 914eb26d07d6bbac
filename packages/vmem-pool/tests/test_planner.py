"""Plans: proven on random buffers, near the lower bound, and mutants of the planner are caught."""

from dataclasses import replace
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from vmem_pool import Buffer, PlanError, ReceiveArea, colouring, plan, planner

TILE = 4096


def _tiles(name, count, live, **options):
    return Buffer(name, (32 * count, 128), np.uint8, live, **options)


def _random_buffers(seed, count, phases, loop=False):
    random = np.random.default_rng(seed)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4)
    found = [ReceiveArea(f"area{i}", (2, 8, 256), jnp.bfloat16) for i in range(seed % 3)]
    for i in range(count):
        live = [int(phase) for phase in random.integers(0, phases, 2)]
        shape = (int(2 ** random.uniform(0, 10)), int(random.integers(1, 600)))
        live = tuple(live if loop else sorted(live))
        found.append(Buffer(f"b{i}", shape, dtypes[i % 4], live))
    return found


def _share_bytes_while_alive(planned):
    """Every pair, every phase: slower than, and independent of, ``Plan.prove``."""
    spans = {
        b.name: range(planned.offsets[b.name], planned.offsets[b.name] + b.bytes)
        for b in planned.buffers
    }
    for phase in range(len(planned.phases)):
        live = [b.name for b in planned.buffers if b.lives_in(phase)]
        for i, a in enumerate(live):
            for b in live[i + 1 :]:
                if spans[a].start < spans[b].stop and spans[b].start < spans[a].stop:
                    return True
    return False


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize(("count", "phases"), [(1, 1), (6, 3), (25, 9), (60, 20)])
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_never_overlap_and_respect_the_bound(seed, count, phases, loop):
    planned = plan(_random_buffers(seed, count, phases, loop), 1 << 40, phases, loop=loop)
    assert not _share_bytes_while_alive(planned)
    assert planned.size_bytes >= planned.bound_bytes
    assert all(offset % TILE == 0 for offset in planned.offsets.values())


def test_random_plans_stay_within_two_per_cent_of_the_bound_on_average():
    ratios = []
    for seed in range(30):
        planned = plan(_random_buffers(seed, 30, 12), 1 << 40, 12)
        ratios.append(planned.size_bytes / planned.bound_bytes)
    assert np.mean(ratios) < 1.02
    assert max(ratios) < 1.10


@pytest.mark.parametrize("seed", range(5))
def test_equal_sizes_are_coloured_optimally(seed):
    random = np.random.default_rng(seed)
    lives = [sorted(map(int, random.integers(0, 16, 2))) for _ in range(40)]
    planned = plan([_tiles(f"b{i}", 3, tuple(live)) for i, live in enumerate(lives)], 1 << 40)
    assert planned.size_bytes == planned.bound_bytes


def test_three_buffers_that_take_turns_cost_as_much_as_the_largest():
    turns = [_tiles("a", 5, (0, 0)), _tiles("b", 7, (1, 1)), _tiles("c", 2, (2, 3))]
    planned = plan(turns, 7 * TILE)
    assert planned.size_bytes == 7 * TILE
    assert planned.peak_phase == 1
    assert planned.live_bytes == (5 * TILE, 7 * TILE, 2 * TILE, 2 * TILE)


def test_the_same_buffers_always_get_the_same_offsets():
    buffers = _random_buffers(3, 40, 10)
    assert plan(buffers, 1 << 40, 10).offsets == plan(buffers, 1 << 40, 10).offsets


def test_receive_areas_stand_first_and_do_not_move_with_the_other_buffers():
    areas = [ReceiveArea("left", (2, 8, 128), jnp.float32), ReceiveArea("right", (8, 128), "int8")]
    small = plan([_tiles("a", 1, (0, 0)), *areas], 1 << 30, 4)
    large = plan([*areas, *_random_buffers(0, 20, 4)], 1 << 30, 4)
    for planned in (small, large):
        assert [planned.offsets[area.name] for area in areas] == [0, 2 * TILE]
    assert small.offsets["a"] == 3 * TILE


def test_nothing_is_placed_over_a_receive_area_in_any_phase():
    planned = plan([ReceiveArea("area", (8, 128), "int8"), _tiles("late", 1, (9, 9))], 2 * TILE)
    assert planned.size_bytes == 2 * TILE


def test_a_buffer_prefetched_for_the_next_layer_wraps_around_the_loop():
    current, ahead = _tiles("current", 4, (0, 2)), _tiles("ahead", 4, (3, 0))
    planned = plan([current, ahead, _tiles("middle", 4, (1, 2))], 8 * TILE, 4, loop=True)
    assert planned.offsets["middle"] == planned.offsets["ahead"]
    assert [ahead.lives_in(phase) for phase in range(4)] == [True, False, False, True]


def test_over_budget_lists_the_largest_buffers_of_the_peak_and_the_missing_bytes():
    buffers = [
        _tiles("elsewhere", 900, (0, 0)),
        _tiles("experts", 600, (1, 2)),
        _tiles("ring", 500, (1, 1)),
        _tiles("scores", 1, (1, 1)),
    ]
    budget = 1000 * TILE
    with pytest.raises(PlanError) as caught:
        plan(buffers, budget, ("attend", "route", "reduce"))
    message = str(caught.value)
    assert f"{1101 * TILE} bytes, {101 * TILE} more than its budget of {budget}" in message
    assert "phase 1 (route)" in message
    assert "experts (2.34 MiB), ring (1.95 MiB), scores (0.00 MiB)" in message
    assert "elsewhere" not in message


# Mutants: each breaks the planner or a declaration in one place, and must be noticed.


def test_a_placement_that_is_shifted_by_one_tile_is_caught():
    planned = plan(_random_buffers(1, 12, 1), 1 << 40, 1)
    ordered = planned.live(0)
    for below, above in pairwise(ordered):
        moved = planned.offsets | {above.name: planned.offsets[above.name] - TILE}
        with pytest.raises(PlanError, match=f"{below.name} and {above.name} share 4096 bytes"):
            replace(planned, offsets=moved).prove()


@pytest.mark.parametrize("offset", [-TILE, 1024, None])
def test_a_placement_off_the_tiles_or_missing_is_caught(offset):
    planned = plan([_tiles("a", 1, (0, 0))], TILE)
    with pytest.raises(PlanError, match="not at a multiple of 4096"):
        replace(planned, offsets={} if offset is None else {"a": offset}).prove()


def test_a_planner_that_lets_buffers_die_one_phase_early_is_caught(monkeypatch):
    true_bits = planner._phase_bits

    def early(buffer, num_phases):
        first, last = buffer.live
        return true_bits(replace(buffer, live=(first, max(first, last - 1))), num_phases)

    monkeypatch.setattr(planner, "_phase_bits", early)
    with pytest.raises(PlanError, match=r"a and b share .* bytes in phase 2"):
        plan([_tiles("a", 4, (0, 2)), _tiles("b", 4, (2, 3))], 1 << 30)


def test_a_planner_that_ignores_the_wrapped_part_of_a_lifetime_is_caught(monkeypatch):
    monkeypatch.setattr(planner, "_phase_bits", lambda buffer, num: 1 << buffer.live[0])
    with pytest.raises(PlanError, match="share"):
        plan([_tiles("a", 4, (3, 1)), _tiles("b", 4, (1, 1))], 1 << 30, 4, loop=True)


def test_a_planner_that_treats_receive_areas_as_free_space_is_caught(monkeypatch):
    monkeypatch.setattr(planner.ReceiveArea, "bytes", property(lambda area: TILE))
    planned = plan([ReceiveArea("area", (64, 128), "int8"), _tiles("a", 1, (0, 0))], 1 << 30)
    monkeypatch.undo()
    with pytest.raises(PlanError, match="area and a share 4096 bytes"):
        planned.prove()


def test_a_first_fit_that_ignores_sizes_is_caught(monkeypatch):
    monkeypatch.setattr(colouring, "_first_fit", lambda blocks, order: [0] * len(blocks))
    with pytest.raises(PlanError, match="share"):
        plan([_tiles("a", 1, (0, 1)), _tiles("b", 1, (1, 2))], 1 << 30)


@pytest.mark.parametrize(
    ("live", "transfer"), [((2, 4), (2, 5)), ((2, 4), (1, 3)), ((2, 4), (4, 2)), ((4, 1), (5, 2))]
)
def test_a_buffer_that_dies_before_a_wait_or_starts_before_its_birth_is_refused(live, transfer):
    with pytest.raises(PlanError, match=f"started in phase {transfer[0]} and waited for in"):
        _tiles("weights", 1, live, transfers=((transfer),))


@pytest.mark.parametrize("transfer", [(4, 5), (5, 1), (0, 1)])
def test_transfers_inside_a_wrapped_lifetime_are_accepted(transfer):
    assert _tiles("weights", 1, (4, 1), transfers=(transfer,)).transfers == (transfer,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _tiles("", 1, (0, 0)), "a buffer needs a name"),
        (lambda: Buffer("q", (128,), "float32", (0, 0)), "buffer q: shape .* needs rows"),
        (lambda: Buffer("q", (8, 128), "complex64", (0, 0)), "buffer q: dtype complex64"),
        (lambda: ReceiveArea("q", (8, 0), "float32"), "buffer q: shape .* below 1"),
        (lambda: _tiles("q", 1, (-1, 0)), r"q cannot live in phases -1\.\.0"),
        (lambda: plan([_tiles("q", 1, (0, 0))] * 2, 1 << 30), "declared twice: q"),
        (lambda: plan([_tiles("q", 1, (0, 4))], 1 << 30, 4), r"0\.\.4, outside 0\.\.3"),
        (lambda: plan([_tiles("q", 1, (2, 0))], 1 << 30), "only wraps around in a plan with loop"),
        (lambda: plan([], 1 << 30, 0), "at least one phase"),
    ],
)
def test_an_impossible_declaration_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_a_plan_of_nothing_is_empty():
    assert plan([], 0).size_bytes == 0
