"""Lossless speculative decoding: verification, and the DSpark and DFlash2 drafters."""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("spec-dspark")
