"""How a model is cut over ranks: which counts fit, and that nothing is lost or doubled."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from kda_mla_kernels.checkpoint import open_checkpoint
from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.testing import recompiled
from megakernel_qwen import package
from megakernel_qwen.config import QwenConfig
from megakernel_qwen.layout import QwenLayout, legal_ranks
from megakernel_qwen.tensors import HEAD, expected_tensors
from megakernel_qwen.weights import load_weights
from tpu_collectives.testing import quick_options

from .family import SIZES, bare
from .small import NESTED, random_tensors, reference_logits, small_config, write

LEGAL = {
    "0.8B": (1, 2, 4, 6, 8, 16),
    "2B": (1, 2, 4, 6, 8, 10, 16),
    "4B": (1, 2, 4, 8, 16, 20),
    "9B": (1, 2, 4, 8, 16, 20),
    "27B": (1, 2, 4, 8, 16, 20),
}
"""Beyond the counts that divide all heads, those for which zeros add at most a tenth."""


@pytest.mark.parametrize("size", SIZES)
def test_the_familys_models_fit_these_counts(size):
    assert legal_ranks(QwenConfig.from_json(bare(size))) == LEGAL[size]


@pytest.mark.parametrize("ranks", [3, 32, 64, 0, -2])
def test_an_illegal_count_is_refused_with_the_legal_ones(ranks):
    with pytest.raises(
        ConfigError, match=rf"^{ranks} ranks do not fit .* one of 1, 2, 4, 8, 16, 20$"
    ):
        QwenLayout(QwenConfig.from_json(bare("27B")), ranks)


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"num_attention_heads": 2}, "num_attention_heads 2 would be padded by .*% of all bytes"),
        ({"linear_num_key_heads": 4}, "linear_num_key_heads 4 would be padded by .*%"),
        (
            {"num_attention_heads": 24, "num_key_value_heads": 3},
            "it neither divides num_key_value_heads 3 nor is a multiple of it",
        ),
    ],
)
def test_the_refusal_says_which_size_is_in_the_way(changes, obstacle):
    with pytest.raises(ConfigError, match=f"^8 ranks do not fit this model: {obstacle}"):
        QwenLayout(QwenConfig.from_json(small_config(**changes)), 8)


UNEVEN = {
    "num_attention_heads": 14,  # 7 to a key/value head, which two ranks share as 4 and 3
    "linear_num_key_heads": 8,
    "intermediate_size": 66,
}


def test_heads_that_ranks_cannot_share_evenly_are_padded_by_zeros(tmp_path):
    config = small_config(**UNEVEN)
    tensors = random_tensors(config)
    write(tmp_path, config, tensors)
    layout, weights = loaded(open_checkpoint(tmp_path), QwenConfig.from_json(config), 4)
    assert [layout.queries_of(rank).slice for rank in range(4)] == [
        slice(0, 4),
        slice(4, 7),
        slice(7, 11),
        slice(11, 14),
    ]
    mixer, dim = weights.layers[1].mixer, 16
    stored = tensors[NESTED + "layers.1.self_attn.o_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(mixer.out_proj[1, : 3 * dim], stored[4 * dim : 7 * dim])
    assert not mixer.out_proj[1, 3 * dim :].any()
    gate, _ = np.split(weights.layers[0].mlp.gate_up, 2, axis=-1)
    stored = tensors[NESTED + "layers.0.mlp.gate_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(together(gate)[:, :66], stored.T)
    assert not together(gate)[:, 66:].any()


@pytest.mark.parametrize("backend", ["xla", "megakernel"])
def test_padded_heads_change_no_result(backend, tmp_path):
    config = small_config(**UNEVEN)
    tensors = random_tensors(config)
    model = package.load(
        write(tmp_path / "uneven", config, tensors),
        devices=jax.devices()[:4],
        backend=backend,
        numerics="f32",
        max_rows=2,
        max_context=128,
    )
    tokens = np.array([3, 47])
    model = recompiled(model, quick_options())
    out = model.verify(model.init_state(), [0], [tokens], [0])
    expected = reference_logits(config, tensors, tokens)
    np.testing.assert_allclose(np.asarray(out.logits)[0], expected, rtol=0, atol=2e-4)


def test_the_large_models_shares_on_eight_ranks_are_those_of_the_arithmetic():
    layout = QwenLayout(QwenConfig.from_json(bare("27B")), 8)
    assert (layout.query_heads, layout.kv_heads) == (3, 1)
    assert [layout.first_kv_head(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (layout.key_heads, layout.value_heads) == (2, 6)
    assert (layout.key_width, layout.value_width, layout.conv_channels) == (256, 768, 1280)
    assert (layout.intermediate, layout.vocab_rows) == (2176, 31040)
    assert layout.gdn_columns == (1280, 768, 6, 6)
    assert layout.gqa_columns == (768, 768, 256, 256)


# The shares of all ranks together, put back into the checkpoint's matrices.


def split(columns, widths):
    return np.split(columns, np.cumsum(widths)[:-1], axis=-1)


def together(shares):
    """[ranks, ..., part] -> [..., whole]"""
    return np.concatenate(list(shares), axis=-1)


def rebuilt_gdn(layout, mixer):
    channels, z, b, a = split(mixer.in_proj, layout.gdn_columns)
    parts = (layout.key_width, layout.key_width, layout.value_width)
    qkv = together(together(part)[None] for part in split(channels, parts))
    taps = [together(part) for part in split(mixer.taps, parts)]
    return {
        "in_proj_qkv.weight": qkv[0].T,
        "in_proj_z.weight": together(z).T,
        "in_proj_b.weight": together(b).T,
        "in_proj_a.weight": together(a).T,
        "conv1d.weight": np.concatenate(taps, axis=-1).T[:, None],
        "A_log": together(mixer.a_log),
        "dt_bias": together(mixer.dt_bias),
        "out_proj.weight": np.concatenate(list(mixer.out_proj)).T,
    }


def rebuilt_heads(layout, columns):
    """Keys or values [ranks, hidden, part]; copies must agree."""
    dim, heads = layout.config.head_dim, {}
    for rank, share in enumerate(columns):
        for i, head in enumerate(np.split(share, layout.kv_heads, axis=-1)):
            known = heads.setdefault(layout.first_kv_head(rank) + i, head)
            np.testing.assert_array_equal(known, head)
    assert sorted(heads) == list(range(layout.config.num_key_value_heads))
    assert all(head.shape[-1] == dim for head in heads.values())
    return np.concatenate([heads[i] for i in sorted(heads)], axis=-1).T


def rebuilt_gqa(layout, mixer):
    queries, gates, keys, values = split(mixer.in_proj, layout.gqa_columns)
    heads = (layout.config.num_attention_heads, layout.config.head_dim, -1)
    both = [together(part).T.reshape(heads) for part in (queries, gates)]
    return {
        "q_proj.weight": np.concatenate(both, axis=1).reshape(-1, queries.shape[1]),
        "k_proj.weight": rebuilt_heads(layout, keys),
        "v_proj.weight": rebuilt_heads(layout, values),
        "o_proj.weight": np.concatenate(list(mixer.out_proj)).T,
    }


def rebuilt_mlp(layout, mlp):
    gate, up = split(mlp.gate_up, (layout.intermediate,) * 2)
    return {
        "gate_proj.weight": together(gate).T,
        "up_proj.weight": together(up).T,
        "down_proj.weight": np.concatenate(list(mlp.down)).T,
    }


def loaded(checkpoint, config, ranks):
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("ranks",))
    layout = QwenLayout(config, ranks)
    weights = load_weights(checkpoint, layout, mesh, np.dtype(np.float32))
    return layout, jax.tree.map(np.asarray, weights)


@pytest.fixture(params=[1, 2, 4, 8], ids=lambda ranks: f"{ranks} ranks")
def ranks(request):
    return request.param


def test_all_shares_together_are_the_checkpoint(ranks, tiny_folder, tiny_config, tiny_tensors):
    layout, weights = loaded(open_checkpoint(tiny_folder), tiny_config, ranks)
    found = {
        NESTED + "embed_tokens.weight": np.concatenate(list(weights.embedding)),
        HEAD: np.concatenate(list(weights.head)),
    }
    for i, layer in enumerate(weights.layers):
        name = f"{NESTED}layers.{i}."
        linear = tiny_config.layer_types[i] == "linear_attention"
        kind, rebuilt = ("linear_attn.", rebuilt_gdn) if linear else ("self_attn.", rebuilt_gqa)
        found |= {name + kind + part: x for part, x in rebuilt(layout, layer.mixer).items()}
        found |= {f"{name}mlp.{part}": x for part, x in rebuilt_mlp(layout, layer.mlp).items()}
    for name, values in found.items():
        np.testing.assert_array_equal(values, tiny_tensors[name].astype(np.float32), name)
    # What is left are norms, which every rank holds as a whole.
    rest = set(expected_tensors(tiny_config, NESTED)) - set(found)
    assert all(name.endswith("norm.weight") for name in rest)


def test_every_rank_holds_every_norm(ranks, tiny_folder, tiny_config, tiny_tensors):
    _, weights = loaded(open_checkpoint(tiny_folder), tiny_config, ranks)
    gains = {"norm.weight": weights.final_gain}
    for i, layer in enumerate(weights.layers):
        gains[f"layers.{i}.input_layernorm.weight"] = layer.mixer_gain
        gains[f"layers.{i}.post_attention_layernorm.weight"] = layer.mlp_gain
        if tiny_config.layer_types[i] == "linear_attention":
            gains[f"layers.{i}.linear_attn.norm.weight"] = layer.mixer.norm
        else:
            gains[f"layers.{i}.self_attn.q_norm.weight"] = layer.mixer.q_gain
            gains[f"layers.{i}.self_attn.k_norm.weight"] = layer.mixer.k_gain
    for name, shares in gains.items():
        plain = "linear_attn" in name
        expected = tiny_tensors[NESTED + name].astype(np.float32) + (0 if plain else 1)
        np.testing.assert_array_equal(shares, np.stack([expected] * ranks), name)


@pytest.mark.parametrize("vocabulary", [45, 46, 3])
def test_rows_behind_the_vocabulary_are_zero(vocabulary, tmp_path):
    """3 rows on 4 ranks leave the last rank with nothing but padding."""
    config = small_config(vocab_size=vocabulary)
    tensors = random_tensors(config)
    write(tmp_path, config, tensors)
    layout, weights = loaded(open_checkpoint(tmp_path), QwenConfig.from_json(config), 4)
    assert layout.vocab_rows * 4 >= vocabulary
    for table, name in ((weights.embedding, NESTED + "embed_tokens.weight"), (weights.head, HEAD)):
        rows = np.concatenate(list(table))
        np.testing.assert_array_equal(rows[:vocabulary], tensors[name].astype(np.float32))
        assert not rows[vocabulary:].any()


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """510 rows, which four ranks cannot share evenly."""
    config = small_config(vocab_size=510)
    return write(tmp_path_factory.mktemp("uneven"), config, random_tensors(config))


def test_padding_of_the_vocabulary_leaves_no_trace(uneven):
    tokens = np.array([0, 127, 128, 255, 256, 383, 384, 508, 509])
    logits = []
    for ranks in (1, 4):
        model = package.load(uneven, devices=jax.devices()[:ranks], max_rows=2, max_context=64)
        model = recompiled(model, quick_options())
        out = model.prefill(model.init_state(), 0, tokens, 0, all_logits=True)
        logits.append(np.asarray(out.logits))
        assert model.info.vocab_size == 510
    assert logits[0].shape == logits[1].shape == (9, 510)
    assert logits[0].std() > 0.1
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=2e-5)
