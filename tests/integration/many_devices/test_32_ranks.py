"""Models on 32 and 16 virtual devices compute what they compute on one.

The configurations are of the family but with heads enough for 32 ranks. Each case runs in a process
of its own, since the number of devices is fixed when jax starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megakernel_qwen.config import QwenConfig
from megakernel_qwen.layout import legal_ranks
from megakernel_qwen.tensors import expected_tensors
from safetensors.numpy import save_file

pytestmark = pytest.mark.cpu32

CHILD = Path(__file__).with_name("run_model.py")
SECONDS = 280


def config(**changes):
    """Sizes as small as 32 ranks allow; one linear and one full layer."""
    text = {
        "full_attention_interval": 2,
        "head_dim": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 32,
        "linear_num_value_heads": 64,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 256,
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
        "vocab_size": 100,
    }
    return {"model_type": "qwen3_5", "text_config": text | changes}


def write(folder, content):
    """Seeded weights at the scale of trained ones."""
    random = np.random.default_rng(32)
    tensors = {}
    for name, shape in expected_tensors(QwenConfig.from_json(content), "model.").items():
        scale = 0.2 if len(shape) == 1 else 1.0 if "embed" in name else shape[-1] ** -0.5
        values = random.normal(size=shape) * scale + name.endswith("linear_attn.norm.weight")
        tensors[name] = values.astype(np.float32)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (32, {}),
        (32, {"num_key_value_heads": 8, "linear_num_value_heads": 32}),
        (16, {"num_key_value_heads": 4}),
    ],
    ids=["32 ranks", "32 ranks, keys in 4 copies", "16 ranks, keys in 4 copies"],
)
def test_many_ranks_compute_what_one_does(ranks, changes, tmp_path):
    content = config(**changes)
    assert ranks in legal_ranks(QwenConfig.from_json(content))
    write(tmp_path, content)
    # A CPU device takes a thread of a pool as large as NPROC, and a collective needs all at once.
    variables = {"JAX_PLATFORMS": "cpu", "NPROC": str(2 * ranks)}
    subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path), str(ranks)],
        env=os.environ | variables,
        timeout=SECONDS,
        check=True,
    )
    with np.load(tmp_path / "results.npz") as results:
        assert results["logits_one"].std() > 0.3
        for name in ("logits", "verified", "decoded"):
            one, many = results[f"{name}_one"], results[f"{name}_many"]
            np.testing.assert_allclose(many, one, rtol=0, atol=1e-4, err_msg=name)
        assert results["tokens_one"].tolist() == results["tokens_many"].tolist()
