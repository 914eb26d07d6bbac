"""How a model is loaded: everything that the caller chooses, checked before anything is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import jax
import numpy as np
from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.numerics import BF16, F32, Numerics

from megakernel_qwen.backend import cache_slots
from megakernel_qwen.config import QwenConfig
from megakernel_qwen.layout import QwenLayout
from megakernel_qwen.xla.caches import cache_shapes

__all__ = ["LoadOptions", "choose_devices"]

_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class LoadOptions:
    """The shape of a loaded model.

    Raises:
        ConfigError: a value outside what the model allows; the message names both.
    """

    config: QwenConfig
    numerics: Numerics
    max_rows: int
    max_context: int
    feature_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        limit, layers = self.config.max_position_embeddings, self.config.num_layers
        if self.max_rows < 1:
            raise ConfigError(f"max_rows {self.max_rows} must be at least 1")
        if not 1 <= self.max_context <= limit:
            raise ConfigError(f"a context of {self.max_context} positions lies outside 1..{limit}")
        wrong = [layer for layer in self.feature_layers if not 0 <= layer < layers]
        if wrong:
            raise ConfigError(f"feature layer {wrong[0]} lies outside 0..{layers - 1}")
        if len(set(self.feature_layers)) < len(self.feature_layers):
            raise ConfigError(f"feature layers {list(self.feature_layers)} must be distinct")

    @classmethod
    def of(
        cls,
        config: QwenConfig,
        platform: str,
        *,
        numerics: str,
        max_rows: int,
        max_context: int | None,
        feature_layers: Sequence[int],
    ) -> LoadOptions:
        """Fills in defaults: f32 on CPU and bf16 elsewhere; a context of at most 4096."""
        policies = {"f32": F32, "bf16": BF16, "auto": F32 if platform == "cpu" else BF16}
        if numerics not in policies:
            raise ConfigError(f"numerics {numerics!r} must be one of {', '.join(policies)}")
        if max_context is None:
            max_context = min(config.max_position_embeddings, _DEFAULT_CONTEXT)
        try:
            return cls(
                config,
                policies[numerics],
                index(max_rows),
                index(max_context),
                tuple(index(layer) for layer in feature_layers),
            )
        except TypeError:
            raise ConfigError(
                f"max_rows {max_rows!r}, max_context {max_context!r} and feature_layers"
                f" {feature_layers!r} must be whole numbers"
            ) from None

    def check_memory(
        self, layout: QwenLayout, devices: Sequence[jax.Device], held: np.dtype
    ) -> None:
        """Refuses a state that cannot fit, before weights are read.

        Args:
            held: dtype of the caches.

        Raises:
            ConfigError: naming rows and context, the bytes they need and the bytes there are.
        """
        slots = cache_slots(self.max_context)
        shapes = cache_shapes(layout, self.max_rows, slots, held)
        sizes = [leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(shapes)]
        needed, there = sum(sizes) * _ranks_sharing(devices), _memory_bytes(devices[0])
        if there is not None and needed > there:
            raise ConfigError(
                f"{self.max_rows} rows of {self.max_context} positions need {needed:,} bytes of"
                f" state, but there are {there:,}; take fewer rows or a smaller context"
            )


def choose_devices(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """The devices to use, in rank order: those given, else all of a TPU, else the first one.

    Raises:
        ConfigError: none, one twice, or something that is not a list of devices.
    """
    if devices is None:
        found = jax.devices()
        return found if found[0].platform == "tpu" else found[:1]
    if not isinstance(devices, Sequence) or not all(hasattr(d, "platform") for d in devices):
        raise ConfigError(f"devices {devices!r} must be a list of jax devices")
    if not devices or len(set(devices)) < len(devices):
        raise ConfigError(f"devices {list(devices)} must name at least one, and none twice")
    return list(devices)


def _ranks_sharing(devices: Sequence[jax.Device]) -> int:
    """Ranks whose state lies in one memory: all of them on a CPU."""
    return len(devices) if devices[0].platform == "cpu" else 1


def _memory_bytes(device: jax.Device) -> int | None:
    """Bytes of the memory behind a device, if it says so."""
    if device.platform == "cpu":
        pages = getattr(os, "sysconf_names", {}).get("SC_PHYS_PAGES")
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages) if pages is not None else None
    return (device.memory_stats() or {}).get("bytes_limit")
