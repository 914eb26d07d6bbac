"""The routed experts' stage in the interpreter against the reference."""

import copy
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels.block import Block
from kda_mla_kernels.moe import RouterRule
from kda_mla_kernels.moe.kernel import ExpertShape, PackedMatrix, RoutedExperts
from kda_mla_kernels.moe.kernel.routing import (
    Demand,
    entries_of_one_row,
    sorted_entries,
    top_k_by_digits,
    top_k_by_rank,
)
from kda_mla_kernels.moe.top_k import top_k_mask
from kda_mla_kernels.numerics import BF16, F32
from kda_mla_kernels.quant import NotLosslessError
from moe_kernel_harness import Experts, activation, layers_call

EXPERTS, LATENT, TOP_K = 16, 256, 4
RULE = RouterRule(TOP_K)
AS_ROUNDED = {"xla_allow_excess_precision": False}
"""What is split into parts that bf16 holds is really split."""


def stage_of(rows, channels, numerics=F32, form="mxfp4", chunk=4, held=EXPERTS):
    shape = ExpertShape(LATENT, channels, held, form)
    return RoutedExperts(shape, RULE, Block(rows, 1), numerics, activation(numerics), chunk)


def draw(rows, seed=0):
    """Scores, bias and latents of one layer."""
    generator = np.random.default_rng(seed)
    scores = 1 / (1 + np.exp(-generator.normal(size=(rows, EXPERTS))))
    bias = 0.1 * generator.normal(size=EXPERTS)
    return scores.astype(np.float32), bias.astype(np.float32), generator.normal(size=(rows, LATENT))


def run(stage, experts, scores, bias, latent, ranks=1, rank=0, first=0, mode=None):
    """Sum and weights of the block's rows, one layer."""
    missing = stage.block.padded - len(scores)
    padded = [np.pad(x, [(0, missing), (0, 0)])[None] for x in (scores, latent)]
    call = layers_call(stage, 1, EXPERTS, interpret=mode or pltpu.InterpretParams())
    latents = stage.numerics.round(jnp.asarray(padded[1], jnp.float32))
    held = experts.images(stage.shape, ranks, rank)
    first = jnp.array([first], jnp.int32)
    total, weights = call(first, held, padded[0], bias[None, None], latents)
    return np.asarray(total)[0, : len(scores)], np.asarray(weights)[0, : len(scores)]


def check(stage, experts, scores, bias, latent, tolerance):
    total, weights = run(stage, experts, scores, bias, latent)
    rounded = stage.numerics.round(jnp.asarray(latent, jnp.float32))
    expected, dense = experts.reference(0, rounded, scores, bias, RULE, stage.numerics)
    np.testing.assert_allclose(weights, dense, rtol=1e-6)
    np.testing.assert_allclose(total, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    ("rows", "channels", "form"),
    [(1, 64, "mxfp4"), (3, 96, "mxfp4"), (8, 32, "mxfp4")],
)
def test_f32_equals_the_reference(rows, channels, form):
    experts = Experts(1, EXPERTS, LATENT, channels)
    check(stage_of(rows, channels, form=form), experts, *draw(rows), tolerance=2e-6)


def test_one_row_needs_no_branches_for_its_loads():
    """Its experts are distinct; what is loaded and waited for then comes in two parts."""
    experts, given = Experts(1, EXPERTS, LATENT, 64), draw(1)
    stage = stage_of(1, 64)
    alone = replace(stage, whole=True)
    assert (len(stage.schedule.loads), len(alone.schedule.loads)) == (1, 2)
    for ours, expected in zip(run(alone, experts, *given), run(stage, experts, *given)):
        np.testing.assert_array_equal(ours, expected)


def test_bf16_equals_the_reference_up_to_the_rounding_of_each_expert():
    experts = Experts(1, EXPERTS, LATENT, 96)
    check(stage_of(3, 96, BF16, chunk=8), experts, *draw(3), tolerance=4e-3)


