"""The all-reduce on virtual devices: every bit, on every rank, without races or leftovers.

Ranks do not share a clock here, so this says nothing about time.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from tpu_collectives import AllReduce, Barrier, CollectiveError, Topology, reference
from tpu_collectives.testing import RankProgram, repeated, run_isolated, wide_range

USES = 3  # the third use takes the area of the first
TWO_HOSTS = Topology.virtual(8, cores_per_chip=2, chips_per_host=2)


def expected(comm, terms):
    sums = [
        reference.all_reduce(comm.topology, terms[:, use], comm.wire_dtype, comm.summed)
        for use in range(terms.shape[1])
    ]
    return np.stack(sums)


def check_bits(comm):
    terms = wide_range((comm.topology.ranks, USES, comm.rows, comm.width))
    (sums,) = repeated(comm, USES).interpret(terms).check()
    wanted = expected(comm, terms)
    for rank, held in enumerate(sums):
        assert held.tobytes() == wanted.tobytes(), f"rank {rank} holds other bits"


@pytest.mark.parametrize(
    ("ranks", "schedule", "wire"),
    [(2, 0, jnp.bfloat16), (2, 1, jnp.float32), (4, 0, jnp.float32), (4, 1, jnp.bfloat16)],
)
def test_every_rank_holds_the_bits_of_the_reference(ranks, schedule, wire):
    check_bits(AllReduce(Topology.virtual(ranks), 3, 200, wire, schedule=schedule))


def test_eight_ranks_hold_the_bits_of_the_reference():
    comm = AllReduce(Topology.virtual(8), 3, 640, jnp.float32, schedule=0)
    assert comm.vmem_bytes > 100 << 10  # large enough to need the threads of virtual_devices
    check_bits(comm)


def test_three_ranks_and_one_row_are_as_good_as_any():
    check_bits(AllReduce(Topology.virtual(3, cores_per_chip=1), 1, 128, schedule=1))


def test_one_rank_rounds_what_it_has():
    check_bits(AllReduce(Topology.virtual(1), 2, 128))


@pytest.mark.parametrize("schedule", [0, 2])
def test_two_hosts_sum_within_and_then_across(schedule):
    topology = Topology.virtual(4, cores_per_chip=2, chips_per_host=1)
    check_bits(AllReduce(topology, 2, 256, tree=("host", "lane"), schedule=schedule))


def test_chips_hosts_and_pairs_are_three_levels():
    check_bits(AllReduce(TWO_HOSTS, 2, 128, tree=("chip", "core", "lane"), schedule=0))


@pytest.mark.slow
@pytest.mark.parametrize("wire", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize(
    ("topology", "tree", "schedule"),
    [
        (Topology.virtual(8), ("all",), 0),
        (Topology.virtual(8), ("all",), 1),
        (TWO_HOSTS, ("host", "lane"), 0),
        (TWO_HOSTS, ("host", "lane"), 1),
        (TWO_HOSTS, ("host", "lane"), 2),
        (TWO_HOSTS, ("chip", "core", "lane"), 1),
        (TWO_HOSTS, ("chip", "core", "lane"), 3),
    ],
)
def test_eight_ranks_agree_for_all_trees_schedules_and_rows(topology, tree, schedule, rows, wire):
    check_bits(AllReduce(topology, rows, 640, wire, tree, schedule))


def test_a_row_has_the_same_bits_whatever_the_schedule_and_its_neighbours():
    topology = Topology.virtual(4, cores_per_chip=2, chips_per_host=1)
    terms = wide_range((4, 1, 3, 256))
    one_row = AllReduce(topology, 1, 256, schedule=0)
    three_rows = AllReduce(topology, 3, 256, schedule=2)
    alone = repeated(one_row, 1).interpret(terms[:, :, :1]).check()[0]
    among = repeated(three_rows, 1).interpret(terms).check()[0]
    assert alone.tobytes() == among[:, :, :1].tobytes()


def test_work_fits_between_start_and_finish_even_across_loop_iterations():
    comm = AllReduce(Topology.virtual(2), 2, 128, jnp.float32)
    barrier = Barrier(comm.topology)

    def kernel(x_ref, out_ref, work_ref, refs):
        barrier.signal()
        barrier.wait()
        comm.start(refs, x_ref[0], 0)

        @pl.loop(1, USES)
        def _(use):
            work_ref[use] = x_ref[use] * 2.0  # while the exchange of use - 1 is under way
            out_ref[use - 1] = comm.finish(comm.resume(refs, use - 1))
            comm.start(refs, x_ref[use], use)

        out_ref[USES - 1] = comm.finish(comm.resume(refs, USES - 1))
        work_ref[0] = x_ref[0] * 2.0

    terms = wide_range((2, USES, 2, 128))
    shape = jax.ShapeDtypeStruct((USES, 2, 128), jnp.float32)
    program = RankProgram(kernel, comm.topology, (shape, shape), (comm.scratch(),))
    sums, work = program.check(terms)
    assert np.array_equal(sums, np.broadcast_to(expected(comm, terms), sums.shape))
    assert np.array_equal(work, terms * 2.0)


def test_phases_of_two_levels_can_be_advanced_one_by_one():
    topology = Topology.virtual(4, cores_per_chip=2, chips_per_host=1)
    comm = AllReduce(topology, 1, 128, schedule=0)
    barrier = Barrier(topology)

    def kernel(x_ref, out_ref, refs):
        barrier.signal()
        barrier.wait()
        handle = comm.start(refs, x_ref[...], 0)
        handle = comm.advance(handle)
        assert comm.advance(handle) == handle  # the last phase is left to finish
        out_ref[...] = comm.finish(comm.resume(refs, 0, done=1))

    terms = wide_range((4, 1, 128))
    (sums,) = RankProgram(kernel, topology, (comm.output,), (comm.scratch(),)).check(terms)
    assert np.array_equal(sums[3], expected(comm, terms[:, None])[0])


def test_the_scratch_has_two_areas_and_two_receive_semaphores_per_phase():
    (first, second) = AllReduce(TWO_HOSTS, 1, 128, schedule=0).scratch()
    assert first.receive.shape == (2, 4, 1, 128)
    assert second.receive.shape == (2, 2, 1, 128)
    assert first.receive_sems.shape == (2,)


def test_another_mesh_axis_keeps_replicas_apart():
    comm = AllReduce(Topology.virtual(4), 2, 128, axis="tensor")
    barrier = Barrier(comm.topology, axis="tensor")

    def kernel(x_ref, out_ref, refs):
        barrier.signal()
        barrier.wait()
        out_ref[...] = comm(refs, x_ref[...], 0)

    def on_rank(x):
        call = pl.pallas_call(
            kernel,
            out_shape=comm.output,
            scratch_shapes=[comm.scratch()],
            compiler_params=barrier.compiler_params(3),
            interpret=pltpu.InterpretParams(),
        )
        return call(x[0, 0])[None, None]

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "tensor"))
    spec = PartitionSpec("replica", "tensor")
    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    terms = wide_range((2, 4, 2, 128))
    sums = np.asarray(jax.jit(mapped)(terms))
    for replica in range(2):
        wanted = reference.all_reduce(comm.topology, terms[replica], comm.wire_dtype)
        assert all(np.array_equal(held, wanted) for held in sums[replica])


def sums_of_32_ranks(schedule):
    """Four hosts; runs in a process of its own."""
    topology = Topology.virtual(32)
    assert topology.hosts == 4
    check_bits(AllReduce(topology, 1, 256, schedule=schedule))


@pytest.mark.cpu32
@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_four_hosts_hold_the_bits_of_the_reference(schedule):
    target = f"{Path(__file__)}:sums_of_32_ranks"
    outcome = run_isolated(target, 32, timeout_s=280, schedule=schedule)
    assert outcome.status == "passed", outcome.output


@pytest.mark.parametrize(
    ("rows", "schedule", "expected"),
    [(1, 0, 2 * 8 * 10240), (8, 1, (3 + 2) * 8 * 10240)],  # compiled for v7: the same
)
def test_the_areas_take_as_much_vmem_as_the_compiler_gives_them(rows, schedule, expected):
    comm = AllReduce(Topology.virtual(8), rows, 5120, schedule=schedule)
    assert comm.vmem_bytes == expected


def test_equal_configurations_are_one_key():
    assert len({AllReduce(Topology.virtual(8), rows, 128) for rows in (1, 1, 2)}) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, not 0"),
        ({"width": -1}, "width must be at least 1, not -1"),
        ({"wire_dtype": jnp.float16}, "bfloat16 or float32, not float16"),
        ({"tree": ("chip",)}, "connects 2 of the 8 ranks"),
        ({"schedule": 2}, r"schedule 2 .* use 0\.\.1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(CollectiveError, match=message):
        AllReduce(**{"topology": Topology.virtual(8), "rows": 1, "width": 128, **arguments})
