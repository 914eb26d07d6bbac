"""The entry point of the family: names, defaults and loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from kda_mla_kernels.backend import (
    CANDIDATES,
    RANKS,
    BackendModel,
    LoadOptions,
    Track,
    choose_devices,
    chosen_kernel,
    held_dtype,
    progress_bar,
)
from kda_mla_kernels.block import Block
from kda_mla_kernels.checkpoint import Checkpoint, open_checkpoint
from kda_mla_kernels.model import GenerationDefaults
from tpu_collectives import Topology

from megakernel_qwen import embedded
from megakernel_qwen.chat import QwenChatFormat, read_dialect
from megakernel_qwen.config import MODEL_TYPES, QwenConfig
from megakernel_qwen.kernel import KernelModel, KernelPrograms, load_kernel_weights
from megakernel_qwen.kernel.plan import StepPlan
from megakernel_qwen.kernel.step import planned_stream
from megakernel_qwen.layout import QwenLayout, legal_ranks
from megakernel_qwen.tensors import expected_tensors, text_prefix
from megakernel_qwen.tokenizer import load_tokenizer
from megakernel_qwen.weights import check_tensors, load_weights
from megakernel_qwen.xla.caches import cache_shapes
from megakernel_qwen.xla.mixers import Rank
from megakernel_qwen.xla.programs import Programs

__all__ = [
    "default_repo",
    "embedded_checkpoint",
    "family",
    "load",
    "model_types",
    "variable_prefix",
]

family = "qwen"
model_types = MODEL_TYPES
default_repo = "Qwen/Qwen3.8-27B"
variable_prefix = "QWEN"

_CHEAP_SLICES = 64 * 2**20
"""Parameters up to which a CPU runs stacked layers by default: a loop cuts each layer's weights
out of the stack, which costs little for small models and halves the compile time."""


def embedded_checkpoint() -> Path:
    """Folder of the tiny checkpoint that ships with this package."""
    return embedded.folder()


def load(
    checkpoint: str | Path,
    *,
    revision: str | None = None,
    devices: Sequence[jax.Device] | None = None,
    backend: Literal["auto", "xla", "megakernel"] = "auto",
    numerics: Literal["auto", "f32", "bf16"] = "auto",
    max_rows: int = 8,
    max_context: int | None = None,
    feature_layers: Sequence[int] = (),
    progress: bool = False,
    stack_layers: bool | None = None,
) -> BackendModel:
    """Loads a checkpoint of the family; arguments and errors as in the model protocol.

    Args:
        stack_layers: one compiled layer period in a loop (small programs, the default on
            accelerators and for small models) or all layers unrolled (no weight slicing, the
            default for larger models on CPU). The kernel has one form only.
    """
    opened = open_checkpoint(checkpoint, revision, progress=progress)
    config = QwenConfig.from_json(opened.config)
    check_tensors(opened, config)  # before anything is planned for sizes that it does not have
    ranks = choose_devices(devices)
    platform = ranks[0].platform
    layout = QwenLayout(config, len(ranks))
    options = LoadOptions.of(
        platform,
        longest_context=config.max_position_embeddings,
        last_feature=config.num_layers - 1,
        numerics=numerics,
        max_rows=max_rows,
        max_context=max_context,
        feature_layers=feature_layers,
    )
    kernel = chosen_kernel(backend, ranks, partial(_kernel_model, layout, options))
    held = held_dtype(options.numerics, platform) if kernel is None else kernel.held
    shapes = cache_shapes(layout, options.max_rows, options.slots, held)
    options.check_memory(shapes, ranks)
    tokenizer = load_tokenizer(opened.folder) if _has_tokenizer(opened) else None
    chat_format = QwenChatFormat(tokenizer, read_dialect(opened.folder)) if tokenizer else None
    stops = frozenset(config.eos_ids) | (chat_format.stop_ids if chat_format else frozenset())
    generation = GenerationDefaults.from_json(opened.json("generation_config.json"), stops)

    mesh = Mesh(np.array(ranks), (RANKS,))
    parameters = _parameters(opened, config)
    small = platform != "cpu" or parameters <= _CHEAP_SLICES
    stacked = small if stack_layers is None else stack_layers
    source = _Source(opened, layout, mesh, held, options, progress_bar(progress))
    weights, programs = source.xla(stacked) if kernel is None else source.kernel(kernel)
    info = options.describe(
        weights,
        len(ranks),
        family=family,
        name=opened.name,
        backend="xla" if kernel is None else "megakernel",
        legal_ranks=legal_ranks(config),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        parameters=parameters,
    )
    text_side = tokenizer.tokenizer if tokenizer else None
    return BackendModel(info, generation, chat_format, text_side, weights, programs)


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Weights alone are enough for token ids in, token ids out."""
    return (checkpoint.folder / "tokenizer.json").exists()


def _kernel_model(layout: QwenLayout, options: LoadOptions, topology: Topology) -> KernelModel:
    """Raises ConfigError for everything that would only show when the kernel is compiled."""
    model = KernelModel(layout, options.numerics, topology, options.slots, options.feature_layers)
    planned_stream(StepPlan(model, Block(options.max_rows, 1), CANDIDATES))
    return model


@dataclass(frozen=True)
class _Source:
    """A checked checkpoint and where it goes."""

    checkpoint: Checkpoint
    layout: QwenLayout
    mesh: Mesh
    held: np.dtype
    options: LoadOptions
    track: Track

    def xla(self, stacked: bool) -> tuple[Any, Programs]:
        weights = load_weights(
            self.checkpoint, self.layout, self.mesh, self.held, stacked=stacked, track=self.track
        )
        return weights, Programs.of(self.options, self.mesh, rank=self._rank)

    def kernel(self, model: KernelModel) -> tuple[Any, Programs]:
        weights = load_kernel_weights(
            self.checkpoint, self.layout, self.mesh, self.held, self.track
        )
        return weights, KernelPrograms.of(self.options, self.mesh, rank=self._rank, model=model)

    @property
    def _rank(self) -> Rank:
        return Rank(self.layout, self.options.numerics, self.held)


def _parameters(checkpoint: Checkpoint, config: QwenConfig) -> int:
    """Parameters of the text model; a tied table counts once."""
    table = expected_tensors(config, text_prefix(frozenset(checkpoint.names())))
    return sum(int(np.prod(shape)) for shape in table.values())
