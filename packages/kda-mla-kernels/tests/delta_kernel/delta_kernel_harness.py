"""A kernel of nothing but stages with a delta rule, with random layers, and its commit.

``gdn_kernel`` and ``kda_kernel`` add their layer. What holds for both is checked here.
"""

from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.delta.kernel import DeltaMemory, commit_states
from kda_mla_kernels.numerics import F32, Numerics
from tpu_collectives.testing import quick_options

SMEM, VMEM, HBM = (
    pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pltpu.HBM)
)
ROWS = (3, 1, 4)
"""Of the state, of up to three sequences."""


@cache
def stage_call(net, block, interpret):
    """Jitted once for all tests of a file."""
    call = net.call(block, interpret=pltpu.InterpretParams(**dict(interpret)))
    return jax.jit(call, compiler_options=net.compiler_options)


@cache
def commit_call(net, block, interpret):
    """Jitted once for all tests of a file."""
    params = pltpu.InterpretParams(**dict(interpret))
    run = partial(commit_states, net.shape, block, net.numerics.activation, interpret=params)
    return jax.jit(run, compiler_options=net.compiler_options)


@dataclass(frozen=True)
class DeltaNetwork:
    """Some layers with random weights and a state of several rows.

    A subclass has ``vectors`` (small weights of all layers), ``stage(block)``, ``step(...)`` (a
    stage's call inside the kernel), ``tokens(sequences, tokens, seed)`` ([layers, S, T, ...] as
    the input projections leave them) and ``reference_layer`` (by the references).
    """

    shape: Any
    numerics: Numerics = F32
    layers: int = 2
    rows: int = 5
    eps: float = 1e-6
    kind: Any = None
    quick: bool = False
    """Compiles without optimising: twice as fast, but nothing fuses products into sums."""
    tag: str = ""
    """Keeps compiled calls of a patched kernel apart."""

    @property
    def compiler_options(self):
        return quick_options(same_bits=True) if self.quick else {}

    @cached_property
    def memory(self):
        shape, draw = self.shape, np.random.default_rng(2).normal
        tail = draw(size=(self.layers, self.rows, shape.tail_rows, shape.channels))
        heads = (shape.value_heads, shape.key_dim, shape.value_dim)
        return DeltaMemory(
            tail=jnp.asarray(tail, self.numerics.activation),
            delta=jnp.asarray(draw(size=(self.layers, self.rows, *heads)), jnp.float32),
        )

    def call(self, block, **options):
        """``call(where, memory, vectors, tokens) -> (outputs, records)`` of all layers."""
        stage, shape, layers = self.stage(block), self.shape, self.layers

        def kernel(where, memory, vectors, tokens, out, records, scratch):
            @pl.loop(0, layers)
            def _(layer):
                stage.start(scratch, memory, where, layer)
                page = jax.tree.map(lambda ref: ref.at[layer], tokens)
                out[layer] = self.step(stage, scratch, memory, vectors, page, where, layer, records)

            stage.drain(scratch, records)

        def run(where, memory, vectors, tokens):
            in_vmem = partial(jax.tree.map, lambda _: VMEM)
            held = self.numerics.activation
            out = jax.ShapeDtypeStruct((layers, block.padded, shape.value_width), held)
            record = jax.ShapeDtypeStruct((layers, block.padded, shape.record_width), jnp.float32)
            return pl.pallas_call(
                kernel,
                name=f"{shape.kind}_layers",
                out_shape=(out, record),
                in_specs=[
                    Where(SMEM, SMEM),
                    DeltaMemory(HBM, HBM),
                    in_vmem(vectors),
                    in_vmem(tokens),
                ],
                out_specs=(VMEM, HBM),
                scratch_shapes=[stage.scratch()],
                **options,
            )(where, memory, vectors, tokens)

        return run

    def run(self, block, memory, tokens, rows, **interpret):
        """One step of all layers: outputs [Nl, P, Hv·V] and records [Nl, P, record width]."""
        padding = [(0, 0), (0, block.padded - block.rows), (0, 0)]
        padded = jax.tree.map(
            lambda x: jnp.pad(x.reshape(self.layers, block.rows, -1), padding), tokens
        )
        call = stage_call(self, block, tuple(interpret.items()))
        out, records = call(self.where(rows), memory, self.vectors, padded)
        return np.asarray(out.astype(jnp.float32)), records

    def commit(self, block, memory, records, rows, accepted, **interpret):
        """The memory after the first ``accepted`` tokens of each sequence."""
        call = commit_call(self, block, tuple(interpret.items()))
        return call(memory, records, self.where(rows), jnp.asarray(accepted, jnp.int32))

    @staticmethod
    def where(rows):
        rows = jnp.asarray(rows, jnp.int32)
        return Where(rows, jnp.zeros_like(rows))

    def expected(self, memory, tokens, rows):
        """Outputs [Nl, S, T, Hv·V] and the state after all tokens, by the references."""
        rows = jnp.asarray(rows)
        layers = jax.jit(
            jax.vmap(self.reference_layer, in_axes=(0, 0, 0, None)),
            compiler_options=self.compiler_options,
        )
        out, tail, delta = layers(self.vectors, memory, tokens, rows)
        moved = DeltaMemory(memory.tail.at[:, rows].set(tail), memory.delta.at[:, rows].set(delta))
        return np.asarray(out.astype(jnp.float32)), moved


