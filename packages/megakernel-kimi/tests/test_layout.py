"""How a model is cut over ranks, and its layers into loops: nothing is lost or doubled."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from kda_mla_kernels.errors import ConfigError
from megakernel_kimi.holders import holders_by_cost, layer_us
from megakernel_kimi.layout import KimiLayout, default_lanes, legal_ranks
from megakernel_kimi.presets import kimi_k3
from megakernel_kimi.segments import segments
from megakernel_kimi.weights import weight_shapes

K3 = kimi_k3()


def test_the_published_model_fits_the_counts_that_divide_its_heads():
    assert legal_ranks(K3) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)


@pytest.mark.parametrize("ranks", [5, 64, 0])
def test_an_illegal_count_is_refused_with_the_legal_ones(ranks):
    with pytest.raises(ConfigError, match=rf"^{ranks} ranks do not fit .* one of 1, .*, 48, 96$"):
        KimiLayout.of(K3, ranks)


@pytest.mark.parametrize("expert_tp", [0, 5, 64])
def test_an_illegal_expert_split_is_refused_with_the_legal_ones(expert_tp):
    with pytest.raises(ConfigError, match=rf"^expert_tp {expert_tp} .* one of 1, 2, 4, 8, 16, 32$"):
        KimiLayout.of(K3, 32, expert_tp=expert_tp)


def test_lanes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ConfigError, match="32 ranks do not divide into hosts of 5 lanes"):
        KimiLayout.of(K3, 32, lanes=5)


def test_experts_are_split_over_as_many_ranks_as_whole_groups_allow():
    assert KimiLayout.of(K3, 32).expert_tp == 32  # 96 channels each
    wide = replace(K3, moe_intermediate_size=3072 // 4)  # 24 groups: 32 ranks cannot share them
    layout = KimiLayout.of(wide, 32)
    assert (layout.expert_tp, layout.experts, layout.expert_channels) == (8, 224, 96)


def test_hosts_have_at_most_eight_lanes_that_divide_the_ranks():
    assert [default_lanes(ranks) for ranks in (1, 6, 8, 12, 32, 48)] == [1, 6, 8, 6, 8, 8]


def covered(shares):
    """The members that shares name, in order."""
    return [member for share in shares for member in range(share.start, share.stop)]


@pytest.mark.parametrize("ranks", legal_ranks(K3))
def test_every_member_belongs_to_one_rank(ranks):
    layout = KimiLayout.of(K3, ranks)
    everyone = range(ranks)
    for wholes, share in (
        (K3.kda_heads, layout.kda_heads_of),
        (K3.num_attention_heads, layout.mla_heads_of),
        (K3.shared_intermediate_size, layout.shared_of),
        (K3.intermediate_size, layout.dense_of),
        (K3.vocab_size, layout.vocabulary_of),
    ):
        assert covered(map(share, everyone)) == list(range(wholes))
    for host in layout.hosts:  # whole on every host
        for whole in (K3.q_lora_rank, K3.mla_cache_width, K3.hidden_size, K3.num_experts):
            assert covered(layout.lane_of(rank, whole) for rank in host) == list(range(whole))
    pairs = [
        (expert, channel // 32)
        for rank in everyone
        for expert in layout.experts_of(rank)
        for channel in covered([layout.expert_channels_of(rank)])[::32]
    ]
    assert len(pairs) == len(set(pairs)) == K3.num_experts * K3.moe_intermediate_size // 32


def test_the_layers_of_the_published_model_are_four_loops():
    found = [(s.first, [form.attention for form in s.forms], s.turns) for s in segments(K3)]
    assert found == [
        (0, ["kda"], 1),
        (1, ["kda", "kda", "mla", "kda"], 22),
        (89, ["kda"], 2),
        (91, ["mla"], 2),
    ]


@pytest.mark.parametrize("config", [K3, replace(K3, num_hidden_layers=13, mla_layers=(3, 7, 12))])
def test_the_loops_go_through_every_layer_once_with_its_own_form(config):
    layers = []
    for segment in segments(config):
        for turn in range(segment.turns):
            for member, form in enumerate(segment.forms):
                layer = segment.layers(member)[turn]
                assert form.attention == config.layer_kind(layer)
                assert form.dense == (layer in config.dense_layers)
                layers.append(layer)
    assert layers == list(range(config.num_hidden_layers))


def test_a_rank_of_32_holds_its_part_of_the_published_model():
    """1.446 TB of experts over 32 ranks, and the rest without needless copies."""
    leaves = jax.tree.leaves(weight_shapes(KimiLayout.of(K3, 32), np.dtype("uint16")))
    packed = sum(leaf.size for leaf in leaves if leaf.dtype == np.uint8)
    assert packed == 92 * 896 * 17_547_264 // 32
    rest = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.dtype != np.uint8)
    assert rest < 5.4e9


@pytest.mark.parametrize("holders", [0, 2, 16, 64])
def test_an_illegal_number_of_holders_is_refused_with_the_legal_ones(holders):
    with pytest.raises(ConfigError, match=rf"^holders {holders} .* held by 1, 8 or 32$"):
        KimiLayout.of(K3, 32, holders=holders)
    with pytest.raises(ConfigError, match=r"hosts of 1: .* held by 1$"):
        KimiLayout.of(K3, 1, holders=2)


@pytest.mark.parametrize("holders", [8, 32])
def test_holders_have_slots_for_all_positions_and_attend_with_their_heads(holders):
    layout = KimiLayout.of(K3, 32, holders=holders)
    assert layout.attending_heads == 3 * holders
    assert sorted(rank for group in layout.holding_groups for rank in group) == list(range(32))
    for slots in (1, 4096, 32768, 100_000):
        held = layout.rank_slots(slots)
        assert held % (128 if held < 1024 else 1024) == 0
        assert slots <= held * holders < slots + (128 if held < 1024 else 1024) * holders


def cheapest(rows, used, **changes):
    sizes = {"ranks": 32, "lanes": 8, "rows": rows, "context": 2 * used} | changes
    return holders_by_cost(K3, **sizes)


def test_long_contexts_are_dealt_out_where_that_is_cheaper():
    used = (2048, 8192, 16384, 131072, 2**18)
    assert [cheapest(1, positions)[0] for positions in used] == [1, 1, 8, 8, 32]
    assert cheapest(8, 4096) == [8, 1, 32]  # each row is swept over alone
    assert cheapest(8, 2**19, ranks=1, lanes=1) == [1]


@pytest.mark.parametrize(("holders", "step_us"), [(1, (3308, 3699)), (8, (3434, 3481))])
def test_the_cost_model_follows_the_predicted_steps(holders, step_us):
    """Steps of one row behind 4,000 and 32,000 positions, of ``docs/kimi-layout.md``."""
    short, long = (
        layer_us(K3, ranks=32, lanes=8, holders=holders, rows=1, positions=positions)
        for positions in (4000, 32000)
    )
    predicted = (step_us[1] - step_us[0]) / len(K3.mla_layers)
    assert long - short == pytest.approx(predicted, rel=0.05)
