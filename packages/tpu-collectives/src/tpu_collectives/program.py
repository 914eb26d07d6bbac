"""A kernel with its ranks: interpreted with race detection, compiled for a slice, or run on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

from tpu_collectives.barrier import Barrier
from tpu_collectives.errors import ExchangeError
from tpu_collectives.topology import Topology
from tpu_collectives.watch import Watched, simulator, watch

__all__ = ["Collective", "RankProgram", "Run", "repeated", "wide_range"]

Run = Watched[tuple[np.ndarray, ...]]
"""What an interpreted kernel gave: one [ranks, ...] array per output, and its faults."""


@dataclass(frozen=True)
class RankProgram:
    """One kernel on every rank of a topology.

    The kernel is called as by ``pallas_call``: refs of the inputs, of the outputs, of the scratch.
    It signals and waits at a :class:`~tpu_collectives.Barrier`, so it gets a ``collective_id``.

    Args:
        kernel: the kernel.
        topology: its ranks; the mesh axis is called ``ranks``.
        outputs: shape and dtype of each output on one rank.
        scratch: entries of ``scratch_shapes``.
        options: further arguments of ``pallas_call``, e.g. ``in_specs``.
    """

    kernel: Callable[..., None]
    topology: Topology
    outputs: Sequence[jax.ShapeDtypeStruct]
    scratch: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def function(self, interpret: Any = False) -> Any:
        """A jitted function of [ranks, ...] arrays, each rank's part on its own device."""
        options = {"compiler_params": Barrier(self.topology).compiler_params(0), **self.options}
        call = pl.pallas_call(
            self.kernel,
            out_shape=tuple(self.outputs),
            scratch_shapes=tuple(self.scratch),
            interpret=interpret,
            **options,
        )

        def on_rank(*parts: jax.Array) -> Any:
            results = call(*(part[0] for part in parts))
            return jax.tree.map(lambda result: result[None], results)

        spec = PartitionSpec("ranks")
        mapped = jax.shard_map(
            on_rank, mesh=self.topology.mesh(), in_specs=spec, out_specs=spec, check_vma=False
        )
        return jax.jit(mapped)

    def interpret(
        self,
        *inputs: Any,
        dma: Literal["on_wait", "eager"] = "on_wait",
        detect_races: bool = True,
    ) -> Run:
        """Run on virtual CPU devices. A missing send or signal hangs: see :func:`run_isolated`.

        Args:
            inputs: [ranks, ...] arrays.
            dma: copy as late as a wait allows, so that early reads see NaN, or at once, so that a
                copy that nobody waits for leaves its semaphore behind.
            detect_races: order all accesses.
        """
        function = self.function(simulator(dma, detect_races))
        found = watch(lambda: function(*map(np.asarray, inputs)))
        outputs = tuple(np.asarray(output) for output in found.result)
        return Watched(outputs, detect_races and found.raced, found.leftovers, found.log)

    def check(self, *inputs: Any) -> tuple[np.ndarray, ...]:
        """Outputs of a run without faults in either DMA mode, which must agree.

        Raises:
            ExchangeError: a race, semaphores that are not zero, or outputs that depend on when
                copies happen.
        """
        late = self.interpret(*inputs, dma="on_wait").check()
        early = self.interpret(*inputs, dma="eager").check()
        for a, b in zip(late, early):
            if a.tobytes() != b.tobytes():
                raise ExchangeError("outputs depend on when copies happen")
        return late

    def compile(self, *inputs: jax.ShapeDtypeStruct) -> Any:
        """Compile for the topology's devices, which need not exist (see ``Topology.from_name``).

        Args:
            inputs: shape and dtype of each input on one rank.
        """
        sharding = NamedSharding(self.topology.mesh(), PartitionSpec("ranks"))
        stacked = [
            jax.ShapeDtypeStruct((self.topology.ranks, *x.shape), x.dtype, sharding=sharding)
            for x in inputs
        ]
        return self.function().lower(*stacked).compile()


class Collective(Protocol):
    """What :func:`repeated` needs; all collectives of one input and one output are such."""

    @property
    def topology(self) -> Topology: ...
    @property
    def input(self) -> jax.ShapeDtypeStruct: ...
    @property
    def output(self) -> jax.ShapeDtypeStruct: ...
    def scratch(self) -> Any: ...
    def start(self, refs: Any, x: jax.Array, phase: Any) -> Any: ...
    def finish(self, handle: Any) -> jax.Array: ...


def repeated(collective: Collective, uses: int, closing_barrier: bool = False) -> RankProgram:
    """A program that takes [uses, *input] and uses a collective once for each of them.

    Args:
        collective: its mesh axis must be called ``ranks``.
        uses: number of uses, one after another, in a loop.
        closing_barrier: end with a barrier, as collectives within groups need it.
    """
    barrier = Barrier(collective.topology)

    def kernel(x_ref: Any, out_ref: Any, refs: Any) -> None:
        barrier.signal()
        barrier.wait()

        @pl.loop(0, uses)
        def _(use: jax.Array) -> None:
            out_ref[use] = collective.finish(collective.start(refs, x_ref[use], use))

        if closing_barrier:
            barrier.signal()
            barrier.wait()

    result = collective.output
    out = jax.ShapeDtypeStruct((uses, *result.shape), result.dtype)
    return RankProgram(kernel, collective.topology, (out,), (collective.scratch(),))


def wide_range(shape: tuple[int, ...], seed: int = 0, exponents: int = 8) -> np.ndarray:
    """Normal f32 numbers times 2^U(-exponents, exponents).

    Sums in another order then differ in many elements; those of plain normal numbers hardly do.
    """
    random = np.random.default_rng(seed)
    scale = np.exp2(random.uniform(-exponents, exponents, shape))
    return (random.standard_normal(shape) * scale).astype(np.float32)
