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
        ConfigError: none fits; the message is the first layout's. It covers everything that would
            otherwise only show when the kernel is compiled.
    """
    errors = []
    for layout in layouts:
        model = KernelModel(
            layout,
            options.numerics,
            _agreeing(topology, layout),
            options.slots,
            options.feature_layers,
            form,
        )
        rows = options.max_rows
        # The widest step, and the longest block to verify.
        steps = StepPlan(model, Block(rows, 1), CANDIDATES), StepPlan(model, Block(1, rows))
        try:
            for step in steps:
                planned_stream(step)  # raises where VMEM has no room for a ring
        except ConfigError as error:
            errors.append(error)
        else:
            return model
    asked = layouts[0].holders if len(layouts) == 1 else 1
    fewer = "" if asked == 1 else f"; or take fewer holders than {asked}"
    raise ConfigError(f"{errors[0]}{fewer}")


def _agreeing(topology: Topology, layout: KimiLayout) -> Topology:
    """Of CPU devices, which have no hosts, one with those of the layout."""
    if topology.ranks_per_host == layout.lanes:
        return topology
    cores = 1 if layout.lanes % 2 else 2
    return Topology.virtual(layout.ranks, cores, layout.lanes // cores)
