"""The pure-JAX backend: the model jitted and sharded, on CPU, GPU or TPU."""

from megakernel_qwen.xla.backend import QwenXla

__all__ = ["QwenXla"]
