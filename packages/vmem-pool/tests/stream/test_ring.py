"""Kernels that read a stream, in the interpreter: values, races, and broken copies of the protocol.

Nothing here runs on a TPU; that kernels compile for one is in ``test_stream_compile.py``.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from vmem_pool import StreamError
from vmem_pool.stream import Matrix, Stream, image, matvec, plan_stream, ring_scratch

MODES = pytest.mark.parametrize("mode", ["on_wait", "eager"])


@pytest.fixture
def raced(capfd):
    """Runs something and says whether the interpreter found a race, however it says so."""

    def found(run):
        try:
            run()
        except Exception as error:
            if "race" not in str(error).lower():
                raise
            return True
        return "RACE DETECTED" in "".join(capfd.readouterr())

    return found


@MODES
@pytest.mark.parametrize(("slot_kib", "depth", "group"), [(64, 6, 2), (96, 2, 1), (256, 64, 3)])
def test_a_step_equals_plain_dots_and_leaves_no_load(
    make_step, capfd, mode, slot_kib, depth, group
):
    step = make_step(slot_kib << 10, depth, group)
    np.testing.assert_array_equal(step.run(dma_execution_mode=mode), step.expected())
    # The interpreter prints this, and goes on, if a semaphore is not back at zero.
    assert "non-zero count" not in "".join(capfd.readouterr())


def test_a_step_in_f32_equals_plain_dots(make_step):
    step = make_step()
    np.testing.assert_array_equal(step.run(jnp.float32), step.expected())


@MODES
def test_a_step_has_no_races(make_step, raced, mode):
    step = make_step()
    assert not raced(lambda: step.run(dma_execution_mode=mode, detect_races=True))


def _refill_before_the_read(monkeypatch):
    wait, refill = Stream._wait, Stream._refill

    def wait_and_refill(self, pos):
        wait(self, pos)
        refill(self, pos, (0, self.plan.num_slots))

    monkeypatch.setattr(Stream, "_wait", wait_and_refill)
    monkeypatch.setattr(Stream, "_refill", lambda self, pos, bounds: None)


def _wait_for_the_neighbour(monkeypatch):
    wait = Stream._wait

    def wait_elsewhere(self, pos):
        # The last slot may have no neighbour, and a wait that nothing ends would hang.
        wait(self, jnp.where(pos | 1 < self.plan.num_slots, pos ^ 1, pos))

    monkeypatch.setattr(Stream, "_wait", wait_elsewhere)


def _refill_with_the_slot_after(monkeypatch):
    def refill(self, pos, bounds):
        depth, end = self.plan.depth, self.plan.num_slots

        def start():
            following = jnp.minimum(pos + depth + 1, end - 1)
            slot = pos & (depth - 1)
            pltpu.make_async_copy(
                self.image.at[following], self.ring.slots.at[slot], self.ring.arrived.at[slot]
            ).start()

        pl.when(pos + depth < end)(start)

    monkeypatch.setattr(Stream, "_refill", refill)


@pytest.mark.parametrize(
    ("mutate", "mode"),
    [
        # A load that lands when it is waited for hides an early start, and the reverse.
        (_refill_before_the_read, "eager"),
        (_wait_for_the_neighbour, "on_wait"),
        (_refill_with_the_slot_after, "on_wait"),
        (_refill_with_the_slot_after, "eager"),
    ],
)
def test_a_broken_protocol_gives_wrong_values(make_step, monkeypatch, mutate, mode):
    step = make_step(depth=2, group=1)
    mutate(monkeypatch)
    got = step.run(dma_execution_mode=mode)
    assert not np.array_equal(got, step.expected())


def test_a_refill_before_the_read_is_a_race(make_step, monkeypatch, raced):
    # With eager loads jax 0.10 does not report it; the values above are wrong there.
    step = make_step(depth=2, group=1)
    _refill_before_the_read(monkeypatch)
    assert raced(lambda: step.run(dma_execution_mode="on_wait", detect_races=True))


# One matrix of five slots between two small ones, for kernels that the tests write themselves.
SEGMENTS = {
    "only": [
        Matrix("first", (8, 128), jnp.float32),
        Matrix("long", (128, 640), jnp.bfloat16),
        Matrix("last", (8, 128), jnp.float32),
    ]
}
PLAN = plan_stream(SEGMENTS, ["only"], slot_bytes=32 << 10, depth=4)


def _matrix(_, name):
    matrix = next(m for m in SEGMENTS["only"] if m.name == name)
    return np.random.default_rng(1).integers(-2, 3, matrix.shape).astype(matrix.dtype)


def _call(body, plan=PLAN, stored=None, mode="on_wait"):
    """Runs ``body(stream, x, out)``: x is ones [8, 128] bf16, out [8, 640] f32."""

    def kernel(x_ref, image_hbm, out_ref, ring):
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)
        stream = Stream(plan, ring, image_hbm)
        stream.start()
        body(stream, x_ref, out_ref)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 640), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[ring_scratch(plan)],
        interpret=pltpu.InterpretParams(dma_execution_mode=mode),
    )(
        jnp.ones((8, 128), jnp.bfloat16),
        jnp.asarray(image(plan, _matrix) if stored is None else stored),
    )


def _expected():
    return np.ones((8, 128), np.float32) @ _matrix(0, "long").astype(np.float32)


def _read_all(stream, x, out):
    segment = stream.segment("only")
    segment.release(segment.take("first"))
    matvec(segment, "long", x, out)
    segment.release(segment.take("last"))
    segment.done()


@MODES
def test_held_refills_go_out_at_the_flush(monkeypatch, mode):
    started, refill = [], Stream._refill

    def recorded(self, pos, bounds):
        started.append(pos)
        refill(self, pos, bounds)

    monkeypatch.setattr(Stream, "_refill", recorded)

    def body(stream, x, out):
        started.clear()
        segment = stream.segment("only")
        segment.hold()
        segment.release(segment.take("first"))
        tiles = [segment.take("long") for _ in range(2)]
        for tile in tiles:
            out[:, pl.ds(tile.columns.start, tile.columns.size)] = jnp.dot(
                x[...], tile.load(), preferred_element_type=jnp.float32
            )
        segment.release(*tiles)
        assert started == []
        segment.flush()
        assert started == [0, 1, 2]
        for _ in range(len(segment.plan.of("long")) - 2):
            tile = segment.take("long")
            out[:, pl.ds(tile.columns.start, tile.columns.size)] = jnp.dot(
                x[...], tile.load(), preferred_element_type=jnp.float32
            )
            segment.release(tile)
        segment.release(segment.take("last"))
        segment.done()

    np.testing.assert_array_equal(_call(body, mode=mode), _expected())


@MODES
def test_a_rolled_loop_may_be_held(mode):
    plan = plan_stream(SEGMENTS, ["only"], slot_bytes=32 << 10, depth=8)

    def body(stream, x, out):
        segment = stream.segment("only")
        segment.release(segment.take("first"))
        segment.hold()
        matvec(segment, "long", x, out, group=1)
        segment.flush()
        segment.release(segment.take("last"))
        segment.done()

    np.testing.assert_array_equal(_call(body, plan, mode=mode), _expected())


def test_a_slot_may_be_held_while_others_pass():
    def body(stream, x, out):
        segment = stream.segment("only")
        first = segment.take("first")
        tiles = [segment.take("long") for _ in range(2)]
        segment.release(*tiles)
        out[:, :128] = first.load()
        segment.release(first)
        for _ in range(len(segment.plan.of("long")) - 2):
            segment.release(segment.take("long"))
        segment.release(segment.take("last"))
        segment.done()

    np.testing.assert_array_equal(np.asarray(_call(body))[:, :128], _matrix(0, "first"))


@pytest.mark.parametrize("mutant", [None, "swapped tiles", "shifted rows"])
def test_only_the_plan_of_the_image_gives_its_values(mutant):
    plan = plan_stream(SEGMENTS, ["only"], slot_bytes=48 << 10, depth=4)
    stored = image(plan, _matrix)
    tiles = list(plan.segments["only"].tiles)
    a, b = tiles[1:3]
    assert a.matrix.name == b.matrix.name == "long"
    if mutant == "swapped tiles":
        tiles[1:3] = replace(a, columns=b.columns), replace(b, columns=a.columns)
    elif mutant == "shifted rows":
        tiles[1] = replace(a, byte_row=a.byte_row + 32)
    segment = replace(plan.segments["only"], tiles=tuple(tiles))
    got = _call(_read_all, replace(plan, segments={"only": segment}), stored)
    assert np.array_equal(got, _expected()) == (mutant is None)


def _wrong_name(stream, x, out):
    stream.segment("only").take("last")


def _too_many(stream, x, out):
    segment = stream.segment("only")
    for _ in range(7):
        segment.release(segment.take("long" if segment._taken else "first"))


def _read_after_release(stream, x, out):
    segment = stream.segment("only")
    tile = segment.take("first")
    segment.release(tile)
    tile.load()


def _release_twice(stream, x, out):
    segment = stream.segment("only")
    tile = segment.take("first")
    segment.release(tile, tile)


def _never_arrives(stream, x, out):
    segment = stream.segment("only")
    segment.take("first")
    for _ in range(4):
        segment.release(segment.take("long"))


def _loop_never_arrives(stream, x, out):
    segment = stream.segment("only")
    segment.take("first")
    matvec(segment, "long", x, out)


def _held_loop_never_arrives(stream, x, out):
    segment = stream.segment("only")
    segment.release(segment.take("first"))
    segment.hold()
    matvec(segment, "long", x, out)


def _release_inside_a_loop(stream, x, out):
    segment = stream.segment("only")
    segment.release(segment.take("first"))
    segment.each("long", lambda carry, tiles: segment.release(*tiles), None)


def _other_shapes(stream, x, out):
    segment = stream.segment("only")
    segment.release(segment.take("first"))
    matvec(segment, "long", out, x)


def _one_buffer(stream, x, out):
    square = plan_stream(
        {"s": [Matrix("square", (128, 128), jnp.bfloat16)]}, ["s"], slot_bytes=32 << 10, depth=1
    )
    segment = replace(stream.segment("only"), plan=square.segments["s"])
    matvec(segment, "square", x, x)


def _left_early(stream, x, out):
    segment = stream.segment("only")
    segment.release(segment.take("first"))
    segment.done()


def _left_open(stream, x, out):
    segment = stream.segment("only")
    segment.release(segment.take("first"))
    matvec(segment, "long", x, out)
    segment.take("last")
    segment.done()


def _left_held(stream, x, out):
    segment = stream.segment("only")
    segment.release(segment.take("first"))
    matvec(segment, "long", x, out)
    segment.hold()
    segment.release(segment.take("last"))
    segment.done()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_wrong_name, "segment only takes last, but the plan has first next"),
        (_too_many, "takes long, but the plan has last next"),
        (_read_after_release, "a tile of first is read after its release"),
        (_release_twice, "a tile of first is released twice"),
        (_never_arrives, "slot 4 of segment only would never arrive: .* holds a tile of first"),
        (_loop_never_arrives, "would never arrive: slot 0 of the ring of 4 is still held"),
        (_held_loop_never_arrives, "would never arrive"),
        (_release_inside_a_loop, "a tile of long is released inside each"),
        (_other_shapes, r"long \(128, 640\) takes x \[R, 128\] to out \[R, 640\], not \(8, 640\)"),
        (_one_buffer, "x of square is still read while out is written"),
        (_left_early, "is left before a tile of long is taken"),
        (_left_open, "is left with unreleased slots of last"),
        (_left_held, "is left while loads are held back"),
        (lambda stream, x, out: stream.segment("other"), r"no segment 'other' \(it has: only\)"),
        (lambda stream, x, out: stream.segment("only", 3), "starts at slot 3; they start at 0"),
        (
            lambda stream, x, out: Stream(stream.plan, stream.ring, stream.image.at[:2]),
            "the image of this plan is uint8",
        ),
    ],
)
def test_a_kernel_that_leaves_the_plan_is_refused_while_tracing(body, message):
    with pytest.raises(StreamError, match=message):
        _call(body)
