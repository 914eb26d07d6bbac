"""Reading checkpoints: a folder or Hugging Face repository of safetensors files, in bounded memory.

::

    checkpoint = open_checkpoint("Qwen/Qwen3.8-27B")     # or a folder
    checkpoint.require({"lm_head.weight": (248320, 5120)}, dtypes=["bfloat16"])
    shard = checkpoint.read("lm_head.weight", (slice(0, 31040), slice(None)))
    config = fetch_json("Qwen/Qwen3.8-27B", "config.json")    # one file, without the weights

Opening reads the JSON files and the header of every weights file and checks all of them, so that a
damaged or incomplete checkpoint is refused before any tensor is allocated. Nothing from a
checkpoint is ever executed or unpickled.
"""

from kda_mla_kernels.checkpoint.header import TensorInfo
from kda_mla_kernels.checkpoint.hub import fetch_file, fetch_json, open_checkpoint
from kda_mla_kernels.checkpoint.opened import Checkpoint

__all__ = ["Checkpoint", "TensorInfo", "fetch_file", "fetch_json", "open_checkpoint"]
