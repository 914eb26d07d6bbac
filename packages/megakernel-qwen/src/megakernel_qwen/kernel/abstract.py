"""The kernel's programs without weights, to compile them for a slice that is not there.

::

    built = AbstractModel.of(config, Topology.from_name("tpu7x:2x2x1"), rows=8, context=32768)
    compiled = built.decode().lower().compile()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from kda_mla_kernels.numerics import BF16, Numerics
from tpu_collectives import Topology

from megakernel_qwen.backend import MAX_CHUNK, cache_slots
from megakernel_qwen.config import QwenConfig
from megakernel_qwen.kernel.plan import KernelModel
from megakernel_qwen.kernel.programs import KernelPrograms
from megakernel_qwen.kernel.weights import weight_shapes
from megakernel_qwen.layout import RANKS, QwenLayout
from megakernel_qwen.xla.caches import cache_shapes
from megakernel_qwen.xla.mixers import Rank
from megakernel_qwen.xla.programs import SPLIT, WHOLE

__all__ = ["AbstractModel", "AbstractProgram"]


@dataclass(frozen=True)
class AbstractProgram:
    """A jitted function and the shapes of its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def lower(self) -> Any:
        """As ``jax.jit(...).lower``."""
        return self.function.lower(*self.arguments)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class AbstractModel:
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
        return cls(
            KernelPrograms(
                rank=Rank(layout, numerics, model.held),
                mesh=topology.mesh(RANKS),
                rows=rows,
                slots=model.slots,
                feature_layers=feature_layers,
                model=model,
                interpret=False,
            )
        )

    def decode(self, steps: int = 1) -> AbstractProgram:
        """Greedy steps of one token per row, with their commits."""
        rows = self.programs.rows
        ids = self._whole(jnp.int32, rows)
        live = self._whole(jnp.bool_, rows)
        program = self.programs.greedy_step if steps == 1 else self.programs.greedy_steps(steps)
        return AbstractProgram(program, (self.weights, self.caches, ids, ids, live))

    def verify(self, tokens: int) -> AbstractProgram:
        """A step of ``rows / tokens`` sequences of so many tokens."""
        sequences = self.programs.rows // tokens
        of_each = self._whole(jnp.int32, sequences)
        ids = self._whole(jnp.int32, sequences, tokens)
        return AbstractProgram(
            self.programs.verify_step, (self.weights, self.caches, of_each, ids, of_each)
        )

    def prefill(self, tokens: int = MAX_CHUNK) -> AbstractProgram:
        """A chunk of one row's prompt."""
        one = self._whole(jnp.int32)
        ids = self._whole(jnp.int32, tokens)
        return AbstractProgram(
            self.programs.prefill, (self.weights, self.caches, one, ids, one, one)
        )

    @property
    def weights(self) -> Any:
        """Shapes of the weights of all ranks."""
        return self._split(weight_shapes(self.programs.model.layout, self.programs.model.held))

    @property
    def caches(self) -> Any:
        """Shapes of the state of all ranks."""
        programs = self.programs
        layout, held = programs.model.layout, programs.model.held
        return self._split(cache_shapes(layout, programs.rows, programs.slots, held))

    def _split(self, shapes: Any) -> Any:
        mesh = self.programs.mesh
        sharding = NamedSharding(mesh, SPLIT)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=sharding),
            shapes,
        )

    def _whole(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.programs.mesh, WHOLE))
