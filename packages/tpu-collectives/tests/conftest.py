"""Eight virtual CPU devices for every test of this package, and no search for a TPU."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
