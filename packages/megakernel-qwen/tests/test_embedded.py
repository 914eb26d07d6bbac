"""The embedded checkpoint: its files agree with each other and with the script that makes them."""

import importlib.util
import json
import struct
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from megakernel_qwen.embedded import folder
from megakernel_qwen.tokenizer import load_tokenizer

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_embedded_qwen.py"


def read_json(name: str) -> dict:
    return json.loads((folder() / name).read_text(encoding="utf-8"))


def read_tensors() -> dict[str, np.ndarray]:
    data = (folder() / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    body = data[8 + length :]
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16"
        first, last = entry["data_offsets"]
        values = np.frombuffer(body[first:last], ml_dtypes.bfloat16)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


@pytest.fixture(scope="module")
def script():
    if not SCRIPT.is_file():
        pytest.skip("the script that makes the checkpoint is not part of this distribution")
    pytest.importorskip("safetensors")
    spec = importlib.util.spec_from_file_location("make_embedded_qwen", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def expected_shapes(text: dict) -> dict[str, list[int]]:
    hidden, inner, vocab = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    heads = text["linear_num_value_heads"]
    values = heads * text["linear_value_head_dim"]
    qkv = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + values
    head = text["head_dim"]
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    common = {
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "mlp.gate_proj.weight": [inner, hidden],
        "mlp.up_proj.weight": [inner, hidden],
        "mlp.down_proj.weight": [hidden, inner],
    }
    kinds = {
        "linear_attention": {
            "linear_attn.in_proj_qkv.weight": [qkv, hidden],
            "linear_attn.in_proj_z.weight": [values, hidden],
            "linear_attn.in_proj_b.weight": [heads, hidden],
            "linear_attn.in_proj_a.weight": [heads, hidden],
            "linear_attn.conv1d.weight": [qkv, 1, text["linear_conv_kernel_dim"]],
            "linear_attn.A_log": [heads],
            "linear_attn.dt_bias": [heads],
            "linear_attn.norm.weight": [text["linear_value_head_dim"]],
            "linear_attn.out_proj.weight": [hidden, values],
        },
        "full_attention": {
            "self_attn.q_proj.weight": [2 * queries, hidden],
            "self_attn.k_proj.weight": [keys, hidden],
            "self_attn.v_proj.weight": [keys, hidden],
            "self_attn.o_proj.weight": [hidden, queries],
            "self_attn.q_norm.weight": [head],
            "self_attn.k_norm.weight": [head],
        },
    }
    prefix = "model.language_model."
    shapes = {f"{prefix}embed_tokens.weight": [vocab, hidden], f"{prefix}norm.weight": [hidden]}
    for layer, kind in enumerate(text["layer_types"]):
        for name, shape in (common | kinds[kind]).items():
            shapes[f"{prefix}layers.{layer}.{name}"] = shape
    return shapes


def test_the_tensors_are_those_that_the_config_implies():
    config = read_json("config.json")
    assert config["tie_word_embeddings"]  # hence no lm_head
    found = {name: list(tensor.shape) for name, tensor in read_tensors().items()}
    assert found == expected_shapes(config["text_config"])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_divide_the_sizes(ranks):
    text = read_json("config.json")["text_config"]
    for field in (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    ):
        assert text[field] % ranks == 0, field
    assert max(ranks, text["num_key_value_heads"]) % min(ranks, text["num_key_value_heads"]) == 0


def test_layers_alternate_as_in_the_real_models():
    text = read_json("config.json")["text_config"]
    interval = text["full_attention_interval"]
    kinds = ["linear_attention"] * (interval - 1) + ["full_attention"]
    assert text["layer_types"] == kinds * (text["num_hidden_layers"] // interval)


def test_rotary_sections_fill_the_rotated_half():
    text = read_json("config.json")["text_config"]
    rotated = int(text["head_dim"] * text["rope_parameters"]["partial_rotary_factor"])
    assert sum(text["rope_parameters"]["mrope_section"]) == rotated // 2


def test_weights_are_finite_and_of_a_sane_scale():
    tensors = {name: value.astype(np.float32) for name, value in read_tensors().items()}
    assert all(np.isfinite(value).all() for value in tensors.values())
    for name, value in tensors.items():
        if name.endswith("linear_attn.norm.weight"):
            assert np.abs(value - 1).max() < 0.2
        elif "norm" in name:
            assert np.abs(value).max() < 0.2
    # A row of the head times a vector of unit mean square: the spread of one logit.
    head = tensors["model.language_model.embed_tokens.weight"]
    assert np.sqrt((head**2).sum(axis=1)).mean() == pytest.approx(2, rel=0.05)


def test_every_id_of_the_tokenizer_has_a_row_and_some_rows_are_padding():
    tokenizer = load_tokenizer(folder()).tokenizer
    ids = set(tokenizer.get_vocab().values())
    assert ids == set(range(len(ids)))
    assert len(ids) < read_json("config.json")["text_config"]["vocab_size"]


def test_the_files_name_the_same_control_tokens():
    tokenizer = load_tokenizer(folder())
    config, generation = read_json("config.json"), read_json("generation_config.json")
    stops = [tokenizer.control_id("<|im_end|>"), tokenizer.control_id("<|endoftext|>")]
    assert generation["eos_token_id"] == stops
    assert config["text_config"]["eos_token_id"] == stops[1]
    assert config["image_token_id"] == tokenizer.control_id("<|image_pad|>")
    declared = read_json("tokenizer_config.json")["added_tokens_decoder"]
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    assert {int(index): entry["content"] for index, entry in declared.items()} == {
        index: token.content for index, token in added.items()
    }
    assert all(declared[str(index)]["special"] == token.special for index, token in added.items())


def test_the_origin_of_the_text_is_stated():
    notice = (folder() / "NOTICE").read_text(encoding="utf-8")
    assert "Python Software Foundation License" in notice


def test_the_checkpoint_stays_small():
    assert sum(path.stat().st_size for path in folder().iterdir() if path.is_file()) < 6_200_000


def test_the_script_makes_the_same_weights(script):
    made = script.weights(script.config())
    shipped = read_tensors()
    assert made.keys() == shipped.keys()
    for name, value in made.items():
        assert value.tobytes() == shipped[name].tobytes(), name


def test_the_script_makes_the_same_settings(script, tmp_path):
    for name, value in (
        ("config.json", script.config()),
        ("generation_config.json", script.generation_config()),
        ("tokenizer_config.json", script.tokenizer_config()),
    ):
        script.write_json(tmp_path / name, value)
        assert (tmp_path / name).read_bytes() == (folder() / name).read_bytes(), name


def test_the_script_trains_the_same_tokenizer_from_the_same_text(script):
    """On a small text: the shipped one depends on the documentation of one Python version."""
    texts = ["the quick brown fox", "jumps over the lazy dog, the end"] * 3
    first, second = script.train_tokenizer(texts), script.train_tokenizer(texts)
    assert first.to_str() == second.to_str()
    shipped, made = read_json("tokenizer.json"), json.loads(first.to_str())
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        assert made[part] == shipped[part], part
