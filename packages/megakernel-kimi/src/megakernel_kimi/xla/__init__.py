"""The pure-JAX backend: the model jitted and sharded, on CPU, GPU or TPU."""

from megakernel_kimi.xla.programs import Programs

__all__ = ["Programs"]
