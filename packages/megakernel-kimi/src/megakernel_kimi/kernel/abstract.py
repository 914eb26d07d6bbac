"""The kernel's programs without weights, to compile them for a slice that is not there.

::

    topology = Topology.from_name("tpu7x:2x2x4")
    built = AbstractModel.of(kimi_k3(), topology, rows=8, context=32768)
    compiled = built.decode().lower().compile()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kda_mla_kernels import backend
from kda_mla_kernels.backend import RANKS, AbstractProgram, cache_slots
from kda_mla_kernels.moe.kernel import ExpertForm
from kda_mla_kernels.numerics import BF16, Numerics
from tpu_collectives import Topology

from megakernel_kimi.config import KimiConfig
from megakernel_kimi.kernel.plan import KernelModel
from megakernel_kimi.kernel.programs import KernelPrograms
from megakernel_kimi.kernel.weights import weight_shapes
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.xla.rank import Rank

__all__ = ["AbstractModel", "AbstractProgram"]


@dataclass(frozen=True)
class AbstractModel(backend.AbstractModel):
    """A model of this shape on a topology's compile-only devices. Make it with :meth:`of`."""

    programs: KernelPrograms

    @classmethod
    def of(
        cls,
        config: KimiConfig,
        topology: Topology,
        *,
        rows: int,
        context: int,
        numerics: Numerics = BF16,
        feature_layers: tuple[int, ...] = (),
        form: ExpertForm = "mxfp4",
        expert_tp: int | None = None,
        holders: int = 1,
    ) -> AbstractModel:
        """Args as in ``load``; every device of the topology is a rank.

        Raises:
            ConfigError: the ranks do not fit the model, or ``expert_tp`` or ``holders`` does not
                fit the ranks.
        """
        lanes = topology.ranks // topology.hosts
        layout = KimiLayout.of(
            config, topology.ranks, lanes=lanes, expert_tp=expert_tp, holders=holders
        )
        slots = cache_slots(context)
        model = KernelModel(layout, numerics, topology, slots, feature_layers, form)
        programs = KernelPrograms(
            rank=Rank(layout, numerics, model.held),
            mesh=topology.mesh(RANKS),
            rows=rows,
            slots=slots,
            feature_layers=feature_layers,
            model=model,
            interpret=False,
        )
        return cls(programs, weight_shapes(layout, model.expert_shape, model.held))

    @property
    def _verify_program(self) -> Callable[..., Any]:
        """The step alone: its caches are only read."""
        return self.programs.verify_step
