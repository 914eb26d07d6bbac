"""Which backend runs a model, and on which devices in which order."""

import importlib.util

import jax
import pytest
from kda_mla_kernels.backend import chosen_kernel
from kda_mla_kernels.errors import ConfigError
from tpu_collectives import Topology

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="slices without a TPU need libtpu"
)


@pytest.fixture(scope="module")
def slice_devices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other tests compile at the same time
        return Topology.from_name("tpu7x:2x2x1").devices()


@needs_libtpu
def test_devices_in_another_order_than_their_places_are_refused_with_that_order(slice_devices):
    shuffled = [*slice_devices[2:], *slice_devices[:2]]
    places = [device.id for device in slice_devices]
    with pytest.raises(ConfigError, match="in the order of their places") as refused:
        chosen_kernel("megakernel", shuffled, lambda topology: topology)
    assert str(places) in str(refused.value)
    with pytest.warns(UserWarning, match="backend xla runs this model: the megakernel backend"):
        assert chosen_kernel("auto", shuffled, lambda topology: topology) is None


@needs_libtpu
def test_devices_in_order_give_the_slice(slice_devices):
    for backend in ("auto", "megakernel"):
        topology = chosen_kernel(backend, slice_devices, lambda topology: topology)
        assert (topology.ranks, topology.cores_per_chip) == (8, 2)


def test_elsewhere_xla_is_the_choice_unless_the_kernel_is_named():
    devices = jax.devices()[:1]
    assert chosen_kernel("auto", devices, lambda topology: topology) is None
    assert chosen_kernel("megakernel", devices, lambda topology: topology.ranks) == 1


def test_a_kernel_that_does_not_fit_is_refused_by_name_only():
    def make(topology):
        raise ConfigError("no room for a ring")

    assert chosen_kernel("xla", jax.devices()[:1], make) is None
    with pytest.raises(ConfigError, match="no room for a ring"):
        chosen_kernel("megakernel", jax.devices()[:1], make)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="backend 'cuda' does not exist"):
        chosen_kernel("cuda", jax.devices()[:1], lambda topology: topology)
