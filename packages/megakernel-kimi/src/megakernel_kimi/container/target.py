"""What weights are converted for, and what a container says about it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import numpy as np
from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.moe.kernel import ExpertForm, ExpertShape
from kda_mla_kernels.numerics import Numerics
from tpu_collectives import Topology
from vmem_pool.container import Spec, Tensor
from vmem_pool.stream import Tile

from megakernel_kimi.config import KimiConfig
from megakernel_kimi.kernel.plan import KernelModel
from megakernel_kimi.kernel.source import row_shapes
from megakernel_kimi.kernel.stream import stream_plan
from megakernel_kimi.layout import KimiLayout

__all__ = ["Target", "config_hash"]


def config_hash(config: KimiConfig) -> str:
    """Differs when anything does that decides the shapes or the maths of the text decoder."""
    return _digest(asdict(config))


@dataclass(frozen=True)
class Target:
    """A model on ranks, as the kernel holds it.

    Attributes:
        layout: how the model is cut.
        shape: form and widths of routed experts.
        dtype: of everything that is neither an expert nor a small vector.
    """

    layout: KimiLayout
    shape: ExpertShape
    dtype: np.dtype

    @classmethod
    def of(cls, layout: KimiLayout, numerics: Numerics, form: ExpertForm) -> Target:
        """For a layout on devices that need not be there.

        Raises:
            ConfigError: the kernel does not take such a model.
        """
        topology = Topology.virtual(layout.ranks, cores_per_chip=1, chips_per_host=layout.lanes)
        model = KernelModel(layout, numerics, topology, slots=1, form=form)
        return cls.of_model(model)

    @classmethod
    def of_model(cls, model: KernelModel) -> Target:
        """For a model that is about to be loaded; errors as for :meth:`of`."""
        try:
            return cls(model.layout, model.expert_shape, np.dtype(model.held))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def spec(self, origin: str) -> Spec:
        """The container's specification.

        Args:
            origin: digest of the checkpoint's values.

        Raises:
            ConfigError: some matrix is too large for any slot of the stream.
        """
        layout, plan = self.layout, stream_plan(self.layout, self.dtype)
        tiles = {
            name: [_where(tile) for tile in kind.tiles] for name, kind in plan.segments.items()
        }
        shapes = row_shapes(layout, self.shape, self.dtype)
        return Spec(
            config_hash=config_hash(layout.config),
            mesh={"hosts": layout.ranks // layout.lanes, "lanes": layout.lanes},
            quantisation=f"{self.dtype.name} with {self.shape.form} experts",
            tensors=tuple(Tensor(name, x.shape, x.dtype) for name, x in shapes.items()),
            metadata={
                "dtype": self.dtype.name,
                "expert_form": self.shape.form,
                "expert_tp": str(layout.expert_tp),
                "slot_bytes": str(plan.slot_bytes),
                "stream": _digest([plan.order, tiles]),
                "origin": origin,
            },
        )


def _where(tile: Tile) -> list[object]:
    spans = (tile.rows.start, tile.rows.stop, tile.columns.start, tile.columns.stop)
    return [tile.matrix.name, *spans, tile.slot, tile.byte_row]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
