"""Eight virtual CPU devices for every test of this package, and no search for a TPU."""

import jax
from tpu_collectives.testing import virtual_devices

jax.config.update("jax_platforms", "cpu")
virtual_devices(8)
