"""Qwen3.5/3.6/3.8 dense hybrids: loading, sharding, reference model and single-kernel decoding on TPU."""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("megakernel-qwen")
