"""Functions in a process of their own, for kernels that may wait for ever.

Run as ``python -m tpu_collectives.testing.isolated TARGET RANKS ARGUMENTS``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tpu_collectives.testing.virtual import virtual_devices

__all__ = ["Outcome", "Status", "run_isolated"]

Status: TypeAlias = Literal["passed", "failed", "hung"]
_SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    # The TPU compiler works without a TPU, in several processes at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
}


@dataclass(frozen=True)
class Outcome:
    """How a process ended, and everything that it printed."""

    status: Status
    output: str


def run_isolated(target: str, ranks: int, timeout_s: float, **arguments: Any) -> Outcome:
    """Call a function in a new process with virtual CPU devices, and stop it after a while.

    Args:
        target: ``package.module:function`` or ``path/to/file.py:function``.
        ranks: virtual CPU devices.
        timeout_s: seconds after which the process counts as hung and is killed.
        arguments: keyword arguments that JSON can carry.
    """
    command = [sys.executable, "-m", __name__, target, str(ranks), json.dumps(arguments)]
    environment = {**os.environ, **_SETTINGS}
    try:
        done = subprocess.run(
            command,
            env=environment,
            timeout=timeout_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return Outcome("hung", text)
    return Outcome("passed" if done.returncode == 0 else "failed", done.stdout)


def _resolve(target: str) -> Callable[..., Any]:
    where, _, name = target.rpartition(":")
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), name)
    path = Path(where)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _main() -> None:
    target, ranks, arguments = sys.argv[1:]
    virtual_devices(int(ranks))
    _resolve(target)(**json.loads(arguments))


if __name__ == "__main__":
    _main()
