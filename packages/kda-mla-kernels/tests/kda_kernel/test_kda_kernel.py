"""The stage and its commit in the interpreter, against the references and against themselves.

Mutants of the protocol, which the stage shares with the gated delta net, are in ``gdn_kernel``;
real sizes in ``test_kda_kernel_compile.py``. Nothing here runs on a TPU.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_kernel_harness import (
    ROWS,
    assert_a_row_alone_has_the_bits_it_has_beside_others,
    assert_block_has_the_bits_of_single_steps,
    assert_ordered_in_both_modes,
    assert_outputs_equal_the_references,
    assert_states_equal_the_references,
)
from kda_kernel_harness import SMALL, Net
from kda_mla_kernels.block import Block
from kda_mla_kernels.kda.kernel import KdaShape, KimiDeltaAttention
from kda_mla_kernels.numerics import BF16, F32

POLICIES = pytest.mark.parametrize("numerics", [F32, BF16], ids=lambda policy: policy.name)
PAIRS = {"slots": 3, "together": 2}
"""All states at hand, two tokens at a time."""


@POLICIES
def test_outputs_and_the_committed_state_equal_the_references(numerics):
    # A sum in another order may tip the norm's rounding, and that of what it normalises.
    tolerance = 1e-5 if numerics is F32 else 2 * 2**-8
    assert_states_equal_the_references(Net(numerics=numerics), 2, 3, tolerance)


def test_eight_heads_of_64_equal_the_references():
    shape = KdaShape(8, 8, key_dim=64, value_dim=64, taps=4)
    assert_outputs_equal_the_references(Net(shape=shape, layers=1, quick=True), 1, 2, 1e-5)


@POLICIES
def test_tokens_of_a_block_have_the_bits_of_single_steps(numerics):
    accepted = [(0, 0), (0, 3), (1, 2), (3, 1)]
    assert_block_has_the_bits_of_single_steps(Net(numerics=numerics), accepted)


def test_two_tokens_at_a_time_have_the_bits_of_one():
    tokens, block = Net().tokens(2, 3), Block(2, 3)
    one, pair = (net.run(block, net.memory, tokens, ROWS[:2]) for net in (Net(), Net(**PAIRS)))
    jax.tree.map(np.testing.assert_array_equal, one, pair)


@POLICIES
def test_a_row_alone_has_the_bits_it_has_beside_others(numerics):
    assert_a_row_alone_has_the_bits_it_has_beside_others(Net(numerics=numerics))


def test_a_row_among_nine_has_the_bits_it_has_alone():
    # Nine rows take sixteen: sums along rows must not notice.
    head = KdaShape(1, 1, key_dim=64, value_dim=64, taps=4)
    net, rows = Net(shape=head, layers=1, rows=9), np.arange(9)
    tokens = net.tokens(9, 1)
    out, records = net.run(Block(9, 1), net.memory, tokens, rows)
    for s in (2, 8):
        own = jax.tree.map(lambda x, s=s: x[:, s : s + 1], tokens)
        alone, record = net.run(Block(1, 1), net.memory, own, [s])
        np.testing.assert_array_equal(alone[:, 0], out[:, s])
        np.testing.assert_array_equal(record[:, 0], records[:, s])


def test_steps_and_commits_are_ordered_and_leave_nothing_behind_in_both_modes(faults):
    assert_ordered_in_both_modes(Net(quick=True, **PAIRS), faults)


class Extreme(Net):
    """Gates at their ends, and keys that are almost equal, written with a beta of almost 1."""

    def tokens(self, sequences, tokens, seed=3):
        x = super().tokens(sequences, tokens, seed)
        channel = jnp.arange(x.rate.shape[-1])
        ends = jnp.where(channel % 2, 3e4, -3e4) * jnp.ones_like(x.rate)
        keys = slice(self.shape.key_width, 2 * self.shape.key_width)
        nearly = x.channels[:, :, :1, keys] + 1e-3 * x.channels[..., keys]
        return replace(
            x,
            rate=ends.astype(x.rate.dtype),
            write=jnp.full_like(x.write, 9.0),
            channels=x.channels.at[..., keys].set(nearly),
        )

    @property
    def vectors(self):
        # One tap: keys are not mixed with the tail's.
        vectors = super().vectors
        return replace(vectors, taps=vectors.taps.at[:, :-1].set(0.0))


def test_extreme_gates_and_almost_equal_keys_equal_the_references():
    net, block = Extreme(quick=True, layers=1), Block(1, 4)
    assert_states_equal_the_references(net, 1, 4)
    _, records = net.run(block, net.memory, net.tokens(1, 4), ROWS[:1])
    decays = records[0, :4, SMALL.record.decay.columns]
    np.testing.assert_allclose(np.unique(np.round(decays, 7)), [np.exp(-5), 1], rtol=1e-4)
    keys = records[0, :4, SMALL.record.key.columns].reshape(4, 2, 16)
    assert np.einsum("thk,hk->th", keys, keys[0]).min() > 0.9999


def test_parts_of_a_record_start_at_whole_lanes_and_take_9216_bytes_for_three_heads():
    spans = [SMALL.record.inputs, SMALL.record.key, SMALL.record.update, SMALL.record.decay]
    assert [span.size for span in spans] == [128, 32, 64, 32]
    assert [span.start for span in spans] == [0, 128, 256, 384]
    assert 4 * KdaShape(3, 3, 128, 128, 4).record_width == 9216


def test_unequal_numbers_of_heads_are_refused():
    with pytest.raises(ValueError, match="cannot be 2 key heads and 6 value heads"):
        replace(SMALL, value_heads=6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lower_bound": 0.0}, "must be below 0, not 0.0"),
        ({"slots": 0}, "at least 1 slot and 1 token at a time, not 0 and 1"),
        ({"together": 0}, "at least 1 slot and 1 token at a time, not 2 and 0"),
        ({"together": 2}, "2 tokens together need a slot for each of 3 sequences, not 2"),
    ],
)
def test_impossible_stages_are_refused(change, message):
    stage = KimiDeltaAttention(SMALL, Block(3, 1), F32, 1e-5, jnp.float32, -5.0)
    with pytest.raises(ValueError, match=message):
        replace(stage, **change)
