"""The stage and its commit in the interpreter, against the references and against themselves.

Races and broken protocols are in ``test_gdn_kernel_races.py``, real sizes in
``test_gdn_kernel_compile.py``. Nothing here runs on a TPU.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from delta_kernel_harness import (
    ROWS,
    assert_a_row_alone_has_the_bits_it_has_beside_others,
    assert_block_has_the_bits_of_single_steps,
    assert_outputs_equal_the_references,
    assert_same_bits,
    assert_states_equal_the_references,
)
from gdn_kernel_harness import SMALL, Net
from kda_mla_kernels.block import Block
from kda_mla_kernels.gdn.kernel import DeltaNet, GdnShape, commit_states
from kda_mla_kernels.numerics import BF16, F32

POLICIES = pytest.mark.parametrize("numerics", [F32, BF16], ids=lambda policy: policy.name)


@pytest.mark.parametrize(
    ("sequences", "tokens", "numerics"),
    [
        pytest.param(*block, numerics, id="{}-{}-{}".format(*block, numerics.name), marks=marks)
        for block, numerics, marks in (
            ((1, 1), F32, ()),
            ((2, 3), F32, ()),
            ((2, 3), BF16, ()),
            ((3, 1), F32, ()),
            ((1, 4), BF16, ()),
            ((1, 1), BF16, pytest.mark.slow),
            ((3, 1), BF16, pytest.mark.slow),
            ((1, 4), F32, pytest.mark.slow),
        )
    ],
)
def test_outputs_equal_the_references(numerics, sequences, tokens):
    # A sum in another order may tip one of the norm's three roundings.
    tolerance = 1e-5 if numerics is F32 else 3 * 2**-8
    # The others are compiled well for tests of bits.
    net = Net(numerics=numerics, quick=(sequences, tokens) in ((3, 1), (1, 4)))
    assert_outputs_equal_the_references(net, sequences, tokens, tolerance)


def test_the_committed_state_equals_the_references():
    assert_states_equal_the_references(Net(), 2, 3)


@POLICIES
def test_tokens_of_a_block_have_the_bits_of_single_steps(numerics):
    accepted = [(0, 0), (0, 3), (1, 2), (2, 0), (3, 1)]
    assert_block_has_the_bits_of_single_steps(Net(numerics=numerics), accepted)


@POLICIES
def test_a_row_alone_has_the_bits_it_has_beside_others(numerics):
    assert_a_row_alone_has_the_bits_it_has_beside_others(Net(numerics=numerics))


def test_a_padded_tail_gives_the_same_bits_and_keeps_its_padding():
    plain, block, rows = Net(), Block(2, 3), ROWS[:2]
    padded = replace(plain, shape=replace(SMALL, tail_padding=1))
    tail = jnp.pad(plain.memory.tail, [(0, 0), (0, 0), (0, 1), (0, 0)])
    memory = replace(plain.memory, tail=tail)
    tokens = plain.tokens(2, 3)
    out, records = plain.run(block, plain.memory, tokens, rows)
    same, record = padded.run(block, memory, tokens, rows)
    np.testing.assert_array_equal(same, out)
    moved = plain.commit(block, plain.memory, records, rows, [2, 3])
    also = padded.commit(block, memory, record, rows, [2, 3])
    assert_same_bits(replace(also, tail=also.tail[:, :, :3]), moved)
    assert not also.tail[:, :, 3].any()


def test_other_numbers_of_taps_and_heads_equal_the_references():
    shape = GdnShape(key_heads=1, value_heads=3, key_dim=32, value_dim=16, taps=2)
    assert_states_equal_the_references(Net(shape=shape, layers=1, quick=True), 1, 2)


def test_parts_of_a_record_start_at_whole_lanes():
    spans = [SMALL.record.inputs, SMALL.record.key, SMALL.record.update, SMALL.record.decay]
    assert [span.size for span in spans] == [192, 32, 128, 4]
    assert [span.start for span in spans] == [0, 256, 384, 512]
    assert SMALL.record_width == 640


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_heads": 3}, "3 value heads cannot share 2 key heads evenly"),
        ({"key_dim": 0}, "heads and dims must be at least 1"),
        ({"taps": 1}, "at least 2 taps, not 1"),
        ({"tail_padding": -1}, "cannot have -1 rows of padding"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_tails_that_would_lose_precision_are_refused():
    with pytest.raises(ValueError, match="held as bfloat16 would not keep float32 activations"):
        DeltaNet(SMALL, Block(1, 1), F32, 1e-6, jnp.bfloat16)


def test_memory_of_another_shape_is_refused():
    net = Net()
    records = jnp.zeros((net.layers, 8, SMALL.record_width - 1))
    with pytest.raises(ValueError, match=r"records is float32\[2, 8, 639\], but must be .*640\]"):
        commit_states(
            SMALL, Block(1, 1), jnp.float32, net.memory, records, net.where([0]), jnp.ones(1, int)
        )
