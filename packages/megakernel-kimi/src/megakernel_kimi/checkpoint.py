"""The text tensors of a checkpoint, checked against their table, with experts decoded and stacked.

A checkpoint holds every routed expert as three pairs of byte arrays (MXFP4). Here each MoE layer
gets three stacks instead, ``experts.w1.weight`` (gate), ``experts.w3.weight`` (up) and
``experts.w2.weight`` (down), bf16 [experts, out, in]; decoding is exact. All other tensors keep
their names and types. Vision tensors are not read.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.quant import mxfp4

from megakernel_kimi.config import KimiConfig
from megakernel_kimi.tensors import (
    PREFIX,
    TensorSpec,
    dense_tensors,
    expert_tensors,
    global_tensors,
    layer_tensors,
)

__all__ = ["check_tensors", "experts_prefix", "read_experts", "read_layer", "read_tensors"]

_NUMPY = {"BF16": "bfloat16", "F32": "float32", "U8": "uint8"}
EXPERT_MATRICES = ("w1", "w3", "w2")


def experts_prefix(layer: int) -> str:
    """What the names of a layer's expert tensors begin with."""
    return f"{PREFIX}layers.{layer}.block_sparse_moe.experts."


def check_tensors(checkpoint: Checkpoint, config: KimiConfig) -> None:
    """Checks that every text tensor exists with its shape and type, before anything is read.

    Raises:
        CheckpointError: names the first problems and counts the rest.
    """
    _require(checkpoint, dense_tensors(config))
    # Routers have shown a wrong number of experts before so many names are listed.
    experts = ((layer, e) for layer in config.moe_layers for e in range(config.num_experts))
    _require(checkpoint, {n: s for at in experts for n, s in expert_tensors(config, *at).items()})


def _require(checkpoint: Checkpoint, specs: Mapping[str, TensorSpec]) -> None:
    for kind, dtype in _NUMPY.items():
        shapes = {name: spec.shape for name, spec in specs.items() if spec.dtype == kind}
        checkpoint.require(shapes, [dtype])


def read_experts(checkpoint: Checkpoint, config: KimiConfig, layer: int) -> dict[str, np.ndarray]:
    """The routed experts of a layer, decoded: three stacks, bf16 [experts, out, in].

    Raises:
        ValueError: a scale is such that decoding would not be exact.
    """
    prefix = experts_prefix(layer)

    def decoded(expert: int, matrix: str) -> np.ndarray:
        name = f"{prefix}{expert}.{matrix}.weight"
        weight = mxfp4.Mxfp4(checkpoint.read(f"{name}_packed"), checkpoint.read(f"{name}_scale"))
        weight.check_exact(name)
        return mxfp4.decode(weight, ml_dtypes.bfloat16)

    return {
        f"{prefix}{matrix}.weight": np.stack(
            [decoded(expert, matrix) for expert in range(config.num_experts)]
        )
        for matrix in EXPERT_MATRICES
    }


def read_layer(checkpoint: Checkpoint, config: KimiConfig, layer: int) -> dict[str, np.ndarray]:
    """All tensors of one layer by name, routed experts decoded."""
    found = {name: checkpoint.read(name) for name in layer_tensors(config, layer)}
    if layer in config.moe_layers:
        found |= read_experts(checkpoint, config, layer)
    return found


def read_tensors(checkpoint: Checkpoint, config: KimiConfig) -> Mapping[str, np.ndarray]:
    """All text tensors by name, routed experts decoded: what the reference model reads.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape or type; nothing is read then.
        ValueError: a scale of an expert is such that decoding would not be exact.
    """
    check_tensors(checkpoint, config)
    found = {name: checkpoint.read(name) for name in global_tensors(config)}
    for layer in range(config.num_hidden_layers):
        found |= read_layer(checkpoint, config, layer)
    return found
