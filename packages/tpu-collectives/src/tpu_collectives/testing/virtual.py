"""Virtual CPU devices on which interpreted kernels cannot starve one another."""

from __future__ import annotations

import os

from tpu_collectives.interpreter import quicken_interpreter

__all__ = ["interpreter_threads", "virtual_devices"]


def virtual_devices(count: int) -> None:
    """Give this process so many CPU devices; call it before JAX is used.

    It also asks XLA for enough threads, through the variable ``NPROC``, unless that is set. Each
    interpreted rank holds a thread while it waits for others, and copies of buffers over 100 KiB
    need threads of their own: with one per core, jax 0.10 waits for ever. And it calls
    :func:`~tpu_collectives.interpreter.quicken_interpreter`.

    Raises:
        RuntimeError: JAX has been used already.
    """
    import jax

    jax.config.update("jax_num_cpu_devices", count)
    quicken_interpreter()
    os.environ.setdefault("NPROC", str(interpreter_threads(count)))


def interpreter_threads(count: int) -> int:
    """Threads that so many interpreted ranks need: 64 were enough for up to 32."""
    return max(64, 2 * count)
