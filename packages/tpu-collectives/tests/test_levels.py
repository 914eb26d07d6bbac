"""Groups as arithmetic, against the groups that topologies list."""

import pytest
from tpu_collectives import CollectiveError, Topology
from tpu_collectives.levels import level_of, levels_of, owner_order, tree_levels

SLICES = ["tpu7x:2x2x1", "tpu7x:2x2x4", "tpu7x:4x4x4", "v6e:2x4", "v5p:2x2x4"]


@pytest.mark.parametrize("by", ["all", "chip", "core", "host", "lane"])
@pytest.mark.parametrize("name", SLICES)
def test_positions_and_peers_are_those_of_the_listed_groups(name, by):
    topology = Topology.from_name(name)
    level = level_of(topology, by)
    for rank in range(topology.ranks):
        group = topology.group(rank, by)
        assert group[level.position(rank)] == rank
        assert tuple(level.peer(rank, p) for p in range(level.size)) == group


@pytest.mark.parametrize("tree", [("all",), ("host", "lane"), ("chip", "core", "lane")])
def test_every_rank_owns_one_block_whatever_the_tree(tree):
    topology = Topology.from_name("tpu7x:2x2x4")
    order = owner_order(tree_levels(topology, tree))
    assert sorted(order) == list(range(32))


def test_owners_of_two_levels_take_turns_by_lane_and_then_by_host():
    topology = Topology.virtual(8, cores_per_chip=2, chips_per_host=2)
    assert owner_order(tree_levels(topology, ("host", "lane"))) == (0, 4, 1, 5, 2, 6, 3, 7)


def test_levels_where_every_rank_is_alone_are_left_out():
    topology = Topology.from_name("v6e:2x4")  # one core a chip
    assert [level.size for level in levels_of(topology, ("chip", "core", "lane"))] == [4, 2]
    assert [level.size for level in levels_of(Topology.virtual(1), ("all",))] == [1]


@pytest.mark.parametrize("tree", [("host", "chip"), ("all", "all"), ()])
def test_partitions_that_overlap_are_refused(tree):
    with pytest.raises(CollectiveError, match="meet in single ranks"):
        levels_of(Topology.virtual(8), tree)


def test_a_tree_that_leaves_ranks_out_is_refused():
    with pytest.raises(CollectiveError, match="connects 8 of the 32 ranks"):
        tree_levels(Topology.from_name("tpu7x:2x2x4"), ("host",))
