"""Decode stages for linear-attention and latent-attention language models, each with a pure-JAX reference."""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("kda-mla-kernels")
