"""KimiConfig: what is read, derived, refused and ignored.

`golden/k3_tiny/config.json` belongs to a tiny checkpoint in the real one's format that the real
checkpoint's own code has run.
"""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
from kda_mla_kernels.errors import ConfigError
from megakernel_kimi.config import KimiConfig
from megakernel_kimi.presets import kimi_k3

TINY = Path(__file__).parent / "golden" / "k3_tiny"


@pytest.fixture
def tiny():
    return json.loads((TINY / "config.json").read_text())


def k3_file(tiny):
    """The full checkpoint's config: the tiny one with the published values."""
    config = copy.deepcopy(tiny)
    tokens = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
    config |= tokens | {"media_placeholder_token_id": 163605}
    config["text_config"] |= tokens | {
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "vocab_size": 163840,
        "intermediate_size": 33792,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attn_res_block_size": 12,
        "max_position_embeddings": 1048576,
    }
    full = [*range(4, 93, 4), 93]
    config["text_config"]["linear_attn_config"] |= {
        "num_heads": 96,
        "head_dim": 128,
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, 94) if layer not in full],
    }
    return config


def test_the_preset_equals_the_published_config(tiny):
    assert KimiConfig.from_dict(k3_file(tiny)) == kimi_k3()


def test_the_tiny_config_is_read_from_its_folder_or_file():
    config = KimiConfig.from_file(TINY)
    assert config == KimiConfig.from_file(TINY / "config.json")
    assert config.hidden_size == 256
    assert config.layer_kinds == ("kda", "kda", "kda", "mla", "kda", "mla", "mla")
    assert config.kda_layers == (0, 1, 2, 4)
    assert config.mla_layers == (3, 5, 6)
    assert config.dense_layers == (0,)
    assert config.moe_layers == (1, 2, 3, 4, 5, 6)
    assert config.eos_token_id == 502


def test_a_bare_text_config_gives_the_same_result(tiny):
    assert KimiConfig.from_dict(tiny["text_config"]) == KimiConfig.from_dict(tiny)


def test_a_field_of_the_text_part_wins_over_the_outer_one(tiny):
    tiny["eos_token_id"] = 501
    assert KimiConfig.from_dict(tiny).eos_token_id == 502
    del tiny["text_config"]["eos_token_id"]
    assert KimiConfig.from_dict(tiny).eos_token_id == 501


def test_the_low_rank_norms_have_an_eps_of_their_own(tiny):
    config = KimiConfig.from_dict(tiny)
    assert (config.rms_norm_eps, config.lora_norm_eps) == (1e-5, 1e-6)
    assert KimiConfig.from_dict(tiny, lora_norm_eps=1e-5).lora_norm_eps == 1e-5


def test_the_full_layer_pattern_follows_the_published_rule():
    config = kimi_k3()
    assert len(config.mla_layers) == 24
    assert len(config.kda_layers) == 69
    for layer in range(93):
        mla = layer % 4 == 3 or layer == 92
        assert config.layer_kind(layer) == ("mla" if mla else "kda")
        assert config.attention_index(layer) == (layer // 4 if mla else layer - layer // 4)
    assert [layer for layer in range(93) if config.starts_block(layer)] == [*range(0, 93, 12)]
    assert config.num_blocks == 8


@pytest.mark.parametrize("config", [kimi_k3(), KimiConfig.from_file(TINY)])
def test_block_counts_equal_those_of_the_running_schedule(config):
    blocks = 0
    for layer in range(config.num_hidden_layers):
        assert config.blocks_before_attention(layer) == blocks
        blocks += config.starts_block(layer)
        assert config.blocks_before_mlp(layer) == blocks
    assert config.num_blocks == blocks


def test_derived_widths_are_the_published_ones():
    config = kimi_k3()
    assert config.kda_width == 12288
    assert config.qk_head_dim == 192
    assert config.mla_scale == 192**-0.5
    assert config.mla_value_width == 12288
    assert config.mla_cache_width == 576
    assert config.shared_intermediate_size == 6144


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        kimi_k3().hidden_size = 1


OTHER_MATHS = {
    "hidden_act": "silu",
    "latent_moe_use_norm": False,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "moe_router_activation_func": "softmax",
    "topk_method": "greedy",
    "attention_bias": True,
    "mlp_bias": True,
    "moe_layer_freq": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "yarn"},
    "sliding_window": 4096,
    "num_key_value_heads": 2,
    "dtype": "float16",
    "quantization_config": {"quant_method": "fp8"},
    "logit_scale": 0.5,
}


@pytest.mark.parametrize("field", OTHER_MATHS)
def test_a_field_that_asks_for_other_maths_is_refused_by_name(tiny, field):
    tiny["text_config"][field] = OTHER_MATHS[field]
    with pytest.raises(ConfigError, match=f"^.*{field}") as error:
        KimiConfig.from_dict(tiny)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_full_rank_gate", False), ("gate_lower_bound", 0.0), ("gate_lower_bound", None)],
)
def test_another_kda_gate_is_refused_by_name(tiny, field, value):
    tiny["text_config"]["linear_attn_config"][field] = value
    with pytest.raises(ConfigError, match=field):
        KimiConfig.from_dict(tiny)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("format",), "pack-quantized"),
        (("kv_cache_scheme",), {"num_bits": 8}),
        (("config_groups",), {}),
        (("config_groups", "group_0", "weights", "group_size"), 16),
        (("config_groups", "group_0", "weights", "num_bits"), 8),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}),
    ],
)
def test_another_quantisation_is_refused_by_name(tiny, place, value):
    target = tiny["text_config"]["quantization_config"]
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = value
    with pytest.raises(ConfigError, match=rf"quantization_config\..*{place[-1]}"):
        KimiConfig.from_dict(tiny)


