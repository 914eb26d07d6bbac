"""The bytes of a stream on the host."""

import jax.numpy as jnp
import numpy as np
import pytest
from vmem_pool import PlanError, unpack
from vmem_pool.stream import Matrix, image, plan_stream, slots

SEGMENTS = {
    "layer": [
        Matrix("norm", (1, 200), jnp.float32),
        Matrix("up", (256, 640), jnp.bfloat16),
        Matrix("down", (640, 256), jnp.float8_e4m3fn),
    ],
    "head": [Matrix("logits", (256, 300), jnp.bfloat16)],
}
ORDER = ["layer", "head", "layer"]
PLAN = plan_stream(SEGMENTS, ORDER, slot_bytes=1 << 17, depth=4)


def _weights(number, name):
    matrix = next(m for m in SEGMENTS[ORDER[number]] if m.name == name)
    random = np.random.default_rng([number, *name.encode()])
    return random.integers(1, 8, matrix.shape).astype(matrix.dtype)


def test_every_tile_is_found_again_and_all_else_is_zero():
    stream = image(PLAN, _weights)
    assert stream.shape == PLAN.image_shape
    for number, (first, name) in enumerate(zip(PLAN.starts, ORDER)):
        for tile in PLAN.segments[name].tiles:
            rows = slice(tile.byte_row, tile.byte_row + tile.bytes // 128)
            stored = stream[first + tile.slot, rows]
            whole = _weights(number, tile.matrix.name)
            part = whole[tile.rows.start : tile.rows.stop, tile.columns.start : tile.columns.stop]
            np.testing.assert_array_equal(unpack(stored, tile.shape, tile.matrix.dtype), part)
            stored[...] = 0
    assert not stream.any()


@pytest.mark.parametrize("start", range(PLAN.num_slots))
def test_writing_can_begin_at_any_slot(start):
    fetched = []

    def fetch(number, name):
        fetched.append((number, name))
        return _weights(number, name)

    rest = np.stack(list(slots(PLAN, fetch, start)))
    np.testing.assert_array_equal(rest, image(PLAN, _weights)[start:])
    assert len(fetched) == len(set(fetched)), "a matrix is fetched twice"
    needed = {
        (number, tile.matrix.name)
        for number, (first, name) in enumerate(zip(PLAN.starts, ORDER))
        for tile in PLAN.segments[name].tiles
        if first + tile.slot >= start
    }
    assert set(fetched) == needed


def test_another_shape_than_planned_is_refused():
    with pytest.raises(
        PlanError, match=r"norm of segment 0 \(layer\) .* \(1, 200\), not .* \(200,\)"
    ):
        image(PLAN, lambda number, name: _weights(number, name).reshape(-1))
