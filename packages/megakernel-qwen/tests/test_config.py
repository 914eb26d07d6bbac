"""Configurations of the whole family are understood; what is not implemented is refused by name."""

import math
import re
import warnings

import pytest
from kda_mla_kernels.errors import ConfigError
from megakernel_qwen.config import QwenConfig
from megakernel_qwen.tensors import expected_tensors

from .family import COMMON, SIZES, bare, nested

PARAMETERS = {
    "0.8B": 752_393_024,
    "2B": 1_881_825_088,
    "4B": 4_205_751_296,
    "9B": 8_953_803_264,
    "27B": 26_895_998_464,
}


def rope(**changes):
    return {"rope_parameters": COMMON["rope_parameters"] | changes}


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("size", SIZES)
def test_every_size_of_the_family_has_the_published_number_of_parameters(size):
    config = QwenConfig.from_json(nested(bare(size)))
    table = expected_tensors(config, "model.language_model.")
    assert sum(math.prod(shape) for shape in table.values()) == PARAMETERS[size]
    assert ("lm_head.weight" in table) != config.tied_embeddings


@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_derived_values_are_those_of_the_checkpoint(size):
    config = QwenConfig.from_json(nested(bare(size)))
    hidden, wide, layers, heads, kv_heads, value_heads, tied = SIZES[size]
    assert (config.hidden_size, config.intermediate_size) == (hidden, wide)
    assert (config.num_layers, config.period) == (layers, 4)
    assert config.full_layers == tuple(range(3, layers, 4))
    assert set(config.linear_layers) == set(range(layers)) - set(config.full_layers)
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert config.linear_num_value_heads == value_heads
    assert (config.linear_key_width, config.linear_value_width) == (2048, value_heads * 128)
    assert config.conv_channels == 4096 + value_heads * 128
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert (config.rms_norm_eps, config.tied_embeddings) == (1e-6, tied)
    assert (config.max_position_embeddings, config.vocab_size) == (262144, 248320)
    assert config.eos_ids == (248044,)


def test_the_large_models_tensors_have_the_published_shapes():
    table = expected_tensors(QwenConfig.from_json(bare()), "model.")
    assert len(table) == 851
    assert table["model.layers.0.linear_attn.in_proj_qkv.weight"] == (10240, 5120)
    assert table["model.layers.0.linear_attn.conv1d.weight"] == (10240, 1, 4)
    assert table["model.layers.63.self_attn.q_proj.weight"] == (12288, 5120)
    assert table["model.layers.63.self_attn.k_proj.weight"] == (1024, 5120)


@pytest.mark.parametrize("size", SIZES)
def test_the_bare_text_form_means_the_same(size):
    assert QwenConfig.from_json(bare(size)) == QwenConfig.from_json(nested(bare(size)))


@pytest.mark.parametrize("layer_types", [..., None], ids=["missing", "null"])
def test_layer_types_follow_from_the_interval(layer_types):
    assert QwenConfig.from_json(bare(layer_types=layer_types)) == QwenConfig.from_json(bare())
    derived = QwenConfig.from_json(bare(layer_types=layer_types, full_attention_interval=8))
    assert (derived.full_layers, derived.period) == (tuple(range(7, 64, 8)), 8)


@pytest.mark.parametrize(
    ("pattern", "period"), [("LLLF", 4), ("LLLL", 1), ("FFFF", 1), ("LFLF", 2), ("LLFL", 4)]
)
def test_the_period_is_the_shortest_repeated_pattern(pattern, period):
    names = {"L": "linear_attention", "F": "full_attention"}
    kinds = [names[letter] for letter in pattern]
    assert QwenConfig.from_json(bare(num_hidden_layers=4, layer_types=kinds)).period == period


def test_the_head_may_be_tied_by_the_outer_field():
    text = bare(tie_word_embeddings=...)
    assert QwenConfig.from_json(nested(text, tie_word_embeddings=True)).tied_embeddings
    assert not QwenConfig.from_json(nested(text, tie_word_embeddings=False)).tied_embeddings


def test_rotary_settings_may_stand_beside_rope_parameters():
    text = bare(rope_parameters=..., rope_theta=5e6, partial_rotary_factor=0.5)
    config = QwenConfig.from_json(text)
    assert (config.rope_theta, config.rotary_dim) == (5e6, 128)


def test_missing_rotary_settings_are_those_of_the_family():
    config = QwenConfig.from_json(bare(rope_parameters=...))
    assert (config.rope_theta, config.rotary_dim) == (1e7, 64)


@pytest.mark.parametrize(
    ("value", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (0, (0,)), (None, ()), (..., ())]
)
def test_end_ids_are_one_or_several(value, ids):
    assert QwenConfig.from_json(bare(eos_token_id=value)).eos_ids == ids


def test_the_gate_is_called_swish_or_silu():
    configs = [QwenConfig.from_json(bare(output_gate_type=name)) for name in ("swish", "silu")]
    assert configs[0] == configs[1] == QwenConfig.from_json(bare())


def test_the_number_of_experts_may_say_that_there_are_none():
    assert QwenConfig.from_json(bare(num_experts=0)) == QwenConfig.from_json(bare())


