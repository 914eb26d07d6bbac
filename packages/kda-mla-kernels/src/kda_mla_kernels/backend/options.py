"""How a model is loaded: everything that the caller chooses, checked before anything is read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import jax
import numpy as np

from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.gqa import KEY_BLOCK
from kda_mla_kernels.model import ModelInfo
from kda_mla_kernels.numerics import BF16, F32, Numerics

__all__ = ["MAX_CHUNK", "LoadOptions", "cache_slots", "choose_devices", "whole_number"]

MAX_CHUNK = 1024
"""Tokens of the longest prefill chunk."""
_DEFAULT_CONTEXT = 4096


def whole_number(name: str, value: Any) -> int:
    """The number that an option has, also one of NumPy's.

    Raises:
        ConfigError: it is none. A switch is none either, though Python takes True for 1.
    """
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise ConfigError(f"{name} {value!r} must be a whole number")


def cache_slots(context: int) -> int:
    """Positions that caches have room for: whole blocks of the attention loop."""
    return -(-context // KEY_BLOCK) * KEY_BLOCK


@dataclass(frozen=True)
class LoadOptions:
    """The shape of a loaded model. Made by :meth:`of`."""

    numerics: Numerics
    max_rows: int
    max_context: int
    feature_layers: tuple[int, ...]

    @classmethod
    def of(
        cls,
        platform: str,
        *,
        longest_context: int,
        last_feature: int,
        numerics: str,
        max_rows: int,
        max_context: int | None,
        feature_layers: Sequence[int],
    ) -> LoadOptions:
        """Fills in defaults: f32 on CPU and bf16 elsewhere; a context of at most 4096.

        Args:
            longest_context, last_feature: what the model allows; the others as in the protocol.

        Raises:
            ConfigError: a value outside what the model allows; the message names both.
        """
        policies = {"f32": F32, "bf16": BF16, "auto": F32 if platform == "cpu" else BF16}
        if numerics not in policies:
            raise ConfigError(f"numerics {numerics!r} must be one of {', '.join(policies)}")
        if max_context is None:
            max_context = min(longest_context, _DEFAULT_CONTEXT)
        if not isinstance(feature_layers, Iterable):
            raise ConfigError(f"feature_layers {feature_layers!r} must be a list of layers")
        options = cls(
            policies[numerics],
            whole_number("max_rows", max_rows),
            whole_number("max_context", max_context),
            tuple(whole_number("feature layer", layer) for layer in feature_layers),
        )
        options._check(longest_context, last_feature)
        return options

    def _check(self, longest_context: int, last_feature: int) -> None:
        if self.max_rows < 1:
            raise ConfigError(f"max_rows {self.max_rows} must be at least 1")
        if not 1 <= self.max_context <= longest_context:
            raise ConfigError(
                f"a context of {self.max_context} positions lies outside 1..{longest_context}"
            )
        wrong = [layer for layer in self.feature_layers if not 0 <= layer <= last_feature]
        if wrong:
            raise ConfigError(f"feature layer {wrong[0]} lies outside 0..{last_feature}")
        if len(set(self.feature_layers)) < len(self.feature_layers):
            raise ConfigError(f"feature layers {list(self.feature_layers)} must be distinct")

    @property
    def slots(self) -> int:
        """Positions that the caches of a row have room for."""
        return cache_slots(self.max_context)

    def check_memory(self, shapes: Any, devices: Sequence[jax.Device]) -> None:
        """Refuses a state that cannot fit, before weights are read.

        Args:
            shapes: of one rank's caches, a pytree of ``jax.ShapeDtypeStruct``.

        Raises:
            ConfigError: naming rows and context, the bytes they need and the bytes there are.
        """
        sizes = [leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(shapes)]
        needed, there = sum(sizes) * _ranks_sharing(devices), _memory_bytes(devices[0])
        if there is not None and needed > there:
            raise ConfigError(
                f"{self.max_rows} rows of {self.max_context} positions need {needed:,} bytes of"
                f" state, but there are {there:,}; take fewer rows or a smaller context"
            )

    def describe(self, weights: Any, ranks: int, **model: Any) -> ModelInfo:
        """What a driver must know; ``model`` holds the fields that the model alone decides."""
        return ModelInfo(
            numerics=self.numerics.name,
            ranks=ranks,
            weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
            max_rows=self.max_rows,
            max_context=self.max_context,
            max_chunk=min(MAX_CHUNK, self.max_context),
            feature_layers=self.feature_layers,
            **model,
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
