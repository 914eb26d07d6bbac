"""The stage and its commit in the interpreter, against the references and against themselves.

Races and broken protocols are in ``test_gdn_kernel_races.py``, real sizes in
``test_gdn_kernel_compile.py``. Nothing here runs on a TPU.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gdn_kernel_harness import SMALL, Net
from kda_mla_kernels.block import Block
from kda_mla_kernels.gdn.kernel import DeltaNet, GdnShape, commit_states
from kda_mla_kernels.numerics import BF16, F32

POLICIES = pytest.mark.parametrize("numerics", [F32, BF16], ids=lambda policy: policy.name)
ROWS = (3, 1, 4)


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
    for t in range(tokens[0].shape[2]):
        token = [x[:, :, t : t + 1] for x in tokens]
        out, records = net.run(block, memories[-1], token, rows)
        outputs.append(out[:, : block.rows])
        counts = [1] * block.sequences
        memories.append(net.commit(block, memories[-1], records, rows, counts))
    return np.stack(outputs, axis=2), memories


@POLICIES
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_outputs_equal_the_references(numerics, sequences, tokens):
    net, block, rows = Net(numerics=numerics), Block(sequences, tokens), ROWS[:sequences]
    projections = net.tokens(sequences, tokens)
    out, records = net.run(block, net.memory, projections, rows)
    expected, _ = net.expected(net.memory, projections, rows)
    # A sum in another order may tip one of the norm's three roundings.
    tolerance = 1e-5 if numerics is F32 else 3 * 2**-8
    real = out[:, : block.rows].reshape(expected.shape)
    np.testing.assert_allclose(real, expected, rtol=tolerance, atol=tolerance)
    assert not out[:, block.rows :].any()
    assert np.isfinite(records).all()


def test_the_committed_state_equals_the_references():
    net, block, rows = Net(), Block(2, 3), ROWS[:2]
    tokens = net.tokens(2, 3)
    _, records = net.run(block, net.memory, tokens, rows)
    _, moved = net.expected(net.memory, tokens, rows)
    committed = net.commit(block, net.memory, records, rows, [3, 3])
    np.testing.assert_allclose(committed.delta, moved.delta, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(committed.tail, moved.tail)


@POLICIES
def test_tokens_of_a_block_have_the_bits_of_single_steps(numerics):
    net, block, rows = Net(numerics=numerics), Block(2, 3), ROWS[:2]
    tokens = net.tokens(2, 3)
    out, records = net.run(block, net.memory, tokens, rows)
    stepped, memories = one_by_one(net, tokens, rows)
    np.testing.assert_array_equal(out[:, : block.rows].reshape(stepped.shape), stepped)
    still = np.array([row for row in range(net.rows) if row not in rows])
    for accepted in [(0, 0), (0, 3), (1, 2), (2, 0), (3, 1)]:
        moved = net.commit(block, net.memory, records, rows, accepted)
        for row, count in zip(rows, accepted, strict=True):
            assert_same_bits(of_rows(moved, row), of_rows(memories[count], row))
        assert_same_bits(of_rows(moved, still), of_rows(net.memory, still))


@POLICIES
def test_a_row_alone_has_the_bits_it_has_beside_others(numerics):
    net = Net(numerics=numerics)
    tokens = net.tokens(2, 1)
    out, records = net.run(Block(2, 1), net.memory, tokens, ROWS[:2])
    for s, row in enumerate(ROWS[:2]):
        own = [x[:, s : s + 1] for x in tokens]
        alone, record = net.run(Block(1, 1), net.memory, own, [row])
        np.testing.assert_array_equal(alone[:, 0], out[:, s])
        np.testing.assert_array_equal(record[:, 0], records[:, s])


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
    net, block = Net(shape=shape, layers=1), Block(1, 2)
    tokens = net.tokens(1, 2)
    out, records = net.run(block, net.memory, tokens, [2])
    expected, moved = net.expected(net.memory, tokens, [2])
    np.testing.assert_allclose(out[:, :2], expected[:, 0], rtol=1e-5, atol=1e-5)
    committed = net.commit(block, net.memory, records, [2], [2])
    np.testing.assert_allclose(committed.delta, moved.delta, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(committed.tail, moved.tail)


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
