"""Loading: every defect is refused before a weight is read, every legal variant means the same."""

import json
import shutil
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.errors import CheckpointError, ConfigError
from kda_mla_kernels.testing import recompiled
from megakernel_qwen import package
from megakernel_qwen.tensors import HEAD
from tpu_collectives.testing import quick_options

from .small import NESTED, random_tensors, reference_logits, small_config, write


def load(folder, ranks=1, **options):
    options = {"max_rows": 2, "max_context": 64} | options
    return package.load(folder, devices=jax.devices()[:ranks], **options)


@pytest.fixture
def small(tmp_path):
    """The folder of a small checkpoint that a test may damage."""
    return write(tmp_path / "small", small_config(), random_tensors(small_config()))


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Fails a test that reads a tensor or puts anything on a device."""

    def fail(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "read", fail)
    monkeypatch.setattr(jax, "device_put", fail)


def test_the_guard_of_these_tests_sees_weights_being_read(small, nothing_is_read):
    with pytest.raises(AssertionError, match="weights were read"):
        load(small)


# Damaged checkpoints.


@pytest.mark.parametrize(
    "name", ["embed_tokens.weight", "norm.weight", "layers.0.linear_attn.A_log"]
)
def test_a_missing_tensor_is_named(name, small, nothing_is_read):
    tensors = random_tensors(small_config())
    del tensors[NESTED + "layers.1.self_attn.k_norm.weight"], tensors[NESTED + name]
    write(small, small_config(), tensors)
    with pytest.raises(CheckpointError, match=f"'{NESTED}{name}' is missing; "):
        load(small)


def test_a_missing_head_is_named_unless_it_is_tied(small, nothing_is_read):
    tensors = random_tensors(small_config())
    del tensors[HEAD]
    write(small, small_config(), tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head.weight' is missing"):
        load(small)


def test_a_wrong_shape_is_named_with_the_right_one(small, nothing_is_read):
    tensors = random_tensors(small_config())
    tensors[NESTED + "layers.0.mlp.down_proj.weight"] = np.zeros((64, 32), np.float32)
    write(small, small_config(), tensors)
    with pytest.raises(CheckpointError, match=r"down_proj.weight' has shape \[64, 32\], not \[32,"):
        load(small)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8])
def test_a_quantised_tensor_is_refused(dtype, small, nothing_is_read):
    tensors = random_tensors(small_config())
    name = NESTED + "layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(dtype)
    write(small, small_config(), tensors)
    with pytest.raises(CheckpointError, match=f"up_proj.weight' is {np.dtype(dtype).name}, not bf"):
        load(small)


def test_a_truncated_file_is_refused(small, nothing_is_read):
    file = small / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        load(small)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "other.safetensors"}}', r"do not exist, .*'other.safetensors'"),
        ('{"weight_map": {"a": "part.safetensors"}}', "tensor 'a' is in 'part.safetensors', which"),
        ('{"weight_map": {"a": "../part.safetensors"}}', "inside the checkpoint's folder"),
    ],
)
def test_a_bad_index_is_refused(index, message, small, nothing_is_read):
    (small / "model.safetensors").rename(small / "part.safetensors")
    (small / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        load(small)


def test_a_folder_without_weights_is_refused(small):
    (small / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights in"):
        load(small)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([1], "generation_config.json must hold an object"),
        ({"temperature": "hot"}, "generation_config.json: temperature 'hot' must be a number"),
        ({"do_sample": True, "top_k": [20]}, r"generation_config.json: top_k \[20\] must be"),
        ({"eos_token_id": "end"}, "eos_token_id must be an id or a list of ids, not 'end'"),
    ],
)
def test_bad_generation_settings_are_refused(settings, message, small, nothing_is_read):
    (small / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load(small)


# Arguments that do not fit.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 3}, "3 ranks do not fit this model: .* use one of 1, 2, 4, 8"),
        ({"ranks": 0}, "devices .* must name at least one"),
        ({"max_context": 513}, r"a context of 513 positions lies outside 1\.\.512"),
        ({"max_context": 0}, r"a context of 0 positions lies outside 1\.\.512"),
        ({"max_context": -1}, r"a context of -1 positions lies outside 1\.\.512"),
        ({"max_rows": 0}, "max_rows 0 must be at least 1"),
        ({"max_rows": True}, "max_rows True must be a whole number"),
        ({"max_rows": 1.0}, r"max_rows 1\.0 must be a whole number"),
        ({"max_context": True}, "max_context True must be a whole number"),
        ({"feature_layers": (False,)}, "feature layer False must be a whole number"),
        ({"feature_layers": 1}, "feature_layers 1 must be a list of layers"),
        ({"backend": "cuda"}, "backend 'cuda' does not exist"),
        ({"numerics": "f64"}, "numerics 'f64' must be one of f32, bf16, auto"),
        ({"feature_layers": (0, 2)}, r"feature layer 2 lies outside 0\.\.1"),
        ({"feature_layers": (-1,)}, r"feature layer -1 lies outside 0\.\.1"),
        ({"feature_layers": (1, 0, 1)}, r"feature layers \[1, 0, 1\] must be distinct"),
        ({"revision": "main"}, "is a local folder, so revision 'main' cannot be chosen"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(options, message, small, nothing_is_read):
    with pytest.raises(ValueError, match=message):
        load(small, **options)


def test_a_device_named_twice_is_refused(small, nothing_is_read):
    with pytest.raises(ConfigError, match="none twice"):
        package.load(small, devices=[jax.devices()[0]] * 2)


# What a model knows of itself.


def test_a_model_knows_its_sizes(small):
    model = load(small, 4, feature_layers=(1,), numerics="bf16", max_rows=3)
    info = model.info
    assert (info.family, info.name, info.backend, info.numerics) == ("qwen", "small", "xla", "bf16")
    assert (info.ranks, info.legal_ranks) == (4, (1, 2, 4, 8))
    assert (info.vocab_size, info.hidden_size, info.num_layers) == (48, 32, 2)
    assert (info.max_rows, info.max_context, info.max_chunk) == (3, 64, 64)
    assert info.feature_layers == (1,)
    tensors = random_tensors(small_config())
    assert info.parameters == sum(tensor.size for tensor in tensors.values())
    assert info.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights))


def test_the_context_is_that_of_the_config_up_to_a_bound(small, tmp_path):
    assert package.load(small, devices=jax.devices()[:1]).info.max_context == 512
    long = small_config(max_position_embeddings=100_000)
    write(tmp_path / "long", long, random_tensors(long))
    assert package.load(tmp_path / "long", devices=jax.devices()[:1]).info.max_context == 4096
    assert load(tmp_path / "long", max_context=100_000).info.max_context == 100_000


def test_a_checkpoint_without_tokenizer_takes_ids_only(tmp_path):
    folder = tmp_path / "ids-only"
    shutil.copytree(package.embedded_checkpoint(), folder)
    whole = load(folder)
    assert whole.tokenizer is not None
    assert whole.chat_format is not None
    (folder / "tokenizer.json").unlink()
    model = load(folder)
    assert model.tokenizer is None
    assert model.chat_format is None
    assert model.generation == whole.generation  # its end ids are in the configs as well


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, (0.0, 1.0, 0, 0.0)),
        ({}, (0.0, 1.0, 0, 0.0)),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1}, (0.7, 0.9, 20, 0.1)),
        ({"do_sample": True, "top_k": 5}, (1.0, 1.0, 5, 0.0)),
        ({"do_sample": False, "temperature": 0.7}, (0.0, 1.0, 0, 0.0)),
        ({"do_sample": True, "temperature": None, "top_k": None}, (1.0, 1.0, 0, 0.0)),
    ],
)
def test_sampling_defaults_are_the_checkpoints(settings, expected, small):
    if settings is not None:
        (small / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    found = load(small).generation
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == expected


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [(None, None, set()), (3, None, {3}), ([3, 4], 5, {3, 4, 5}), (3, [5, 3], {3, 5})],
)
def test_end_ids_of_both_files_count(config_ids, generation_ids, expected, tmp_path):
    config = small_config(eos_token_id=config_ids)
    settings = {"eos_token_id": generation_ids}
    folder = write(tmp_path / "ends", config, random_tensors(config), generation_config=settings)
    assert load(folder).generation.stop_ids == expected


# Variants that mean the same.


def assert_equal_weights(one, other):
    jax.tree.map(np.testing.assert_array_equal, one.weights, other.weights)


def test_small_vectors_may_be_stored_in_f32(small, tmp_path):
    tensors = random_tensors(small_config())
    for name in tensors:
        if name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight")):
            tensors[name] = tensors[name].astype(np.float32)
    mixed = load(write(tmp_path / "mixed", small_config(), tensors))
    assert_equal_weights(mixed, load(small))
    tensors[NESTED + "layers.0.linear_attn.A_log"] += np.float32(1e-6)
    finer = load(write(tmp_path / "finer", small_config(), tensors))
    rates = [np.asarray(model.weights.layers[0].mixer.a_log) for model in (finer, mixed)]
    assert np.abs(rates[0] - rates[1]).max() > 0  # not rounded to bf16 on the way


def test_a_bare_text_checkpoint_is_the_nested_one(small, tmp_path):
    text = small_config()["text_config"] | {"model_type": "qwen3_5_text"}
    bare = write(tmp_path / "bare", text, random_tensors(small_config(), "model."))
    assert_equal_weights(load(bare), load(small))


def test_other_parts_of_a_checkpoint_are_not_read(small, tmp_path):
    tensors = random_tensors(small_config())
    extra = {"mtp.fc.weight": np.zeros((2, 2), np.int8), "model.visual.x": np.zeros(3, np.float32)}
    whole = load(write(tmp_path / "whole", small_config(), tensors | extra))
    assert_equal_weights(whole, load(small))
    assert whole.info.parameters == load(small).info.parameters


def test_small_models_are_stacked_and_large_ones_unrolled_unless_told(monkeypatch, tmp_path):
    config = small_config(num_hidden_layers=6)
    folder = write(tmp_path / "six", config, random_tensors(config))
    entries = {None: 2, True: 2, False: 6}
    for choice, count in entries.items():
        assert len(load(folder, stack_layers=choice).weights.layers) == count
    monkeypatch.setattr(package, "_CHEAP_SLICES", 1000)
    assert len(load(folder).weights.layers) == 6
    assert len(load(folder, stack_layers=True).weights.layers) == 2


def test_a_tied_model_computes_what_the_reference_does(tmp_path):
    config = small_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    assert HEAD not in tensors
    model = recompiled(load(write(tmp_path / "tied", config, tensors)), quick_options())
    assert model.weights.head is None
    tokens = [3, 47, 0, 11, 11, 30, 2]
    out = model.prefill(model.init_state(), 1, tokens, 0, all_logits=True)
    expected = reference_logits(config, tensors, tokens)
    assert expected.std() > 0.5
    np.testing.assert_allclose(np.asarray(out.logits), expected, rtol=0, atol=1e-4)


# Planted mistakes: what a loader that takes one tensor for another would hold must show in the
# logits of the golden checkpoint.


def swapped(names):
    def plant(tensors):
        first, second = ([n for n in tensors if n.endswith(name)] for name in names)
        for one, other in zip(first, second, strict=True):
            tensors[one], tensors[other] = tensors[other], tensors[one]

    return plant


def changed(suffix, change):
    def plant(tensors):
        for name in [name for name in tensors if name.endswith(suffix)]:
            tensors[name] = np.ascontiguousarray(change(tensors[name]))

    return plant


def keys_first(matrix):
    q, k, v = np.split(matrix, [512, 1024])
    return np.concatenate([k, q, v])


def queries_then_gates(matrix):
    queries, gates = np.split(matrix, 2)
    heads = [part.reshape(8, 64, -1) for part in (queries, gates)]
    return np.concatenate(heads, axis=1).reshape(matrix.shape)


def values_modulo(matrix):
    """Value head h next to the heads that share h mod 8 instead of h // 2."""
    heads = matrix[1024:].reshape(8, 2, 64, -1)
    return np.concatenate([matrix[:1024], heads.swapaxes(0, 1).reshape(1024, -1)])


