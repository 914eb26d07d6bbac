"""A model's programs without weights, to compile them for a slice that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kda_mla_kernels.backend.options import MAX_CHUNK
from kda_mla_kernels.backend.programs import Programs
from kda_mla_kernels.backend.ranks import SPLIT, WHOLE

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
    """A model of this shape on a topology's compile-only devices."""

    programs: Programs
    weight_shapes: Any
    """of one rank, a pytree of ``jax.ShapeDtypeStruct``"""

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
            self._verify_program, (self.weights, self.caches, of_each, ids, of_each)
        )

    @property
    def _verify_program(self) -> Callable[..., Any]:
        return self.programs.verify

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
        return self._split(self.weight_shapes)

    @property
    def caches(self) -> Any:
        """Shapes of the state of all ranks."""
        return self._split(self.programs.cache_shapes())

    def _split(self, shapes: Any) -> Any:
        mesh = self.programs.mesh
        sharding = NamedSharding(mesh, SPLIT)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=sharding),
            shapes,
        )

    def _whole(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.programs.mesh, WHOLE))
