"""Layers of two large matrices and a head, for compiling only: 0.6 GB of bf16 weights."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from streamed_call import StreamedCall
from vmem_pool.stream import Matrix, Stream, matvec, plan_stream

ROWS, WIDTH, INNER, OUT, LAYERS = 8, 5120, 2304, 2560, 8
SEGMENTS = {
    "layer": [
        Matrix("gate_up", (WIDTH, 2 * INNER), jnp.bfloat16),
        Matrix("down", (INNER, WIDTH), jnp.bfloat16),
    ],
    "head": [Matrix("logits", (WIDTH, OUT), jnp.bfloat16)],
}
PLAN = plan_stream(SEGMENTS, ["layer"] * LAYERS + ["head"], slot_bytes=2560 << 10, depth=8)


def _kernel(x_ref, image_hbm, out_ref, h, wide, inner, ring, group):
    stream = Stream(PLAN, ring, image_hbm)
    stream.start()
    h[...] = x_ref[...]

    @pl.loop(0, LAYERS, init_carry=jnp.int32(0))
    def _(layer, pos):
        segment = stream.segment("layer", pos)
        matvec(segment, "gate_up", h, wide, group=group)
        gated = jax.nn.sigmoid(wide[:, :INNER]) * wide[:, INNER:]
        inner[...] = gated.astype(inner.dtype)
        matvec(segment, "down", inner, h, group=group)
        return segment.done()

    head = stream.segment("head", PLAN.starts[-1])
    matvec(head, "logits", h, out_ref, group=group)
    head.done()


def _build(topology, group):
    call = StreamedCall(
        name="layers",
        plan=PLAN,
        x=jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16),
        out=jax.ShapeDtypeStruct((ROWS, OUT), jnp.float32),
        scratch=(
            pltpu.VMEM((ROWS, WIDTH), jnp.bfloat16),
            pltpu.VMEM((ROWS, 2 * INNER), jnp.float32),
            pltpu.VMEM((ROWS, INNER), jnp.bfloat16),
        ),
    )
    kernel = partial(_kernel, group=group)
    return call.build(kernel, topology, disable_bounds_checks=True, disable_semaphore_checks=True)


def build_single(topology):
    """Slots one by one."""
    return _build(topology, 1)


def build_paired(topology):
    """Slots in pairs: waits, then dots, then refills."""
    return _build(topology, 2)
