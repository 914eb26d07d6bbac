"""The golden checkpoint on the kernel backend, shared by the tests of a process."""

from dataclasses import fields, replace
from functools import cache
from typing import ClassVar

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from megakernel_kimi.kernel.programs import KernelPrograms


class HurriedPrograms(KernelPrograms):
    """Programs that compile in half the time again; their bits depend on how many rows there are.

    Later lines of jax have nothing else to emit loops with.
    """

    compiler_options: ClassVar = {
        **KernelPrograms.compiler_options,
        **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),
    }


@pytest.fixture(scope="session")
def load_kernel(load_tiny):
    """Loads the golden checkpoint for the kernel; equal arguments give the same model.

    One rank too goes through the interpreter that simulates memory and transfers: its programs
    compile in half the time.
    """

    @cache
    def load(ranks=1, exact_bits=False, **options):
        options = {"max_rows": 8, "max_context": 128, **options}
        model = load_tiny(ranks, backend="megakernel", **options)
        parts = {one.name: getattr(model.programs, one.name) for one in fields(model.programs)}
        kind = KernelPrograms if exact_bits else HurriedPrograms
        return replace(model, programs=kind(**{**parts, "interpret": pltpu.InterpretParams()}))

    return load
