"""The entry point of the family: names, defaults and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh
from kda_mla_kernels.checkpoint import Checkpoint, open_checkpoint
from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.model import GenerationDefaults, ModelInfo

from megakernel_qwen import embedded
from megakernel_qwen.chat import QwenChatFormat, read_dialect
from megakernel_qwen.config import MODEL_TYPES, QwenConfig
from megakernel_qwen.layout import QwenLayout, legal_ranks
from megakernel_qwen.options import LoadOptions, choose_devices
from megakernel_qwen.tensors import expected_tensors, text_prefix
from megakernel_qwen.tokenizer import load_tokenizer
from megakernel_qwen.weights import held_dtype, load_weights
from megakernel_qwen.xla.backend import MAX_CHUNK, QwenXla, cache_slots
from megakernel_qwen.xla.forward import RANKS
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
) -> QwenXla:
    """Loads a checkpoint of the family; arguments and errors as in the model protocol.

    Args:
        stack_layers: one compiled layer period in a loop (small programs, the default on
            accelerators and for small models) or all layers unrolled (no weight slicing, the
            default for larger models on CPU).
    """
    opened = open_checkpoint(checkpoint, revision, progress=progress)
    config = QwenConfig.from_json(opened.config)
    ranks = choose_devices(devices)
    layout = QwenLayout(config, len(ranks))
    _check_backend(backend)
    options = LoadOptions.of(
        config,
        ranks[0].platform,
        numerics=numerics,
        max_rows=max_rows,
        max_context=max_context,
        feature_layers=feature_layers,
    )
    held = held_dtype(options.numerics, ranks[0].platform)
    options.check_memory(layout, ranks, held)
    tokenizer = load_tokenizer(opened.folder) if _has_tokenizer(opened) else None
    chat_format = QwenChatFormat(tokenizer, read_dialect(opened.folder)) if tokenizer else None
    stops = frozenset(config.eos_ids) | (chat_format.stop_ids if chat_format else frozenset())
    generation = GenerationDefaults.from_json(opened.json("generation_config.json"), stops)

    mesh = Mesh(np.array(ranks), (RANKS,))
    parameters = _parameters(opened, config)
    small = ranks[0].platform != "cpu" or parameters <= _CHEAP_SLICES
    weights = load_weights(
        opened,
        layout,
        mesh,
        held,
        stacked=small if stack_layers is None else stack_layers,
        track=_progress_bar(progress),
    )
    info = ModelInfo(
        family=family,
        name=opened.name,
        backend="xla",
        numerics=options.numerics.name,
        ranks=len(ranks),
        legal_ranks=legal_ranks(config),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        parameters=parameters,
        weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
        max_rows=options.max_rows,
        max_context=options.max_context,
        max_chunk=min(MAX_CHUNK, options.max_context),
        feature_layers=options.feature_layers,
    )
    slots = cache_slots(options.max_context)
    rank = Rank(layout, options.numerics, held)
    programs = Programs(rank, mesh, options.max_rows, slots, options.feature_layers)
    text_side = tokenizer.tokenizer if tokenizer else None
    return QwenXla(info, generation, chat_format, text_side, weights, programs)


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Weights alone are enough for token ids in, token ids out."""
    return (checkpoint.folder / "tokenizer.json").exists()


def _check_backend(backend: str) -> None:
    if backend not in ("auto", "xla"):
        raise ConfigError(f"backend {backend!r} does not exist for this family; use xla or auto")


def _parameters(checkpoint: Checkpoint, config: QwenConfig) -> int:
    """Parameters of the text model; a tied table counts once."""
    table = expected_tensors(config, text_prefix(frozenset(checkpoint.names())))
    return sum(int(np.prod(shape)) for shape in table.values())


def _progress_bar(shown: bool) -> Callable[[Sequence[int], str], Iterator[int]]:
    def track(items: Sequence[int], what: str) -> Iterator[int]:
        if not shown:
            yield from items
            return
        from rich.console import Console
        from rich.progress import track as bar

        yield from bar(items, description=f"loading {what}", console=Console(stderr=True))

    return track
