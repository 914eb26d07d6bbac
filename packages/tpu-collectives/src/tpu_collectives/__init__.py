"""Remote-DMA collectives called inside Pallas TPU kernels, on any mesh."""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("tpu-collectives")
