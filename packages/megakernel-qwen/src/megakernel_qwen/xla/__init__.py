"""The pure-JAX backend: the model jitted and sharded, on CPU, GPU or TPU."""

from megakernel_qwen.xla.programs import Programs

__all__ = ["Programs"]