MISTAKES = {
    "q and k swapped": changed("in_proj_qkv.weight", keys_first),
    "value heads modulo": changed("in_proj_qkv.weight", values_modulo),
    "queries then gates": changed("q_proj.weight", queries_then_gates),
    "beta and decay swapped": swapped(("in_proj_a.weight", "in_proj_b.weight")),
    "no dt_bias": changed("dt_bias", np.zeros_like),
    "no A_log": changed("A_log", np.zeros_like),
    "taps reversed": changed("conv1d.weight", lambda taps: taps[..., ::-1]),
    "gated norm gain 1 + w": changed("linear_attn.norm.weight", lambda w: w + 1),
    "gain w": changed("layernorm.weight", lambda w: w - 1),
    "query norm gain w": changed("q_norm.weight", lambda w: w - 1),
    "keys and values swapped": swapped(("k_proj.weight", "v_proj.weight")),
    "gate and up swapped": swapped(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "norms swapped": swapped(("input_layernorm.weight", "post_attention_layernorm.weight")),
    "head tied": swapped(("lm_head.weight", "embed_tokens.weight")),
}
MAX_LOGIT_ERROR = 2e-4


@pytest.fixture(scope="module")
def logits_of(tmp_path_factory, tiny_folder, load_tiny, golden):
    """Logits of the golden prompt from changed tensors; all run in one model's programs."""
    model = load_tiny(1, rough=True, feature_layers=tuple(range(8)), stack_layers=False)
    folder = tmp_path_factory.mktemp("mistakes")
    config = json.loads((tiny_folder / "config.json").read_text(encoding="utf-8"))

    def run(tensors):
        write(folder, config, tensors)
        other = load(folder, stack_layers=False)
        mistaken = replace(model, weights=other.weights)
        state = mistaken.init_state()
        tokens = golden["len70/input_ids"]
        return np.asarray(mistaken.prefill(state, 3, tokens, 0, all_logits=True).logits)

    return run


def test_rewritten_tensors_alone_change_nothing(logits_of, golden, tiny_tensors):
    error = np.abs(logits_of(tiny_tensors) - golden["len70/fp32/logits"])
    assert error.max() < MAX_LOGIT_ERROR


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_tensor_taken_for_another_is_caught(mistake, logits_of, golden, tiny_tensors):
    tensors = dict(tiny_tensors)
    MISTAKES[mistake](tensors)
    error = np.abs(logits_of(tensors) - golden["len70/fp32/logits"])
    assert error.max() > 100 * MAX_LOGIT_ERROR
