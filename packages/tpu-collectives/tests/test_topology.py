"""Topologies from names, devices and numbers. Compile-only devices are covered where libtpu is."""

import importlib.util
import os
import random
import subprocess
import sys
from collections import deque

import jax
import numpy as np
import pytest
from tpu_collectives import Place, Topology, TopologyError

NAMES = {
    "tpu7x:1x1x1": (2, 1, 1),
    "tpu7x:2x2x1": (8, 1, 4),
    "tpu7x:2x2x4": (32, 4, 16),
    "tpu7x:4x4x4": (128, 16, 64),
    "v6e:1x1": (1, 1, 1),
    "v6e:2x4": (8, 2, 8),
    "v6e:4x4": (16, 4, 16),
    "v5p:2x2x4": (16, 4, 16),
    "v4:2x2x1": (8, 1, 4),
}


@pytest.mark.parametrize(("name", "counts"), NAMES.items())
def test_a_name_gives_ranks_hosts_and_chips(name, counts):
    topology = Topology.from_name(name)
    assert (topology.ranks, topology.hosts, topology.chips) == counts


def test_rank_bits_of_a_v7_slice_are_core_x_y_and_then_z():
    for rank, place in enumerate(Topology.from_name("tpu7x:2x2x4").places):
        core, x, y, z = rank & 1, rank >> 1 & 1, rank >> 2 & 1, rank >> 3
        assert place == Place(host=z, chip=rank >> 1, core=core, lane=rank & 7, coords=(x, y, z))


