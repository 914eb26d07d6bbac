"""The Qwen3.5 / 3.6 / 3.8 dense hybrids: loading, sharding, reference model and decoding on TPU.

    from megakernel_qwen import package
    model = package.load(package.embedded_checkpoint())

``package`` is the entry point that servers find; ``reference`` is the model to read.
"""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("megakernel-qwen")
