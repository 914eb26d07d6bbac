"""Writes checkpoints with the names and shapes of the published one, and random values.

``write(folder, experts=8, wide=True)`` makes two layers, which between them have every kind of
sublayer; ``wide`` gives them the published widths. Files are written in pieces.
"""

import json
from pathlib import Path
from zlib import crc32

import ml_dtypes
import numpy as np
from megakernel_kimi.config import KimiConfig
from megakernel_kimi.tensors import tensors

TINY = Path(__file__).parent / "golden" / "k3_tiny"
PIECE_BYTES = 1 << 20
NUMPY = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32), "U8": np.dtype("u1")}

WIDE = {
    "hidden_size": 7168,
    "vocab_size": 4096,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 33792,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
}


def write(folder, experts, wide=False, kda_heads=None, **fields):
    """A folder with config.json, ``fields`` of which are changed, and one weights file."""
    folder.mkdir()
    stored = json.loads((TINY / "config.json").read_text())
    text = stored["text_config"]
    text |= {"num_hidden_layers": 2, "num_experts": experts, **(WIDE if wide else {}), **fields}
    text["linear_attn_config"] |= {"full_attn_layers": [2], "kda_layers": [1]}
    if wide:
        text["linear_attn_config"] |= {"num_heads": 96, "head_dim": 128}
    if kda_heads is not None:
        text["linear_attn_config"]["num_heads"] = kda_heads
    (folder / "config.json").write_text(json.dumps(stored))
    specs = dict(tensors(KimiConfig.from_dict(stored)))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header(specs))
        for name, spec in specs.items():
            left, piece = spec.size * NUMPY[spec.dtype].itemsize, values(name, spec)
            while left:
                left -= file.write(piece[: min(left, len(piece))])


def header(specs):
    entries, at = {}, 0
    for name, spec in specs.items():
        end = at + spec.size * NUMPY[spec.dtype].itemsize
        entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def values(name, spec):
    """Bytes of one piece, which are repeated to the end of the tensor."""
    random = np.random.default_rng(crc32(name.encode()))
    dtype = NUMPY[spec.dtype]
    count = min(spec.size, PIECE_BYTES // dtype.itemsize)
    if name.endswith("_scale"):
        return random.integers(115, 125, count, np.uint8).tobytes()
    if spec.dtype == "U8":
        return random.bytes(count)
    return random.normal(0, 0.05, count).astype(dtype).tobytes()
