"""The kernel of a model that is about to be loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kda_mla_kernels.backend import CANDIDATES, LoadOptions
from kda_mla_kernels.block import Block
from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.moe.kernel import ExpertForm
from tpu_collectives import Topology

from megakernel_kimi.kernel.plan import KernelModel, StepPlan
from megakernel_kimi.kernel.refs import planned_stream
from megakernel_kimi.layout import KimiLayout

__all__ = ["fitting_model"]


def fitting_model(
    layouts: Sequence[KimiLayout], options: LoadOptions, form: ExpertForm, topology: Topology
) -> KernelModel:
    """Of the first layout whose steps fit into VMEM.

    Args:
        layouts: ways to cut the model, which differ in their ``holders``.

    Raises:
        ConfigError: none fits, with what the first one lacks: everything that would only show when
            the kernel is compiled.
    """
    errors = []
    for layout in layouts:
        try:
            return _checked(layout, options, form, topology)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _checked(
    layout: KimiLayout, options: LoadOptions, form: ExpertForm, topology: Topology
) -> KernelModel:
    if topology.ranks_per_host != layout.lanes:  # CPU devices, which have no hosts
        cores = 1 if layout.lanes % 2 else 2
        topology = Topology.virtual(layout.ranks, cores, layout.lanes // cores)
    model = KernelModel(
        layout, options.numerics, topology, options.slots, options.feature_layers, form
    )
    planned_stream(StepPlan(model, Block(options.max_rows, 1), CANDIDATES))
    planned_stream(StepPlan(model, Block(1, options.max_rows)))  # the longest block to verify
    return model
