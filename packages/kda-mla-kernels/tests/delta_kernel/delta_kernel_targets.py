"""Stages with a delta rule and their commit at real sizes, for compiling only."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.delta.kernel import DeltaMemory, commit_states


def rule_alone(kind):
    """Nothing of a stage but the delta rule, its loads and its record, for its cycles."""

    class RuleAlone(kind):
        def __call__(self, scratch, memory, *rest):
            *_, where, layer, records = rest
            self._run_sequences(scratch, memory, where, layer)
            self._send_record(scratch, records, layer).start()
            return scratch.outputs[...].astype(jnp.bfloat16)

    return RuleAlone


def _arrays(topology, tree):
    """The same shapes on a device of the topology."""
    here = SingleDeviceSharding(topology.devices[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)


def _memory(net):
    shape, rows = net.shape, (net.layers, net.rows)
    heads = (shape.value_heads, shape.key_dim, shape.value_dim)
    tail = (*rows, shape.tail_rows, shape.channels)
    return DeltaMemory(
        tail=jax.ShapeDtypeStruct(tail, net.numerics.activation),
        delta=jax.ShapeDtypeStruct((*rows, *heads), jnp.float32),
    )


def stage(topology, net, block):
    """The stage of all layers of a net."""
    params = pltpu.CompilerParams(
        vmem_limit_bytes=60 << 20, disable_bounds_checks=True, disable_semaphore_checks=True
    )
    integers = jax.ShapeDtypeStruct((block.sequences,), jnp.int32)
    flat = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((net.layers, block.padded, x.shape[-1]), x.dtype),
        net.tokens(1, 1),
    )
    arguments = (Where(integers, integers), _memory(net), net.vectors, flat)
    return jax.jit(net.call(block, compiler_params=params)), _arrays(topology, arguments)


def rule(topology, net, block):
    """Its delta rule alone."""
    kind = rule_alone(type(net.stage(block)))
    return stage(topology, replace(net, kind=kind), block)


def commit(topology, net, block):
    """The commit of all layers of a net."""

    def run(memory, records, where, accepted):
        held = net.numerics.activation
        return commit_states(net.shape, block, held, memory, records, where, accepted)

    integers = jax.ShapeDtypeStruct((block.sequences,), jnp.int32)
    records = (net.layers, block.padded, net.shape.record_width)
    arguments = (
        _memory(net),
        jax.ShapeDtypeStruct(records, jnp.float32),
        Where(integers, integers),
        integers,
    )
    return jax.jit(run, donate_argnums=0), _arrays(topology, arguments)


def targets(nets, sizes):
    """``stage_rank_8_1``: the stage of net "rank" for 8 sequences of 1 token, and so on."""
    for kind in (stage, commit, rule):
        for name, net in nets.items():
            for s, t in sizes:

                def build(topology, kind=kind, net=net, size=(s, t)):
                    return kind(topology, net, Block(*size))

                yield f"{kind.__name__}_{name}_{s}_{t}", build
