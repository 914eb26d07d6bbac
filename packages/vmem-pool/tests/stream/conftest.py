"""A toy step whose weights are small integers, so that every sum is exact in f32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from vmem_pool.stream import Matrix, Stream, image, matvec, plan_stream, ring_scratch

ROWS, WIDTH, INNER, OUT = 8, 256, 640, 384
SEGMENTS = {
    "even": [
        Matrix("sign", (1, WIDTH), jnp.float32),
        Matrix("up", (WIDTH, INNER), jnp.bfloat16),
        Matrix("down", (INNER, WIDTH), jnp.bfloat16),
    ],
    "odd": [Matrix("mix", (WIDTH, WIDTH), jnp.float8_e4m3fn)],
    "head": [Matrix("logits", (WIDTH, OUT), jnp.bfloat16)],
}
ORDER = ("even", "odd", "even", "odd", "head")

# A test compiles for longer than it runs.
QUICK = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    # Off, it halves what is left. Later lines have nothing else to emit loops with.
    QUICK["xla_cpu_use_fusion_emitters"] = False


class Step:
    """h is clipped after each product, which keeps it small and integer."""

    def __init__(self, slot_bytes=1 << 16, depth=4, group=2):
        self.plan = plan_stream(SEGMENTS, ORDER, slot_bytes=slot_bytes, depth=depth)
        self.group = group
        random = np.random.default_rng(0)
        self.weights = [
            {m.name: random.integers(-2, 3, m.shape).astype(m.dtype) for m in SEGMENTS[kind]}
            for kind in ORDER
        ]
        self.x = random.integers(-2, 3, (ROWS, WIDTH)).astype(jnp.bfloat16)
        self.image = image(self.plan, lambda number, name: self.weights[number][name])

    def expected(self):
        h = self.x.astype(np.float32)
        for weights in self.weights[:-1]:
            w = {name: value.astype(np.float32) for name, value in weights.items()}
            if "mix" in w:
                h = np.clip(h @ w["mix"], -3, 3)
            else:
                inner = np.clip((h * np.sign(w["sign"])) @ w["up"], -3, 3)
                h = np.clip(inner @ w["down"], -3, 3)
        return h @ self.weights[-1]["logits"].astype(np.float32)

    def kernel(self, x_ref, image_hbm, out_ref, h, inner, wide, product, ring):
        stream = Stream(self.plan, ring, image_hbm)
        stream.start()
        h[...] = x_ref[...]

        def even(pos):
            segment = stream.segment("even", pos)
            sign = segment.take("sign")
            signs = jnp.sign(sign.load())
            segment.release(sign)
            h[...] = (h[...].astype(jnp.float32) * signs).astype(h.dtype)
            matvec(segment, "up", h, wide, group=self.group)
            inner[...] = jnp.clip(wide[...], -3, 3).astype(inner.dtype)
            matvec(segment, "down", inner, product, group=self.group)
            h[...] = jnp.clip(product[...], -3, 3).astype(h.dtype)
            return segment.done()

        def odd(pos):
            segment = stream.segment("odd", pos)
            matvec(segment, "mix", h, product, group=self.group)
            h[...] = jnp.clip(product[...], -3, 3).astype(h.dtype)
            return segment.done()

        @pl.loop(0, 4, init_carry=jnp.int32(0))
        def _(layer, pos):
            return jax.lax.cond(layer % 2 == 0, even, odd, pos)

        head = stream.segment("head", self.plan.starts[-1])
        matvec(head, "logits", h, out_ref, group=self.group)
        assert head.done() == self.plan.num_slots

    def run(self, dtype=jnp.bfloat16, **interpret):
        call = pl.pallas_call(
            self.kernel,
            out_shape=jax.ShapeDtypeStruct((ROWS, OUT), jnp.float32),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[
                pltpu.VMEM((ROWS, WIDTH), dtype),
                pltpu.VMEM((ROWS, INNER), dtype),
                pltpu.VMEM((ROWS, INNER), jnp.float32),
                pltpu.VMEM((ROWS, WIDTH), jnp.float32),
                ring_scratch(self.plan),
            ],
            interpret=pltpu.InterpretParams(**interpret),
        )
        run = jax.jit(call, compiler_options=QUICK)
        return np.asarray(run(jnp.asarray(self.x.astype(dtype)), jnp.asarray(self.image)))


@pytest.fixture
def make_step():
    return Step