def test_every_field_that_shapes_the_model_is_required(tiny):
    ignored = {"use_cache", "initializer_range", "use_grouped_topk", "architectures", "dtype"}
    optional = {"num_key_value_heads", "moe_layer_freq", "num_expert_group", "topk_group"}
    optional |= {"num_nextn_predict_layers", "tie_word_embeddings", "model_type"}
    optional |= {"bos_token_id", "eos_token_id", "pad_token_id"}
    for field in set(tiny["text_config"]) - ignored - optional:
        config = copy.deepcopy(tiny)
        del config["text_config"][field]
        with pytest.raises(ConfigError, match=field):
            KimiConfig.from_dict(config)


def test_a_field_that_cannot_change_the_result_is_ignored(tiny):
    expected = KimiConfig.from_dict(tiny)
    tiny["text_config"] |= {"initializer_range": 0.5, "use_cache": False, "rope_theta": 1e6}
    tiny |= {"vision_config": None, "transformers_version": "9.9"}
    assert KimiConfig.from_dict(tiny) == expected


def test_an_unknown_field_can_be_ignored_by_name_and_null_says_nothing(tiny):
    expected = KimiConfig.from_dict(tiny)
    tiny["text_config"] |= {"new_option": 3, "other_option": None}
    tiny["text_config"]["linear_attn_config"]["new_option"] = 3
    with pytest.raises(ConfigError, match="new_option is 3; this field is not known"):
        KimiConfig.from_dict(tiny)
    assert KimiConfig.from_dict(tiny, ignore=frozenset({"new_option"})) == expected


@pytest.mark.parametrize("model_type", [None, "qwen3_5", "kimi_k2", "deepseek_v3"])
def test_an_unknown_model_type_is_refused(tiny, model_type):
    tiny["model_type"] = model_type
    with pytest.raises(ConfigError, match="supported are kimi_k3, kimi_linear"):
        KimiConfig.from_dict(tiny)


def test_an_unknown_text_model_type_is_refused(tiny):
    tiny["text_config"]["model_type"] = "kimi_quadratic"
    with pytest.raises(ConfigError, match=r"text_config\.model_type is 'kimi_quadratic'"):
        KimiConfig.from_dict(tiny)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 256.0, "hidden_size is 256.0; it must be a whole number"),
        ("hidden_size", True, "must be a whole number"),
        ("hidden_size", 0, "hidden_size is 0; it must be above 0"),
        ("rms_norm_eps", "1e-5", "must be a number"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan; it must be above 0 and finite"),
        ("activation_situ_beta", float("inf"), "situ_beta is inf; it must be above 0 and finite"),
        ("activation_situ_beta", float("nan"), "situ_beta is nan; it must be above 0 and finite"),
        ("activation_situ_linear_beta", 1e39, r"situ_linear_beta is 1e\+39; .* in float32"),
        ("activation_situ_linear_beta", 1e-60, "situ_linear_beta is 1e-60; it must be above 0"),
        ("routed_scaling_factor", 10**400, "routed_scaling_factor is too large for a floating"),
        ("moe_renormalize", 1, "must be true or false"),
        ("num_experts_per_token", 17, "there are only 16 experts"),
        ("first_k_dense_replace", 8, r"must lie in 0\.\.7"),
        ("routed_expert_hidden_size", 100, "multiple of 32"),
        ("eos_token_id", 512, r"must lie in 0\.\.511"),
        ("mla_use_nope", 1, "only True is supported"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_named(tiny, field, value, message):
    tiny["text_config"][field] = value
    with pytest.raises(ConfigError, match=message):
        KimiConfig.from_dict(tiny)


@pytest.mark.parametrize("bound", [0.0, 5.0, float("-inf"), float("nan"), -1e39])
def test_the_bound_of_a_log_decay_is_negative_and_finite(tiny, bound):
    tiny["text_config"]["linear_attn_config"]["gate_lower_bound"] = bound
    with pytest.raises(ConfigError, match=r"gate_lower_bound is .*; it must be below 0 and finite"):
        KimiConfig.from_dict(tiny)


@pytest.mark.parametrize("full", [[4, 6], [4, 6, 7, 7], [4, 6, 8], [3, 4, 6, 7], "4,6,7", [4.0]])
def test_layer_lists_must_hold_every_layer_once(tiny, full):
    tiny["text_config"]["linear_attn_config"]["full_attn_layers"] = full
    with pytest.raises(ConfigError, match="full_attn_layers"):
        KimiConfig.from_dict(tiny)


@pytest.mark.parametrize("layers", [(5, 3), (3, 3), (7,), (-1,)])
def test_a_config_made_by_hand_is_checked_too(layers):
    with pytest.raises(ConfigError, match="mla_layers"):
        dataclasses.replace(KimiConfig.from_file(TINY), mla_layers=layers)


def test_an_eps_that_no_file_holds_is_checked_too():
    with pytest.raises(ConfigError, match="lora_norm_eps is inf; it must be above 0 and finite"):
        KimiConfig.from_file(TINY, lora_norm_eps=float("inf"))


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        KimiConfig.from_file(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.json"):
            KimiConfig.from_file(tmp_path)
