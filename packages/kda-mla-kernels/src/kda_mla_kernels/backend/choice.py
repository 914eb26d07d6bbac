"""Which backend runs a model on some devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from tpu_collectives import Topology, TopologyError

from kda_mla_kernels.errors import ConfigError

__all__ = ["BACKENDS", "chosen_kernel"]

BACKENDS = ("megakernel", "xla", "auto")

Kernel = TypeVar("Kernel")


def chosen_kernel(
    backend: str, devices: Sequence[jax.Device], make: Callable[[Topology], Kernel]
) -> Kernel | None:
    """What the decode kernel needs to know, or None where XLA runs the model.

    ``auto`` takes the kernel on TPUs, and XLA with a warning where the kernel does not fit.

    Args:
        make: raises ConfigError for everything that would only show when a kernel is compiled.

    Raises:
        ConfigError: another backend; or the kernel was asked for by name and does not fit.
    """
    if backend not in BACKENDS:
        raise ConfigError(
            f"backend {backend!r} does not exist for this family; use megakernel, xla or auto"
        )
    if backend == "xla" or (backend == "auto" and devices[0].platform != "tpu"):
        return None
    try:
        return make(_topology(devices))
    except ConfigError as error:
        if backend == "megakernel":
            raise
        warnings.warn(f"backend xla runs this model: {error}", stacklevel=3)
        return None


def _topology(devices: Sequence[jax.Device]) -> Topology:
    try:
        topology = Topology.from_devices(devices)
    except TopologyError as error:
        raise ConfigError(str(error)) from None
    if list(topology.devices()) != list(devices):
        raise ConfigError(
            "the megakernel backend takes devices in the order of their places:"
            f" {[device.id for device in topology.devices()]}"
        )
    return topology
