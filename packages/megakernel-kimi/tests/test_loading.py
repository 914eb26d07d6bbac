"""Loading: every defect is refused, nothing is read in vain, and a tensor taken for another shows.

Planted mistakes change what the loader reads and run in one model's programs.
"""

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.errors import CheckpointError, ConfigError
from megakernel_kimi import package
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.loading import load_weights
from megakernel_kimi.weights import weight_shapes

TINY = Path(__file__).parent / "golden" / "k3_tiny"


def load(folder=TINY, ranks=1, **options):
    options = {"max_rows": 2, "max_context": 64} | options
    return package.load(folder, devices=jax.devices()[:ranks], **options)


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Fails a test that reads a tensor or puts anything on a device."""

    def fail(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "read", fail)
    monkeypatch.setattr(jax, "device_put", fail)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 3}, "3 ranks do not fit this model: .* use one of 1, 2, 4, 8"),
        ({"ranks": 8, "expert_tp": 16}, "expert_tp 16 does not fit 8 ranks .* one of 1, 2, 4, 8"),
        ({"backend": "cuda"}, "backend 'cuda' does not exist for this family; use megakernel, xla"),
        ({"numerics": "f64"}, "numerics 'f64' must be one of f32, bf16, auto"),
        ({"max_context": 4097}, r"a context of 4097 positions lies outside 1\.\.4096"),
        ({"feature_layers": (8,)}, r"feature layer 8 lies outside 0\.\.7"),
        ({"max_rows": 0}, "max_rows 0 must be at least 1"),
        ({"expert_tp": True}, "expert_tp True must be a whole number"),
        ({"expert_tp": "2"}, "expert_tp '2' must be a whole number"),
        ({"expert_form": "int8"}, "expert_form 'int8' must be one of"),
        ({"expert_form": "fp8"}, "'fp8' is for the kernel, but backend xla runs .* leave it open"),
        ({"expert_form": "fp8", "backend": "xla"}, "'fp8' is for the kernel, but backend xla"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(options, message, nothing_is_read):
    with pytest.raises(ConfigError, match=message):
        load(**options)


@pytest.fixture
def copied(tmp_path):
    folder = tmp_path / "copied"
    shutil.copytree(TINY, folder)
    return folder


@pytest.mark.parametrize("backend", ["xla", "megakernel"])
@pytest.mark.parametrize("name", ["vocab_size", "num_experts"])
def test_sizes_that_the_tensors_do_not_have_are_told_before_anything_is_planned(
    name, backend, copied, nothing_is_read
):
    config = json.loads((copied / "config.json").read_text())
    config["text_config"][name] = 10**9
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="1000000000"):
        package.load(copied, backend=backend)


def test_a_missing_tensor_is_named_before_anything_is_read(copied, nothing_is_read):
    index = copied / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = "language_model.model.layers.3.self_attn.kv_b_proj.weight"
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        load(copied)


class Changed(Checkpoint):
    """A checkpoint that reads some tensors otherwise."""

    def __init__(self, folder, changes):
        super().__init__(folder, "changed")
        self.changes = changes

    def read(self, name, index=None):
        whole = super().read(name)
        for suffix, change in self.changes.items():
            if name.endswith(suffix):
                whole = np.ascontiguousarray(change(whole))
        return whole if index is None else whole[index]


def test_a_scale_that_cannot_be_decoded_exactly_is_refused(load_tiny):
    programs = load_tiny(1).programs
    checkpoint = Changed(TINY, {"layers.2.block_sparse_moe.experts.5.w2.weight_scale": bad_scale})
    with pytest.raises(CheckpointError, match=r"layers.2.*experts.5.w2.weight: scale byte 255 at"):
        load_weights(checkpoint, programs.rank.layout, programs.mesh, np.dtype(np.float32))


def bad_scale(scales):
    changed = scales.copy()
    changed[1, 2] = 255
    return changed


@pytest.mark.parametrize("ranks", [1, 8])
def test_loaded_weights_have_the_planned_shapes(ranks, load_tiny, tiny_config):
    model = load_tiny(ranks)
    planned = weight_shapes(KimiLayout.of(tiny_config, ranks), np.dtype(np.float32))

    def check(held, plan):
        assert held.shape == (ranks, *plan.shape)
        assert held.dtype == plan.dtype

    jax.tree.map(check, model.weights, planned)


def test_experts_may_be_dealt_out_instead_of_split(load_tiny, golden):
    """4 ranks as two groups of two: each group holds half of the experts."""
    model = load_tiny(4, rough=True, expert_tp=2, max_rows=2)
    tokens = golden["len7/input_ids"]
    out = model.prefill(model.init_state(), 1, tokens, 0, all_logits=True)
    np.testing.assert_allclose(out.logits, golden["len7/fp32/logits"], rtol=0, atol=1e-3)


def test_a_model_knows_its_sizes(load_tiny):
    model = load_tiny(8)
    info = model.info
    assert (info.family, info.name, info.backend) == ("kimi", "k3_tiny", "xla")
    assert (info.ranks, info.legal_ranks) == (8, (1, 2, 4, 8))
    assert (info.vocab_size, info.hidden_size, info.num_layers) == (512, 256, 7)
    assert info.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights))
    assert model.tokenizer is None
    assert model.generation.stop_ids == {502}


def test_a_checkpoint_with_a_tokenizer_takes_text(copied, few_ranks):
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in few_ranks.items()]
    (copied / "tiktoken.model").write_text("\n".join(lines) + "\n")
    names = {500: "[BOS]", 501: "[EOS]", 502: "<|end_of_msg|>"}
    names |= {503: "<|open|>", 504: "<|close|>", 505: "<|sep|>"}
    tokens = {str(i): {"content": name, "special": True} for i, name in names.items()}
    (copied / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    model = load(copied)
    ids = model.tokenizer.encode("the weather<|sep|>").ids
    assert ids[-1] == 505
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == "the weather<|sep|>"
    assert model.generation.stop_ids == {501, 502}
    assert model.chat_format is not None


# Planted mistakes.


def halves_swapped(matrix):
    first, second = np.split(matrix, 2)
    return np.concatenate([second, first])


def nibbles_swapped(packed):
    return (packed << 4) | (packed >> 4)


def values_first(kv_b):
    rows = kv_b.reshape(8, 2, 64, -1)
    return rows[:, ::-1].reshape(kv_b.shape)


MISTAKES = {
    "taps reversed": ("q_conv1d.weight", lambda taps: taps[..., ::-1]),
    "no dt_bias": ("dt_bias", np.zeros_like),
    "A_log read from its padding": ("A_log", lambda a: np.roll(a, -8)),
    "heads of the gate moved": ("layers.1.self_attn.g_proj.weight", halves_swapped),
    "values before keys": ("kv_b_proj.weight", values_first),
    "shared key dims first": ("kv_a_proj_with_mqa.weight", lambda w: np.roll(w, 32, axis=0)),
    "high nibble first": ("w1.weight_packed", nibbles_swapped),
    "scales of other groups": ("w2.weight_scale", lambda s: s[:, ::-1]),
    "no bias of the router": ("e_score_correction_bias", np.zeros_like),
    "no mixing projection": ("mlp_res_proj.weight", np.zeros_like),
}


@pytest.fixture(scope="module")
def logits_of(load_tiny, golden):
    """Logits of the golden prompt from changed tensors; all run in one model's programs."""
    model = load_tiny(1, rough=True, feature_layers=tuple(range(8)))

    def run(changes):
        rank, mesh = model.programs.rank, model.programs.mesh
        weights = load_weights(Changed(TINY, changes), rank.layout, mesh, rank.held)
        other = replace(model, weights=weights)
        tokens = golden["len7/input_ids"]
        return other.prefill(other.init_state(), 0, tokens, 0, all_logits=True).logits

    return run


def test_tensors_that_are_only_read_otherwise_change_nothing(logits_of, golden):
    error = np.abs(np.asarray(logits_of({})) - golden["len7/fp32/logits"])
    assert error.max() < 1e-3


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_tensor_taken_for_another_is_caught(mistake, logits_of, golden):
    error = np.abs(np.asarray(logits_of(dict([MISTAKES[mistake]]))) - golden["len7/fp32/logits"])
    assert error.max() > 50e-3
