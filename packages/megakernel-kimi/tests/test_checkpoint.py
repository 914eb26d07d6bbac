"""Reading the tiny checkpoint, which stores its experts as the published one does."""

import hashlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from kda_mla_kernels.errors import CheckpointError
from megakernel_kimi.checkpoint import check_tensors, experts_prefix, read_experts, read_tensors


def test_every_decoded_expert_has_the_bits_of_the_golden(golden, tiny_tensors):
    digests = dict(entry.split(" ") for entry in golden["experts_dequantized_sha256"])
    assert len(digests) == 6 * 16 * 3
    for name, digest in digests.items():
        layer, _, rest = name.partition(".block_sparse_moe.experts.")
        expert, matrix, _ = rest.split(".")
        prefix = experts_prefix(int(layer.rsplit(".", 1)[1]))
        found = tiny_tensors[f"{prefix}{matrix}.weight"][int(expert)]
        assert found.dtype == ml_dtypes.bfloat16
        assert hashlib.sha256(found.tobytes()).hexdigest() == digest, name


def test_only_text_tensors_are_read_and_keep_their_types(tiny_checkpoint, tiny_tensors):
    assert {name.split(".")[0] for name in tiny_checkpoint.names()} > {"language_model"}
    assert {name.split(".")[0] for name in tiny_tensors} == {"language_model"}
    kept = {name: array for name, array in tiny_tensors.items() if ".experts." not in name}
    for name, array in kept.items():
        assert array.dtype == tiny_checkpoint.info(name).dtype
    assert {array.dtype for array in kept.values()} == {
        np.dtype(np.float32),
        np.dtype(ml_dtypes.bfloat16),
    }


def test_a_missing_layer_is_named_before_anything_is_read(tiny_checkpoint, tiny_config):
    with pytest.raises(CheckpointError, match=r"layers\.7\.input_layernorm\.weight' is missing"):
        read_tensors(tiny_checkpoint, replace(tiny_config, num_hidden_layers=8))


def test_a_tensor_of_the_wrong_shape_is_named(tiny_checkpoint, tiny_config):
    with pytest.raises(CheckpointError, match=r"kv_b_proj\.weight' has shape \[1024, 128\]"):
        check_tensors(tiny_checkpoint, replace(tiny_config, qk_nope_head_dim=96))


def test_a_scale_that_is_no_number_is_refused(tiny_checkpoint, tiny_config):
    class Damaged:
        def read(self, name):
            array = tiny_checkpoint.read(name)
            if name.endswith("experts.3.w2.weight_scale"):
                array[5, 1] = 255
            return array

    with pytest.raises(ValueError, match=r"experts\.3\.w2\.weight: scale byte 255 at \(5, 1\)"):
        read_experts(Damaged(), tiny_config, 1)