def test_both_forms_of_the_weights_give_the_same_sum():
    experts, drawn = Experts(1, EXPERTS, LATENT, 96), draw(3)
    found = [run(stage_of(3, 96, form=form), experts, *drawn)[0] for form in ("mxfp4", "fp8")]
    np.testing.assert_allclose(*found, atol=2e-6 * np.abs(found[0]).max())


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([[0, 5, 6, 15]] * 4, id="all rows on one expert set"),
        pytest.param(np.arange(16).reshape(4, 4)[[2, 0, 3, 1]], id="disjoint sets"),
        pytest.param([[0, 1, 2, 3], [1, 2, 3, 4], [0, 2, 4, 5], [1, 3, 4, 5]], id="few experts"),
    ],
)
def test_rows_may_share_experts_or_not(chosen):
    experts, (scores, bias, latent) = Experts(1, EXPERTS, LATENT, 64), draw(4)
    np.put_along_axis(scores, np.asarray(chosen), 0.9 + 0.01 * scores[:, :TOP_K], axis=1)
    check(stage_of(4, 64), experts, scores, np.zeros_like(bias), latent, tolerance=2e-6)


def test_of_equal_scores_the_lowest_index_wins():
    experts, (_, bias, latent) = Experts(1, EXPERTS, LATENT, 64), draw(3)
    scores = np.full((3, EXPERTS), 0.25, np.float32)
    scores[1, 9] = 0.5
    _, weights = run(stage_of(3, 64), experts, scores, np.zeros_like(bias), latent)
    first = [0, 1, 2, 3]
    assert [np.flatnonzero(row).tolist() for row in weights] == [first, [0, 1, 2, 9], first]


def test_a_row_has_the_same_bits_whoever_its_neighbours_are():
    experts, (scores, bias, latent) = Experts(1, EXPERTS, LATENT, 96), draw(8)
    alone = run(stage_of(1, 96, BF16), experts, scores[5:6], bias, latent[5:6])[0]
    for rows in (slice(4, 7), slice(0, 8)):
        together = run(
            stage_of(len(scores[rows]), 96, BF16, chunk=4),
            experts,
            scores[rows],
            bias,
            latent[rows],
        )[0]
        np.testing.assert_array_equal(together[5 - rows.start], alone[0])


def test_the_parts_of_ranks_sum_to_the_whole():
    experts, drawn = Experts(1, EXPERTS, LATENT, 64), draw(3)
    whole, _ = run(stage_of(3, 64), experts, *drawn)
    parts = [run(stage_of(3, 32), experts, *drawn, ranks=2, rank=rank)[0] for rank in range(2)]
    np.testing.assert_allclose(sum(parts), whole, atol=2e-6 * np.abs(whole).max())


def test_groups_of_experts_sum_to_the_whole_even_if_one_is_empty():
    experts, (scores, bias, latent) = Experts(1, EXPERTS, LATENT, 64), draw(3)
    scores[:, 8:12] *= 0.01  # nobody's choice
    whole, weights = run(stage_of(3, 64), experts, scores, bias, latent)
    assert not weights[:, 8:12].any()
    total = np.zeros_like(whole)
    for first in range(0, EXPERTS, 4):
        part = copy.copy(experts)
        for name in ("gate", "up", "down"):
            matrix = getattr(experts, name)
            cut = replace(
                matrix,
                packed=matrix.packed[:, first : first + 4],
                scales=matrix.scales[:, first : first + 4],
            )
            setattr(part, name, cut)
        total += run(stage_of(3, 64, held=4), part, scores, bias, latent, first=first)[0]
    np.testing.assert_allclose(total, whole, atol=2e-6 * np.abs(whole).max())


def test_no_race_and_the_same_bits_in_both_modes_of_copying(faults):
    experts, drawn = Experts(1, EXPERTS, LATENT, 64), draw(3)
    found = []
    for when in ("on_wait", "eager"):
        mode = pltpu.InterpretParams(detect_races=True, dma_execution_mode=when)
        assert (
            faults(
                lambda mode=mode: found.append(run(stage_of(3, 64), experts, *drawn, mode=mode)[0])
            )
            == set()
        )
    np.testing.assert_array_equal(*found)


