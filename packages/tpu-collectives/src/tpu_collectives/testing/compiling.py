"""How XLA compiles programs for CPU that run a few times only."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["quick_options"]


def quick_options(*, same_bits: bool = False) -> dict[str, Any]:
    """``compiler_options`` for `jax.jit` that compile in a fraction of the time and run slower.

    Interpreted kernels are large programs, and tests run each of them a few times: compiling them
    well takes longer than that gains.

    Args:
        same_bits: a row keeps its bits whatever the shape around it. Otherwise a product may fuse
            into a sum in one shape and not in another, and compiling takes half the time again
            before jax 0.11, whose XLA has nothing else to emit loops with.
    """
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    if not same_bits and jax.__version_info__ < (0, 11):
        options["xla_cpu_use_fusion_emitters"] = False
    return options
