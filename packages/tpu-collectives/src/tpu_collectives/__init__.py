"""Remote-DMA collectives called inside Pallas TPU kernels, on any mesh."""

from importlib.metadata import version as _version

from tpu_collectives.all_reduce import AllReduce
from tpu_collectives.arg_max import ArgMax
from tpu_collectives.barrier import Barrier
from tpu_collectives.broadcast import Broadcast
from tpu_collectives.errors import CollectiveError, ExchangeError, TopologyError, TuningError
from tpu_collectives.gather import AllGather
from tpu_collectives.places import Grid, Place
from tpu_collectives.scatter import ReduceScatter
from tpu_collectives.single import AllToAll, PairExchange
from tpu_collectives.table import ScheduleTable
from tpu_collectives.topology import GroupBy, Topology

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "ArgMax",
    "Barrier",
    "Broadcast",
    "CollectiveError",
    "ExchangeError",
    "Grid",
    "GroupBy",
    "PairExchange",
    "Place",
    "ReduceScatter",
    "ScheduleTable",
    "Topology",
    "TopologyError",
    "TuningError",
    "__version__",
]

__version__ = _version("tpu-collectives")
