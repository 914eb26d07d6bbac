"""Counts of transfers from a jaxpr; nothing is compiled, so no libtpu is needed."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from vmem_pool.aot import Inventory, take_inventory

TILE = 8 * 128 * 2


def _copies(n_ref, x_hbm, out_ref, buffers, sem):
    def copy(i):
        return pltpu.make_async_copy(x_hbm.at[i], buffers.at[jax.lax.rem(i, 2)], sem)

    def step(i, carry):
        pl.when(i + 1 < 7)(lambda: copy(i + 1).start())
        copy(i).wait()
        pl.when(n_ref[0] > i)(lambda: copy(0).start())
        return carry

    def wait(i, carry):
        copy(i).wait()
        return carry

    copy(0).start()
    jax.lax.fori_loop(0, 7, step, 0)
    jax.lax.fori_loop(0, n_ref[0], wait, 0)
    out_ref[...] = buffers[0]


@pytest.fixture(scope="module")
def found():
    call = pl.pallas_call(
        _copies,
        name="copies",
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.bfloat16),
        grid=(3,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        scratch_shapes=[pltpu.VMEM((2, 8, 128), jnp.bfloat16), pltpu.SemaphoreType.DMA],
    )
    shapes = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((9, 8, 128), jnp.bfloat16)
    return take_inventory(call, *shapes, unknown_trips=5)


def test_conditions_on_counters_count_exactly_and_those_on_data_as_a_range(found):
    # Of 14 starts in a grid step, 7 depend on the loop counter and 7 on data.
    assert found.total("dma_start") == (3 * 7 * TILE, 3 * 14 * TILE)


def test_loops_of_unknown_length_count_up_to_the_given_trips(found):
    assert found.executions("dma_wait") == (3 * 7, 3 * (7 + 5))
    assert len(found.unknown) == 1


def test_a_block_is_moved_when_its_index_changes(found):
    assert found.total("block", "->hbm") == (TILE, TILE)


def test_sites_name_their_kernel_and_line(found):
    places = {(site.nest, site.source) for site in found.counts if site.op == "dma_start"}
    assert {source.partition(":")[0] for _, source in places} == {"test_inventory.py"}
    assert all(nest.startswith("/copies/grid[3]") for nest, _ in places)


def test_json_keeps_everything(found):
    again = Inventory.from_json(found.to_json())
    assert again == found
