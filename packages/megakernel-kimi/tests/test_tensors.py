"""Tensor names and shapes against a checkpoint in the real format, and the published totals."""

import json
from pathlib import Path

from megakernel_kimi.config import KimiConfig
from megakernel_kimi.presets import kimi_k3
from megakernel_kimi.tensors import (
    active_parameters,
    count_parameters,
    expert_tensors,
    layer_tensors,
    tensors,
)

TINY = Path(__file__).parent / "golden" / "k3_tiny"


def test_names_shapes_and_dtypes_are_those_of_the_tiny_checkpoint():
    stored = json.loads((TINY / "tensors.json").read_text())
    text = {k: v for k, v in stored.items() if k.startswith("language_model.")}
    ours = {
        name: f"{spec.dtype} {'x'.join(map(str, spec.shape))}"
        for name, spec in tensors(KimiConfig.from_file(TINY))
    }
    assert ours == text
    assert len(stored) - len(text) == 2


def test_no_name_is_given_twice():
    names = [name for name, _ in tensors(KimiConfig.from_file(TINY))]
    assert len(names) == len(set(names))


def test_parameter_counts_are_those_of_the_published_checkpoint():
    counts = count_parameters(kimi_k3())
    assert counts.mxfp4 == 2_722_740_830_208
    assert counts.f32 == 11_122_432
    # The published BF16 count includes the vision tower and its projector, whose matrices are
    # known: 27 layers of hidden 1024, qkv 1536 and ffn 4096, 14x14 patches, and a projector from
    # 4 merged patches of 1024. Norms and position tables make up the rest.
    vision = 57_179_884_544 - counts.bf16
    layer = 3 * 1024 * 1536 + 1536 * 1024 + 2 * 1024 * 4096
    matrices = 27 * layer + 3 * 14 * 14 * 1024 + 4096 * 4096 + 4096 * 7168
    assert 0 < vision - matrices < 5_000_000
    assert counts.total + vision == 2_779_931_837_184


def test_the_number_of_tensors_is_the_published_one_less_the_vision_tower():
    assert sum(1 for _ in tensors(kimi_k3())) == 497_220 - 168


def test_parts_have_the_published_sizes():
    config = kimi_k3()

    def bf16(layer, *without):
        specs = layer_tensors(config, layer).items()
        return sum(
            spec.size
            for name, spec in specs
            if ".self_attn." in name and not name.endswith(without)
            if len(spec.shape) == 2
        )

    gated = ("g_proj.weight", "o_proj.weight")
    assert bf16(0) - bf16(0, *gated) == 176_160_768
    assert bf16(3, *gated) == 56_035_328 - (1536 + 512)
    dense = [s.size for n, s in layer_tensors(config, 0).items() if ".mlp." in n]
    assert sum(dense) == 726_663_168
    expert = expert_tensors(config, 1, 0).values()
    assert sum(spec.size for spec in expert) == 17_547_264


def test_about_104_billion_parameters_are_active_per_token():
    assert abs(active_parameters(kimi_k3()) - 104.19e9) < 0.01e9
