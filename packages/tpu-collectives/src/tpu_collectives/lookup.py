"""Devices for topologies that were made without any: compile-only TPU slices and CPU devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from tpu_collectives.errors import TopologyError
from tpu_collectives.names import Coords, parse_slice
from tpu_collectives.places import site_of

if TYPE_CHECKING:
    import jax

__all__ = ["compile_only_devices", "cpu_devices"]


def cpu_devices(count: int) -> tuple[jax.Device, ...]:
    """The first CPU devices by id.

    Raises:
        TopologyError: fewer exist; the message says how to get more.
    """
    import jax

    devices = sorted(jax.devices("cpu"), key=lambda device: device.id)
    if len(devices) < count:
        raise TopologyError(
            f"{count} CPU devices are needed and {len(devices)} exist; call"
            f" jax.config.update('jax_num_cpu_devices', {count}) before JAX is used"
        )
    return tuple(devices[:count])


def compile_only_devices(
    name: str, keys: Sequence[tuple[Coords | None, int]]
) -> tuple[jax.Device, ...]:
    """Devices of a slice that need not exist, in the order of ``keys`` (chip coordinates, core).

    Raises:
        TopologyError: libtpu does not know the slice.
        RuntimeError: libtpu is missing or refuses to load; the message says what to do.
    """
    found = _slice_devices(name)
    missing = [key for key in keys if key not in found]
    if missing:
        raise TopologyError(f"libtpu's {name} has no core {missing[0]}; it has {sorted(found)}")
    return tuple(found[key] for key in keys)


@cache
def _slice_devices(name: str) -> dict[tuple[Coords | None, int], jax.Device]:
    from jax.experimental import topologies

    parsed = parse_slice(name)
    options: dict[str, Coords] = {}
    if parsed.host_bounds != (2, 2, 1):
        # Older libtpu assumes hosts of four chips and refuses a slice of fewer without this.
        options["chips_per_host_bounds"] = parsed.host_bounds
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except Exception as error:
        raise _explained(name, error) from error
    sites = ((site_of(device), device) for device in described.devices)
    return {(site.coords, site.core): device for site, device in sites}


def _explained(name: str, error: Exception) -> Exception:
    text = str(error)
    if "not installed" in text:
        return RuntimeError(f"devices of {name} need libtpu: pip install 'tpu-collectives[tpu]'")
    if "lockfile" in text:
        return RuntimeError(
            f"another process holds libtpu, so {name} cannot be described; set"
            " ALLOW_MULTIPLE_LIBTPU_LOAD=1 in both for compile-only work"
        )
    return TopologyError(f"libtpu does not know the slice {name}: {text}")