def assert_same_bits(one, other):
    """Of two memories."""
    np.testing.assert_array_equal(one.delta, other.delta)
    np.testing.assert_array_equal(
        np.asarray(one.tail, np.float32), np.asarray(other.tail, np.float32)
    )


def of_rows(memory, rows):
    """Some rows of a memory."""
    return jax.tree.map(lambda x: x[:, rows], memory)


def one_by_one(net, tokens, rows):
    """Each token as a step with its commit: outputs [Nl, S, T, Hv·V], memories after 0..T."""
    memories, outputs, block = [net.memory], [], Block(len(rows), 1)
    for t in range(jax.tree.leaves(tokens)[0].shape[2]):
        token = jax.tree.map(lambda x, t=t: x[:, :, t : t + 1], tokens)
        out, records = net.run(block, memories[-1], token, rows)
        outputs.append(out[:, : block.rows])
        counts = [1] * block.sequences
        memories.append(net.commit(block, memories[-1], records, rows, counts))
    return np.stack(outputs, axis=2), memories


def assert_block_has_the_bits_of_single_steps(net, accepted):
    """Of two sequences of three tokens: outputs, and memories after ``accepted`` of each."""
    block, rows, tokens = Block(2, 3), ROWS[:2], net.tokens(2, 3)
    out, records = net.run(block, net.memory, tokens, rows)
    stepped, memories = one_by_one(net, tokens, rows)
    np.testing.assert_array_equal(out[:, : block.rows].reshape(stepped.shape), stepped)
    still = np.array([row for row in range(net.rows) if row not in rows])
    for counts in accepted:
        moved = net.commit(block, net.memory, records, rows, counts)
        for row, count in zip(rows, counts, strict=True):
            assert_same_bits(of_rows(moved, row), of_rows(memories[count], row))
        assert_same_bits(of_rows(moved, still), of_rows(net.memory, still))


def assert_a_row_alone_has_the_bits_it_has_beside_others(net):
    """Of two sequences of one token: outputs and records."""
    tokens = net.tokens(2, 1)
    out, records = net.run(Block(2, 1), net.memory, tokens, ROWS[:2])
    for s, row in enumerate(ROWS[:2]):
        own = jax.tree.map(lambda x, s=s: x[:, s : s + 1], tokens)
        alone, record = net.run(Block(1, 1), net.memory, own, [row])
        np.testing.assert_array_equal(alone[:, 0], out[:, s])
        np.testing.assert_array_equal(record[:, 0], records[:, s])


def assert_outputs_equal_the_references(net, sequences, tokens, tolerance):
    """And rows without a token are zero, and their records finite."""
    block, rows = Block(sequences, tokens), ROWS[:sequences]
    projections = net.tokens(sequences, tokens)
    out, records = net.run(block, net.memory, projections, rows)
    expected, moved = net.expected(net.memory, projections, rows)
    real = out[:, : block.rows].reshape(expected.shape)
    np.testing.assert_allclose(real, expected, rtol=tolerance, atol=tolerance)
    assert not out[:, block.rows :].any()
    assert np.isfinite(records).all()
    return records, moved


def assert_states_equal_the_references(net, sequences, tokens, tolerance=1e-5):
    """After a commit of all tokens; tails bit for bit."""
    block, rows = Block(sequences, tokens), ROWS[:sequences]
    records, moved = assert_outputs_equal_the_references(net, sequences, tokens, tolerance)
    committed = net.commit(block, net.memory, records, rows, [tokens] * sequences)
    np.testing.assert_allclose(committed.delta, moved.delta, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(committed.tail, moved.tail)


def assert_ordered_in_both_modes(net, faults):
    """Steps and commits of three sequences race nowhere, leave nothing behind, and agree.

    Copies are done as late as a wait allows, and at once.
    """
    runs, block = [], Block(3, 1)

    def run(mode):
        mode = {"dma_execution_mode": mode, "detect_races": True}
        out, records = net.run(block, net.memory, net.tokens(3, 1), ROWS, **mode)
        states = [
            net.commit(block, net.memory, records, ROWS, accepted, **mode)
            for accepted in ([1, 0, 1], [1, 1, 1])
        ]
        runs.append([out, records, *(part for m in states for part in (m.tail, m.delta))])

    assert faults(lambda: run("on_wait")) == set()
    assert faults(lambda: run("eager")) == set()
    for late, early in zip(*runs, strict=True):
        np.testing.assert_array_equal(late, early)