def test_every_host_of_a_large_slice_owns_a_block_of_two_by_two_chips():
    topology = Topology.from_name("tpu7x:4x4x4")
    for host in topology.groups("host"):
        blocks = {(x // 2, y // 2, z) for x, y, z in (topology.place(r).coords for r in host)}
        assert len(host) == 8
        assert len(blocks) == 1


@pytest.mark.parametrize("by", ["all", "chip", "core", "host", "lane"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 32])
def test_groups_partition_the_ranks_and_agree_with_group(ranks, by):
    topology = Topology.virtual(ranks)
    groups = topology.groups(by)
    assert sorted(rank for group in groups for rank in group) == list(range(ranks))
    assert all(topology.group(rank, by) == group for group in groups for rank in group)


def test_groups_of_32_ranks_share_what_they_are_named_after():
    topology = Topology.from_name("tpu7x:2x2x4")
    assert topology.group(13, "chip") == (12, 13)
    assert topology.group(13, "core") == (9, 11, 13, 15)
    assert topology.group(13, "host") == tuple(range(8, 16))
    assert topology.group(13, "lane") == (5, 13, 21, 29)


def test_the_virtual_topology_of_32_ranks_has_the_places_of_the_real_slice():
    real, virtual = Topology.from_name("tpu7x:2x2x4"), Topology.virtual(32)
    assert virtual.places == real.places
    assert virtual.grid == real.grid


@pytest.mark.parametrize(
    ("ranks", "counts"),
    [(1, (1, 1, 1)), (2, (1, 1, 2)), (4, (1, 2, 2)), (8, (1, 4, 2)), (32, (4, 16, 2))],
)
def test_virtual_topologies_have_hosts_chips_and_cores(ranks, counts):
    topology = Topology.virtual(ranks)
    assert (topology.hosts, topology.chips, topology.cores_per_chip) == counts


def test_virtual_shapes_follow_the_arguments():
    topology = Topology.virtual(12, cores_per_chip=1, chips_per_host=3)
    assert (topology.hosts, topology.ranks_per_host) == (4, 3)
    assert topology.group(4, "lane") == (1, 4, 7, 10)


def _breadth_first(topology, start):
    """Hops by walking links one at a time: an independent way to the same numbers."""
    grid, seen = topology.grid, {topology.place(start).coords: 0}
    queue = deque(seen)
    while queue:
        at = queue.popleft()
        for axis in range(3):
            for step in (-1, 1):
                to = list(at)
                to[axis] += step
                if grid.wrap[axis]:
                    to[axis] %= grid.bounds[axis]
                inside = 0 <= to[axis] < grid.bounds[axis]
                if inside and tuple(to) not in seen:
                    seen[tuple(to)] = seen[at] + 1
                    queue.append(tuple(to))
    return seen


@pytest.mark.parametrize("name", ["tpu7x:2x2x4", "tpu7x:4x4x4", "v6e:2x4", "v6e:16x16"])
def test_hops_are_the_shortest_walk_over_links(name):
    topology = Topology.from_name(name)
    for start in (0, topology.ranks // 3):
        walked = _breadth_first(topology, start)
        for rank, place in enumerate(topology.places):
            assert topology.hops(start, rank) == walked[place.coords]


def test_z_of_a_slice_of_four_planes_is_a_line_and_of_a_cube_a_ring():
    assert Topology.from_name("tpu7x:2x2x4").hops(0, 24) == 3
    assert Topology.from_name("tpu7x:4x4x4").hops(0, 96) == 1


def test_neighbours_come_sibling_first_and_then_the_chips_one_link_away():
    topology = Topology.from_name("tpu7x:2x2x4")
    assert topology.neighbours(0) == (1, 2, 3, 4, 5, 8, 9)


def test_cpu_devices_in_any_order_give_the_same_topology():
    devices = jax.devices("cpu")
    expected = Topology.from_devices(devices)
    assert [d.id for d in expected.devices()] == sorted(d.id for d in devices)
    for seed in range(3):
        mixed = random.Random(seed).sample(devices, len(devices))
        assert Topology.from_devices(mixed) == expected


def test_cpu_devices_are_fully_connected_chips_of_one_host():
    topology = Topology.from_devices(jax.devices("cpu")[:4])
    assert (topology.hosts, topology.chips, topology.grid) == (1, 4, None)
    assert topology.hops(0, 3) == 1
    assert topology.neighbours(2) == (0, 1, 3)


class _FakeTpu:
    """What a topology reads of a TPU device."""

    platform, device_kind = "tpu", "TPU7x"

    def __init__(self, process_index, coords, core):
        self.process_index, self.coords, self.core_on_chip = process_index, coords, core


def _fake_slice(name, processes=None):
    topology = Topology.from_name(name)
    return [
        _FakeTpu(processes[p.host] if processes else p.host, p.coords, p.core)
        for p in topology.places
    ]


def test_tpu_devices_are_ordered_by_process_chip_and_core():
    devices = _fake_slice("tpu7x:2x2x4")
    mixed = random.Random(7).sample(devices, len(devices))
    topology = Topology.from_devices(mixed)
    assert list(topology.devices()) == devices
    assert topology.places == Topology.from_name("tpu7x:2x2x4").places


def test_hosts_follow_process_numbers_even_if_those_have_gaps():
    topology = Topology.from_devices(_fake_slice("tpu7x:2x2x2", processes=[9, 4]))
    assert [topology.place(rank).coords[2] for rank in (0, 8)] == [1, 0]
    assert [topology.place(rank).host for rank in (0, 8)] == [0, 1]


def test_part_of_a_torus_counts_as_a_mesh_unless_it_fills_its_box():
    whole = Topology.from_devices(_fake_slice("tpu7x:4x4x4"))
    part = Topology.from_devices(_fake_slice("tpu7x:4x4x4")[:-8])
    assert whole.grid.wrap == (True, True, True)
    assert part.grid.wrap == (False, False, False)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32])
def test_the_first_ranks_keep_their_numbers_and_places(ranks):
    whole = Topology.from_name("tpu7x:2x2x4")
    part = whole.first(ranks)
    assert part.places == whole.places[:ranks]
    assert part.hops(0, ranks - 1) == whole.hops(0, ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_mesh_index_is_the_rank(ranks):
    topology = Topology.virtual(ranks)
    mesh = topology.mesh()
    assert mesh.axis_names == ("ranks",)
    assert list(mesh.devices) == list(topology.devices())
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    values = jax.device_put(np.arange(ranks), sharding)
    for shard in values.addressable_shards:
        assert topology.devices()[int(shard.data[0])] == shard.device


def test_the_mesh_axis_can_be_named():
    assert Topology.virtual(2).mesh("tp").axis_names == ("tp",)


def test_topologies_are_hashable_so_that_they_can_key_a_cache():
    assert len({Topology.virtual(8), Topology.virtual(8), Topology.virtual(4)}) == 2


def test_describe_lists_every_rank():
    lines = Topology.from_name("tpu7x:2x2x1").describe().splitlines()
    assert lines[0] == "tpu7x:2x2x1: 8 ranks, 1 hosts, 4 chips, 2 cores a chip"
    assert lines[-1].split() == ["7", "0", "7", "3", "1", "1,1,0"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tpu8:2x2x1", "unknown TPU generation 'tpu8'.*known: tpu7x, v6e"),
        ("tpu7x-8", "'tpu7x-8' is not a slice name"),
        ("tpu7x:0x2x1", "is not a slice name"),
        ("tpu7x:2x2", "gives 2 sizes; a tpu7x slice has 3"),
        ("v6e:2x2x1", "gives 3 sizes; a v6e slice has 2"),
        ("tpu7x:3x3x3", "does not divide into hosts of 2x2x1 chips"),
    ],
)
def test_a_wrong_name_is_refused_with_what_would_be_right(name, message):
    with pytest.raises(TopologyError, match=message):
        Topology.from_name(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "ranks must be at least 1, not 0"),
        ((8, 0), "cores_per_chip must be at least 1"),
        ((3,), "3 ranks do not divide into chips of 2 cores"),
        ((12,), "12 ranks do not divide into hosts of 4 chips with 2 cores"),
    ],
)
def test_virtual_counts_that_do_not_divide_are_refused(arguments, message):
    with pytest.raises(TopologyError, match=message):
        Topology.virtual(*arguments)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (0, "cannot take 0 of the 32 ranks"),
        (33, "cannot take 33 of the 32 ranks"),
        (3, "the chips of tpu7x:2x2x4 would have 2, 1 ranks"),
        (12, "the hosts of tpu7x:2x2x4 would have 8, 4 ranks"),
    ],
)
def test_subsets_that_split_chips_or_hosts_are_refused(ranks, message):
    with pytest.raises(TopologyError, match=message):
        Topology.from_name("tpu7x:2x2x4").first(ranks)


