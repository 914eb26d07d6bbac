"""The ring that fits beside other buffers in VMEM."""

import jax.numpy as jnp
import pytest
from kda_mla_kernels.backend.budget import VMEM_LIMIT_BYTES, fit_ring
from kda_mla_kernels.errors import ConfigError
from vmem_pool.stream import Matrix, plan_stream

MIB = 1 << 20
STREAM = plan_stream(
    {"layer": [Matrix("w", (1024, 1024), jnp.bfloat16)]},
    ["layer"] * 40,
    slot_bytes=2 * MIB,
    depth=16,
)


def fitted(others):
    return fit_ring(STREAM, {"experts": others * MIB, "state": MIB})


def test_a_ring_keeps_all_slots_where_there_is_room():
    assert fitted(10) == STREAM


@pytest.mark.parametrize(("others", "depth"), [(25, 13), (30, 11), (36, 8)])
def test_elsewhere_it_has_as_many_as_fit(others, depth):
    """Not a power of two, and with more left for what the compiler adds."""
    found = fitted(others)
    assert found.depth == depth
    assert found.ring_bytes + (others + 1 + 10) * MIB <= VMEM_LIMIT_BYTES
    assert found.order == STREAM.order


def test_a_ring_that_would_let_hbm_idle_is_refused_with_the_largest_buffers():
    message = (
        r"leaves 14\.9 MiB of VMEM .* needs 16; .*largest buffers: experts \(38\.0 MiB\), state"
    )
    with pytest.raises(ConfigError, match=message):
        fitted(38)
