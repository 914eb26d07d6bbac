"""Kimi K3: configuration, tokenizer, chat format and single-kernel decoding on TPU."""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("megakernel-kimi")