def jitted(function, number):
    """A function of arrays; its last argument is this number."""
    return jax.jit(lambda *arrays: function(*arrays, number), compiler_options=AS_ROUNDED)


@pytest.mark.parametrize("k", [1, 4, 15])
def test_top_k_by_digits_is_the_top_k(k):
    values = np.random.default_rng(k).normal(size=(8, 40)).astype(np.float32)
    values[0] = 0.0
    values[1, ::3] = -0.0
    values[2, 5:30] = values[2, 3]
    ways = [jitted(way, k) for way in (top_k_by_digits, top_k_mask)]
    np.testing.assert_array_equal(*(way(values) for way in ways))


@pytest.mark.parametrize("experts", [40, 300])
def test_top_k_by_rank_is_the_top_k_of_a_row(experts):
    values = np.random.default_rng(experts).normal(size=(4, experts)).astype(np.float32)
    values[0] = 0.0
    values[1, ::3] = -0.0
    values[2, 5:] = values[2, 3]
    ways = [jitted(way, 7) for way in (top_k_by_rank, top_k_mask)]
    for row in values:
        np.testing.assert_array_equal(*(way(row[None]) for way in ways))


@partial(jax.jit, static_argnums=2, compiler_options=AS_ROUNDED)
def lists(chosen, weights, length):
    """Which experts anyone chose, how many, and the sorted entries."""
    demand = Demand.of(chosen)
    entries = sorted_entries(demand, chosen, weights, length)
    return demand.listed(length), demand.experts, entries


def test_entries_of_one_row_are_those_of_the_sorted_list():
    generator = np.random.default_rng(0)
    chosen = np.zeros((8, 896), np.float32)
    chosen[0, generator.choice(896, 16, replace=False)] = 1
    weights = chosen * generator.random((8, 896), np.float32)
    listed, _, expected = lists(chosen, weights, 16)
    found = jitted(entries_of_one_row, 16)(chosen[:1], weights[:1])
    np.testing.assert_array_equal(found[0], listed)
    np.testing.assert_array_equal(found[1], expected.weights)


def test_entries_are_sorted_by_expert_and_then_by_row():
    chosen = np.zeros((8, 6), np.float32)
    chosen[0, [1, 4]] = chosen[1, [4, 5]] = chosen[2, [1, 4]] = 1
    weights = chosen * np.arange(1, 49, dtype=np.float32).reshape(8, 6)
    listed, experts, entries = lists(chosen, weights, 8)
    assert np.asarray(listed).tolist() == [[1, 4, 5, 0, 0, 0, 0, 0]]
    assert float(experts[0, 0]) == 3
    columns = {name: np.asarray(getattr(entries, name))[0].tolist() for name in vars(entries)}
    assert columns == {
        "rows": [0, 2, 0, 1, 2, 1, 8, 8],
        "seen": [1, 1, 2, 2, 2, 3, 3, 3],
        "weights": [2, 14, 5, 11, 17, 12, 0, 0],
    }


@pytest.mark.parametrize(("latent", "channels"), [(256, 48), (192, 64)])
def test_widths_that_fill_no_groups_are_refused(latent, channels):
    with pytest.raises(ValueError, match=f"share of {channels} channels on a latent of {latent}"):
        ExpertShape(latent, channels, EXPERTS)


def test_a_matrix_that_fills_no_lanes_is_refused():
    with pytest.raises(ValueError, match="64 outputs of 128 inputs fill 64 lanes"):
        PackedMatrix(128, 64)


def test_fp8_that_would_round_is_refused():
    experts = Experts(1, EXPERTS, LATENT, 64)
    experts.gate.scales[0, 3, 7, :2] = [90, 130]
    with pytest.raises(NotLosslessError, match="experts' gate and up"):
        experts.images(ExpertShape(LATENT, 64, EXPERTS, "fp8"))