# What is refused: the change, and what the message must say.
REFUSED = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' .* must be 'silu'"),
    "biases": ({"attention_bias": True}, "attention_bias True .* must be False"),
    "no output gate": ({"attn_output_gate": False}, "attn_output_gate False .* must be True"),
    "other gate": ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' .*'swish' or"),
    "bf16 states": ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16' .*'float32'"),
    "rope type": (rope(rope_type="yarn"), "rope_type 'yarn' .* must be 'default'"),
    "old rope type": (rope(type="yarn"), "type 'yarn' .* must be 'default'"),
    "rope scaling": ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling \{.*yarn.* be None"),
    "rope parameters": ({"rope_parameters": [1]}, r"rope_parameters \[1\] must be an object"),
    "theta": (rope(rope_theta=0), "rope_theta 0 must be a positive number"),
    "theta as text": (rope(rope_theta="1e7"), "rope_theta '1e7' must be a positive number"),
    "theta not finite": (rope(rope_theta=math.nan), "rope_theta nan must be a positive number"),
    "eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps -1e-06 must be a positive number"),
    "eps not finite": ({"rms_norm_eps": math.inf}, "rms_norm_eps inf must be a positive"),
    "eps as switch": ({"rms_norm_eps": True}, "rms_norm_eps True must be a positive number"),
    "window": ({"sliding_window": 4096}, "sliding_window 4096 .* must be None"),
    "use of a window": ({"use_sliding_window": True}, "use_sliding_window True .*be False"),
    "experts": ({"num_experts": 128}, "num_experts 128 .* must be 0 or None"),
    "quantisation": (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config .*fp8.* must be None",
    ),
    "too few layer types": (
        {"layer_types": ["full_attention"]},
        "layer_types lists 1 layers, num_hidden_layers is 64",
    ),
    "no layer types": ({"layer_types": []}, "layer_types lists 0 layers, num_hidden_layers is 64"),
    "layer types as text": ({"layer_types": "full"}, "layer_types 'full' must be a list"),
    "layer types as number": ({"layer_types": 4}, "layer_types 4 must be a list"),
    "unknown kind": (
        {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
        "layer type 'chunked_attention' .* must be linear_attention or full_attention",
    ),
    "interval": ({"full_attention_interval": 0}, "full_attention_interval 0 must be a positive"),
    "query heads": (
        {"num_attention_heads": 25},
        "num_attention_heads 25 is not a multiple of num_key_value_heads 4",
    ),
    "value heads": (
        {"linear_num_value_heads": 24},
        "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16",
    ),
    "odd rotary dims": (rope(partial_rotary_factor=0.13), "gives 33 rotary dims of 256.*even"),
    "too many rotary dims": (rope(partial_rotary_factor=2), "gives 512 rotary dims of 256"),
    "no rotary dims": (rope(partial_rotary_factor=0.001), "gives 0 rotary dims of 256"),
    "tied as text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes' must be true or"),
    "end id as text": ({"eos_token_id": "</s>"}, "eos_token_id '</s>' must be an id or a list"),
    "end ids as switch": ({"eos_token_id": [True]}, r"eos_token_id \[True\] must be an id"),
    "negative end id": ({"eos_token_id": -1}, "eos_token_id -1 must be an id or a list"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("form", [lambda text: text, nested], ids=["bare", "nested"])
def test_a_refusal_names_field_and_value_and_what_is_right(case, form):
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        QwenConfig.from_json(form(bare(**changes)))


COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_positive_integers(name):
    for value in (0, -4, 4.0, "4", True, [4]):
        with pytest.raises(ConfigError, match=f"{name} {re.escape(repr(value))} must be a pos"):
            QwenConfig.from_json(bare(**{name: value}))


@pytest.mark.parametrize("name", COUNTS[:-2])
def test_sizes_without_a_default_must_be_present(name):
    for value in (None, ...):
        with pytest.raises(ConfigError, match=f"lacks {name}"):
            QwenConfig.from_json(bare(**{name: value}, layer_types=...))


@pytest.mark.parametrize("model_type", ["qwen3_next", "llama", None, 3, ["qwen3_5"]])
def test_another_model_type_is_refused(model_type):
    message = f"model_type {re.escape(repr(model_type))} is not one of qwen3_5, qwen3_5_text"
    with pytest.raises(ConfigError, match=message):
        QwenConfig.from_json(bare(model_type=model_type))
    with pytest.raises(ConfigError, match=message):
        QwenConfig.from_json(nested(bare(), model_type=model_type))


def test_another_text_model_inside_is_refused():
    with pytest.raises(ConfigError, match="model_type 'qwen3_5_moe_text' is not one of"):
        QwenConfig.from_json(nested(bare(model_type="qwen3_5_moe_text")))


def test_a_quantised_multimodal_checkpoint_is_refused():
    with pytest.raises(ConfigError, match=r"quantization_config .*fp8"):
        QwenConfig.from_json(nested(bare(), quantization_config={"quant_method": "fp8"}))


@pytest.mark.parametrize("text", [None, [], "text"])
def test_the_text_part_must_be_an_object(text):
    with pytest.raises(ConfigError, match=r"text_config .* must be an object"):
        QwenConfig.from_json({"model_type": "qwen3_5", "text_config": text})


def test_unknown_fields_warn_and_change_nothing():
    with pytest.warns(UserWarning, match="without a known meaning: aaa_scale, logit_softcap"):
        config = QwenConfig.from_json(nested(bare(logit_softcap=30.0, aaa_scale=2)))
    assert config == QwenConfig.from_json(bare())


def test_unknown_rotary_fields_warn():
    with pytest.warns(UserWarning, match="without a known meaning: rope_parameters.factor"):
        QwenConfig.from_json(bare(**rope(factor=4.0)))
