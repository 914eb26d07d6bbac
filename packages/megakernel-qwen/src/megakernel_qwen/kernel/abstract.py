"""The kernel's programs without weights, to compile them for a slice that is not there.

::

    built = AbstractModel.of(config, Topology.from_name("tpu7x:2x2x1"), rows=8, context=32768)
    compiled = built.decode().lower().compile()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kda_mla_kernels import backend
from kda_mla_kernels.backend import RANKS, AbstractProgram, cache_slots
from kda_mla_kernels.numerics import BF16, Numerics
from tpu_collectives import Topology

from megakernel_qwen.config import QwenConfig
from megakernel_qwen.kernel.plan import KernelModel
from megakernel_qwen.kernel.programs import KernelPrograms
from megakernel_qwen.kernel.weights import weight_shapes
from megakernel_qwen.layout import QwenLayout
from megakernel_qwen.xla.mixers import Rank

__all__ = ["AbstractModel", "AbstractProgram"]


@dataclass(frozen=True)
class AbstractModel(backend.AbstractModel):
    """A model of this shape on a topology's compile-only devices. Make it with :meth:`of`."""

    programs: KernelPrograms

    @classmethod
    def of(
        cls,
        config: QwenConfig,
        topology: Topology,
        *,
        rows: int,
        context: int,
        numerics: Numerics = BF16,
        feature_layers: tuple[int, ...] = (),
    ) -> AbstractModel:
        """Args as in ``load``; every device of the topology is a rank.

        Raises:
            ConfigError: the ranks do not divide the model.
        """
        layout = QwenLayout(config, topology.ranks)
        model = KernelModel(layout, numerics, topology, cache_slots(context), feature_layers)
        programs = KernelPrograms(
            rank=Rank(layout, numerics, model.held),
            mesh=topology.mesh(RANKS),
            rows=rows,
            slots=model.slots,
            feature_layers=feature_layers,
            model=model,
            interpret=False,
        )
        return cls(programs, weight_shapes(layout, model.held))

    @property
    def _verify_program(self) -> Callable[..., Any]:
        """The step alone: its caches are only read."""
        return self.programs.verify_step
