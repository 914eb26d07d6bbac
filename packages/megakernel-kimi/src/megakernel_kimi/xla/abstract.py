"""The programs without weights, to compile them for a slice that is not there.

::

    built = abstract_model(kimi_k3(), Topology.from_name("tpu7x:2x2x4"), rows=8, context=32768)
    compiled = built.decode().lower().compile()
"""

from __future__ import annotations

from kda_mla_kernels.backend import RANKS, AbstractModel, cache_slots
from kda_mla_kernels.numerics import BF16, Numerics
from tpu_collectives import Topology

from megakernel_kimi.config import KimiConfig
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.weights import weight_shapes
from megakernel_kimi.xla.programs import Programs
from megakernel_kimi.xla.rank import Rank

__all__ = ["abstract_model"]


def abstract_model(
    config: KimiConfig,
    topology: Topology,
    *,
    rows: int,
    context: int,
    numerics: Numerics = BF16,
    feature_layers: tuple[int, ...] = (),
) -> AbstractModel:
    """Args as in ``load``; every device of the topology is a rank.

    Raises:
        ConfigError: the ranks do not fit the model.
    """
    layout = KimiLayout.of(config, topology.ranks, lanes=topology.ranks_per_host)
    programs = Programs(
        rank=Rank(layout, numerics, numerics.activation),
        mesh=topology.mesh(RANKS),
        rows=rows,
        slots=cache_slots(context),
        feature_layers=feature_layers,
    )
    return AbstractModel(programs, weight_shapes(layout, numerics.activation))
