"""The entry point of the family: names, defaults and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh
from kda_mla_kernels.checkpoint import Checkpoint, open_checkpoint
from kda_mla_kernels.errors import CheckpointError, ConfigError
from kda_mla_kernels.model import GenerationDefaults, ModelInfo
from kda_mla_kernels.numerics import Numerics, numerics_of

from megakernel_qwen import embedded
from megakernel_qwen.chat import QwenChatFormat, read_dialect
from megakernel_qwen.config import MODEL_TYPES, QwenConfig, token_ids
from megakernel_qwen.layout import QwenLayout, legal_ranks
from megakernel_qwen.tensors import expected_tensors, text_prefix
from megakernel_qwen.tokenizer import load_tokenizer
from megakernel_qwen.weights import load_weights, matrix_dtype
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

_DEFAULT_CONTEXT = 4096

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
    ranks = _ranks(devices)
    on_cpu = ranks[0].platform == "cpu"
    layout = QwenLayout(config, len(ranks))
    context = _context(config, max_context)
    taps = _feature_layers(config, feature_layers)
    _check_backend(backend)
    _check_rows(max_rows)
    policy = numerics_of(numerics if numerics != "auto" else "f32" if on_cpu else "bf16")
    tokenizer = load_tokenizer(opened.folder) if _has_tokenizer(opened) else None
    chat_format = QwenChatFormat(tokenizer, read_dialect(opened.folder)) if tokenizer else None
    stops = chat_format.stop_ids if chat_format else frozenset()
    generation = _generation_defaults(opened, config, stops)

    mesh = Mesh(np.array(ranks), (RANKS,))
    parameters = _parameters(opened, config)
    stacked = not on_cpu or parameters <= _CHEAP_SLICES if stack_layers is None else stack_layers
    dtype = matrix_dtype(policy, ranks[0].platform)
    track = _progress_bar(progress)
    weights = load_weights(opened, layout, mesh, dtype, stacked=stacked, track=track)
    info = ModelInfo(
        family=family,
        name=opened.name,
        backend="xla",
        numerics=_policy_name(policy),
        ranks=len(ranks),
        legal_ranks=legal_ranks(config),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        parameters=parameters,
        weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
        max_rows=max_rows,
        max_context=context,
        max_chunk=min(MAX_CHUNK, context),
        feature_layers=taps,
    )
    programs = Programs(Rank(layout, policy), mesh, max_rows, cache_slots(context), taps)
    text_side = tokenizer.tokenizer if tokenizer else None
    return QwenXla(info, generation, chat_format, text_side, weights, programs)


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Weights alone are enough for token ids in, token ids out."""
    return (checkpoint.folder / "tokenizer.json").exists()


def _ranks(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """The devices to use, in rank order."""
    if devices is None:
        found = jax.devices()
        return found if found[0].platform == "tpu" else found[:1]
    if not devices or len(set(devices)) < len(devices):
        raise ConfigError(f"devices {list(devices)} must name at least one, and none twice")
    return list(devices)


def _check_backend(backend: str) -> None:
    if backend not in ("auto", "xla"):
        raise ConfigError(f"backend {backend!r} does not exist for this family; use xla or auto")


def _check_rows(max_rows: int) -> None:
    if max_rows < 1:
        raise ConfigError(f"max_rows {max_rows} must be at least 1")


def _context(config: QwenConfig, wanted: int | None) -> int:
    limit = config.max_position_embeddings
    context = min(limit, _DEFAULT_CONTEXT) if wanted is None else wanted
    if not 1 <= context <= limit:
        raise ConfigError(f"a context of {context} positions lies outside 1..{limit}")
    return context


def _feature_layers(config: QwenConfig, layers: Sequence[int]) -> tuple[int, ...]:
    wrong = [layer for layer in layers if not 0 <= layer < config.num_layers]
    if wrong:
        raise ConfigError(f"feature layer {wrong[0]} lies outside 0..{config.num_layers - 1}")
    if len(set(layers)) < len(layers):
        raise ConfigError(f"feature layers {list(layers)} must be distinct")
    return tuple(layers)


def _policy_name(policy: Numerics) -> Literal["f32", "bf16"]:
    return "bf16" if policy.name == "bf16" else "f32"


def _parameters(checkpoint: Checkpoint, config: QwenConfig) -> int:
    """Parameters of the text model; a tied table counts once."""
    table = expected_tensors(config, text_prefix(frozenset(checkpoint.names())))
    return sum(int(np.prod(shape)) for shape in table.values())


def _generation_defaults(
    checkpoint: Checkpoint, config: QwenConfig, chat_stops: frozenset[int]
) -> GenerationDefaults:
    """``generation_config.json`` where it exists; stop ids of all sources together."""
    found = checkpoint.json("generation_config.json")
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise CheckpointError(f"generation_config.json of {checkpoint.name} must hold an object")
    given = {name: value for name, value in found.items() if value is not None}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = given.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{name} {value!r} in generation_config.json must be a number")
    sampled = given.get("do_sample", "temperature" in given)
    return GenerationDefaults(
        temperature=float(given.get("temperature", 1.0)) if sampled else 0.0,
        top_p=float(given.get("top_p", 1.0)),
        top_k=int(given.get("top_k", 0)),
        min_p=float(given.get("min_p", 0.0)),
        stop_ids=frozenset(token_ids(given.get("eos_token_id"))) | set(config.eos_ids) | chat_stops,
    )


def _progress_bar(shown: bool) -> Callable[[Sequence[int], str], Iterator[int]]:
    def track(items: Sequence[int], what: str) -> Iterator[int]:
        if not shown:
            yield from items
            return
        from rich.console import Console
        from rich.progress import track as bar

        yield from bar(items, description=f"loading {what}", console=Console(stderr=True))

    return track
