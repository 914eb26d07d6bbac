"""The stage of routed experts alone at the published sizes, for the compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
from kda_mla_kernels.block import Block
from kda_mla_kernels.mlp import situ
from kda_mla_kernels.moe import RouterRule
from kda_mla_kernels.moe.kernel import ExpertForm, ExpertImages, ExpertShape, RoutedExperts
from kda_mla_kernels.numerics import BF16
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.presets import kimi_k3

__all__ = ["LAYERS", "Choice"]

RANKS = 32
LAYERS = 3
"""Of the stage, to give its loop something to do."""
AHEAD = 8
"""Entries whose experts load while a chunk is worked on."""
VMEM_LIMIT_BYTES = 60 << 20


@dataclass(frozen=True)
class Choice:
    """One way to hold and to work on experts.

    Attributes:
        rows: of a step.
        expert_tp: ranks that share an expert.
        form: container.
        chunk: entries of one block of branch-free code; 0 where a single row's are one block.
    """

    rows: int
    expert_tp: int
    form: ExpertForm
    chunk: int

    @classmethod
    def of(cls, rows: int, expert_tp: int, form: ExpertForm, chunk: int) -> Choice:
        """A choice that equals others which only differ in what does not matter."""
        return cls(rows, expert_tp, form, 0 if rows == 1 and expert_tp == RANKS else chunk)

    @property
    def layout(self) -> KimiLayout:
        """The published model on 32 ranks."""
        return KimiLayout.of(kimi_k3(), RANKS, expert_tp=self.expert_tp)

    @property
    def shape(self) -> ExpertShape:
        """Of one rank."""
        layout = self.layout
        latent = layout.config.routed_expert_hidden_size
        return ExpertShape(latent, layout.expert_channels, layout.experts, self.form)

    @property
    def stage(self) -> RoutedExperts:
        """As the kernel has it."""
        config = self.layout.config
        rule = RouterRule(
            config.num_experts_per_token, config.moe_renormalize, config.routed_scaling_factor
        )
        activation = partial(
            situ, beta=config.situ_beta, linear_beta=config.situ_linear_beta, numerics=BF16
        )
        block = Block(self.rows, 1)
        whole = self.layout.has_every_expert
        return RoutedExperts(
            self.shape, rule, block, BF16, activation, self.chunk, AHEAD, whole=whole
        )

    def program(self, topology: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A jitted kernel of a few layers of the stage, and its arguments."""
        stage, experts = self.stage, self.layout.config.num_experts
        here = SingleDeviceSharding(topology.devices[0])

        def array(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=here)

        images = self.shape.image_shapes(LAYERS, self.shape.experts)
        padded = stage.block.padded
        return jax.jit(_call(stage, experts)), (
            ExpertImages(*(array(jnp.uint8, *size) for size in vars(images).values())),
            array(jnp.float32, LAYERS, padded, experts),
            array(jnp.float32, LAYERS, 1, experts),
            array(jnp.bfloat16, LAYERS, padded, self.shape.latent),
        )


def _call(stage: RoutedExperts, experts: int) -> Callable[..., Any]:
    def kernel(images: Any, scores: Any, bias: Any, latents: Any, out: Any, scratch: Any) -> None:
        @pl.loop(0, LAYERS)
        def _(layer: jax.Array) -> None:
            stage.start(scratch, images, layer, scores[layer], bias[layer])
            out[layer] = stage(scratch, images, layer, latents[layer])

    vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.HBM))
    shape = (LAYERS, stage.block.padded, stage.shape.latent)
    return pl.pallas_call(
        kernel,
        name="experts",
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        in_specs=[ExpertImages(hbm, hbm, hbm), vmem, vmem, vmem],
        out_specs=vmem,
        scratch_shapes=[cast(Any, stage.scratch())],
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
        ),
    )
