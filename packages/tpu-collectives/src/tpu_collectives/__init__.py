"""Remote-DMA collectives called inside Pallas TPU kernels, on any mesh."""

from importlib.metadata import version as _version

from tpu_collectives.errors import TopologyError
from tpu_collectives.places import Grid, Place
from tpu_collectives.topology import GroupBy, Topology

__all__ = ["Grid", "GroupBy", "Place", "Topology", "TopologyError", "__version__"]

__version__ = _version("tpu-collectives")
