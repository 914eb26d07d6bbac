"""Decode stages for linear- and latent-attention language models, each with a JAX reference."""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("kda-mla-kernels")
