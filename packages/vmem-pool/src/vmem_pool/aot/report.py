"""Compiles a target for a TPU that is not there, and reads back what the compiler made of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vmem_pool.aot.inventory import Inventory
from vmem_pool.aot.kernels import KernelReport, read_kernels
from vmem_pool.aot.machine import HBM_BYTES_PER_CYCLE
from vmem_pool.aot.target import Target, spell

__all__ = ["CompileError", "Options", "Report", "report"]

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    # These two only keep the log quiet and need not match the topology.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "tpu7x-32",
    # Without it two processes that compile at once collide on a lock file.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
PASSES = ".*(packed-bundles-post-ra|final_bundles|utilization|post-delay-converter).*"
FLAGS = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
    " --xla_mosaic_enable_llo_source_annotations=true"
    " --xla_jf_dump_llo_pass_label_regex=" + PASSES
)


class CompileError(RuntimeError):
    """The target does not compile; the message is the compiler's."""


@dataclass(frozen=True)
class Options:
    """How to compile and count.

    Attributes:
        trips: lengths of loops that the compiler does not know, by name ("L0", in program order).
        axis_index: the device whose transfers are counted, by mesh axis; others count as a range.
        keep: folder for the compiler's dumps, instead of a temporary one.
        timeout: seconds.
    """

    trips: Mapping[str, int] = field(default_factory=dict)
    axis_index: Mapping[str, int] = field(default_factory=dict)
    keep: str | Path | None = None
    timeout: float = 500.0


@dataclass(frozen=True)
class Report:
    """One compilation.

    Attributes:
        topology: what it was compiled for.
        compile_seconds: lowering excluded.
        memory: XLA's figures for the program, in bytes.
        custom_calls: Pallas kernels that the program calls, in its text.
        copies: copies outside of kernels; an aliased operand of a communicating kernel has two.
        inventory: transfers and semaphore operations, from the jaxpr.
        kernels: one entry per distinct Pallas kernel.
    """

    topology: str
    compile_seconds: float
    memory: Mapping[str, int]
    custom_calls: int
    copies: int
    inventory: Inventory
    kernels: tuple[KernelReport, ...]

    @property
    def hbm_floor_cycles(self) -> float:
        """Cycles that the kernels' reads from HBM take at the sustained bandwidth, at most."""
        read = self.inventory.total("dma_start", "hbm->")[1]
        read += self.inventory.total("dma_start", "any->")[1]
        return read / HBM_BYTES_PER_CYCLE


def report(target: Target, topology: str = "tpu7x:2x2x1", options: Options | None = None) -> Report:
    """Compiles ``target`` in a process of its own with the real TPU compiler.

    Args:
        target: ``build(topology) -> (jitted function, arguments)`` at the top of a file, or its
            name as "FILE.py:build" or "module:build". Arguments are ``ShapeDtypeStruct`` with
            shardings on ``topology.devices``.
        topology: e.g. "tpu7x:2x2x1", which has 8 devices.
        options: see :class:`Options`.

    Raises:
        CompileError: libtpu is missing, or the target fails to trace, lower or compile.
        ValueError: a target that cannot be found by name.
        subprocess.TimeoutExpired: the time is over.
    """
    chosen = options or Options()
    if importlib.util.find_spec("libtpu") is None:
        raise CompileError("compiling for a TPU needs libtpu: pip install 'vmem-pool[tpu]'")
    request = {"target": spell(target), "topology": topology, "axes": dict(chosen.axis_index)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(chosen.keep or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {FLAGS.format(folder)}".strip()
        done = subprocess.run(
            [sys.executable, "-m", "vmem_pool.aot.child", json.dumps(request)],
            env=os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": flags},
            capture_output=True,
            text=True,
            timeout=chosen.timeout,
        )
        last = done.stdout.strip().rpartition("\n")[2]
        answer = json.loads(last) if last.startswith("{") else {}
        if "compile_seconds" not in answer:
            raise CompileError(answer.get("error") or done.stdout[-2000:] + done.stderr[-4000:])
        answer["inventory"] = Inventory.from_json(answer["inventory"])
        return Report(topology=topology, kernels=read_kernels(folder, chosen.trips), **answer)
