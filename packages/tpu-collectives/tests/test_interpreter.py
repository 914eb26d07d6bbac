"""What ``virtual_devices`` changes about the interpreter, and what it leaves alone."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback as callbacks
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def doubled(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=pltpu.InterpretParams())(x)


def test_arguments_of_the_interpreter_do_not_pass_through_a_device(monkeypatch):
    def refuse(*_):
        raise AssertionError("an argument was put on a device")

    x = jnp.arange(1024, dtype=jnp.float32).reshape(8, 128)
    monkeypatch.setattr(callbacks, "api", SimpleNamespace(device_put=refuse))
    np.testing.assert_array_equal(jax.jit(doubled)(x), 2 * np.asarray(x))


def test_callbacks_of_others_still_get_arrays_of_jax():
    seen = []

    def keep(x):
        seen.append(x)
        return np.asarray(x)

    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    result = jax.jit(lambda x: io_callback(keep, shape, x))(jnp.ones(4))
    np.testing.assert_array_equal(result, np.ones(4))
    assert isinstance(seen[0], jax.Array)