def test_no_devices_duplicates_and_mixed_kinds_are_refused():
    devices = jax.devices("cpu")
    with pytest.raises(TopologyError, match="at least one device"):
        Topology.from_devices([])
    with pytest.raises(TopologyError, match="listed twice"):
        Topology.from_devices([devices[0], devices[1], devices[0]])
    with pytest.raises(TopologyError, match="one kind, not TPU7x and cpu"):
        Topology.from_devices([devices[0], *_fake_slice("tpu7x:1x1x1")])


def test_ranks_and_partitions_that_do_not_exist_are_refused():
    topology = Topology.virtual(8)
    with pytest.raises(TopologyError, match=r"rank 8 is outside 0\.\.7"):
        topology.hops(0, 8)
    with pytest.raises(TopologyError, match="no partition 'row'"):
        topology.groups("row")


def test_too_few_cpu_devices_say_how_to_get_more():
    with pytest.raises(TopologyError, match=r"32 CPU devices are needed.*jax_num_cpu_devices"):
        Topology.virtual(32).mesh()


COMPILE_ONLY = """
import random
from tpu_collectives import Topology
for name in ("tpu7x:1x1x1", "tpu7x:2x2x1", "tpu7x:4x4x4", "v6e:4x4", "v5p:2x2x4", "v4:2x2x1"):
    named = Topology.from_name(name)
    listed = Topology.from_devices(random.Random(1).sample(named.devices(), named.ranks))
    assert listed.places == named.places, name
    assert listed.grid == named.grid, name
    assert list(named.mesh().devices) == list(listed.devices()), name
"""


@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_compile_only_devices_have_the_places_that_their_name_says():
    settings = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    subprocess.run(
        [sys.executable, "-c", COMPILE_ONLY], check=True, timeout=120, env=os.environ | settings
    )


def test_without_libtpu_the_error_names_the_extra_to_install(monkeypatch):
    def refuse(**_):
        raise RuntimeError("libtpu.so is not installed")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    with pytest.raises(RuntimeError, match=r"tpu-collectives\[tpu\]"):
        Topology.from_name("tpu7x:2x2x2").devices()


def test_importing_the_package_starts_no_backend():
    code = (
        "import tpu_collectives, sys\n"
        "xb = sys.modules.get('jax._src.xla_bridge')\n"
        "assert xb is None or not xb.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
