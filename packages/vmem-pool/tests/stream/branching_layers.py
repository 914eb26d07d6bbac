"""Two kinds of layers behind one branch, shared slots and 8-bit weights, for compiling only."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from streamed_call import StreamedCall
from vmem_pool.stream import Matrix, Stream, matvec, plan_stream

ROWS, WIDTH, LAYERS = 16, 1024, 12
SEGMENTS = {
    "dense": [
        Matrix("scale", (1, WIDTH), jnp.float32),
        Matrix("square", (WIDTH, WIDTH), jnp.bfloat16),
        Matrix("deep", (3 * WIDTH, WIDTH), jnp.bfloat16),
    ],
    "small": [Matrix("square", (WIDTH, WIDTH), jnp.float8_e4m3fn)],
}
ORDER = ["dense", "small", "small"] * (LAYERS // 3)
PLAN = plan_stream(SEGMENTS, ORDER, slot_bytes=640 << 10, depth=8)


def _kernel(x_ref, image_hbm, out_ref, h, deep, product, ring):
    stream = Stream(PLAN, ring, image_hbm)
    stream.start()
    h[...] = x_ref[...]

    def dense(pos):
        segment = stream.segment("dense", pos)
        tile = segment.take("scale")
        scale = tile.load()
        segment.release(tile)
        matvec(segment, "square", h, product)
        for part in range(3):
            lanes = pl.ds(part * WIDTH, WIDTH)
            deep[:, lanes] = (product[...] * scale).astype(deep.dtype)
        matvec(segment, "deep", deep, h)
        return segment.done()

    def small(pos):
        segment = stream.segment("small", pos)
        matvec(segment, "square", h, product)
        h[...] = product[...].astype(h.dtype)
        return segment.done()

    @pl.loop(0, LAYERS, init_carry=jnp.int32(0))
    def _(layer, pos):
        return jax.lax.cond(layer % 3 == 0, dense, small, pos)

    out_ref[...] = h[...]


def build(topology):
    """The kernel, with all of the compiler's checks on."""
    call = StreamedCall(
        name="branches",
        plan=PLAN,
        x=jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16),
        out=jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16),
        scratch=(
            pltpu.VMEM((ROWS, WIDTH), jnp.bfloat16),
            pltpu.VMEM((ROWS, 3 * WIDTH), jnp.bfloat16),
            pltpu.VMEM((ROWS, WIDTH), jnp.float32),
        ),
    )
    return call.build(_kernel, topology)
