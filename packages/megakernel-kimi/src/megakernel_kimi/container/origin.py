"""Telling checkpoints of one configuration apart without reading them whole."""

from __future__ import annotations

import hashlib

from kda_mla_kernels.checkpoint import Checkpoint

from megakernel_kimi.config import KimiConfig
from megakernel_kimi.tensors import expert_tensors, global_tensors, layer_tensors

__all__ = ["origin_of"]


def origin_of(checkpoint: Checkpoint, config: KimiConfig) -> str:
    """Digest of the first row of every tensor, of one expert of each layer only.

    Further training moves all of them; what changed rows further down alone would not be noticed.
    """
    hashed = hashlib.sha256()
    names = list(global_tensors(config))
    for layer in range(config.num_hidden_layers):
        names += layer_tensors(config, layer)
        if layer in config.moe_layers:
            names += expert_tensors(config, layer, 0)
    for name in names:
        hashed.update(name.encode())
        hashed.update(checkpoint.read(name, slice(0, 1)).tobytes())
    return hashed.hexdigest()
