"""Compiles collectives for slices that are not there; run by test_compile.py in its own process."""

import jax
import jax.numpy as jnp
from tpu_collectives import AllReduce, Topology
from tpu_collectives.testing import repeated

USES = 2


def compile_repeated(collective):
    """Compile a loop over uses of a collective, as a TPU would run it."""
    taken = collective.input
    stacked = jax.ShapeDtypeStruct((USES, *taken.shape), taken.dtype)
    assert repeated(collective, USES).compile(stacked).as_text()


def all_reduce(name, rows, width, wire, schedules):
    """Every listed schedule of the default tree."""
    topology = Topology.from_name(name)
    for schedule in schedules:
        compile_repeated(AllReduce(topology, rows, width, jnp.dtype(wire), schedule=schedule))
