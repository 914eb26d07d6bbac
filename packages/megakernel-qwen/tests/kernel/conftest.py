"""Models of the golden checkpoint on the kernel backend, shared by the tests of a process."""

from dataclasses import fields, replace
from functools import cache
from typing import ClassVar

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from megakernel_qwen import package
from megakernel_qwen.kernel.programs import KernelPrograms

ROWS = 8
ROUGH = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    # Off, it halves again what is left. Later lines have nothing else to emit loops with.
    ROUGH["xla_cpu_use_fusion_emitters"] = False


class QuickPrograms(KernelPrograms):
    """Programs that run a few times only: compiling them well takes longer than that gains.

    A row still has the same bits in every block, and a sum that depends on the block still shows.
    """

    compiler_options: ClassVar = {
        **KernelPrograms.compiler_options,
        "xla_backend_optimization_level": 0,
    }


class RoughPrograms(KernelPrograms):
    """Even quicker, for what holds to a tolerance: a product may or may not fuse into a sum."""

    compiler_options: ClassVar = {**KernelPrograms.compiler_options, **ROUGH}


def recompiled(model, kind):
    programs = {one.name: getattr(model.programs, one.name) for one in fields(model.programs)}
    return replace(model, programs=kind(**programs))


@pytest.fixture(scope="session")
def compiled_quickly():
    """Turns a model into one whose programs compile in a quarter of the time and run slower."""
    return lambda model: recompiled(model, RoughPrograms)


@pytest.fixture(scope="session")
def load_kernel(tiny_folder):
    """Loads the golden checkpoint for the kernel; equal arguments give the same model."""

    @cache
    def load(ranks=1, numerics="f32", max_rows=ROWS, feature_layers=(), simulated=False):
        model = package.load(
            tiny_folder,
            devices=jax.devices()[:ranks],
            backend="megakernel",
            numerics=numerics,
            max_rows=max_rows,
            max_context=256,
            feature_layers=feature_layers,
        )
        # What is rounded to bf16 depends on the last bits of f32, and those on the compilation:
        # only with the reference's options does the kernel round as the reference does.
        if numerics == "bf16":
            return model
        if not simulated:
            return recompiled(model, RoughPrograms)
        # One rank too goes through the interpreter that simulates memory and transfers.
        programs = replace(model.programs, interpret=pltpu.InterpretParams())
        return recompiled(replace(model, programs=programs), QuickPrograms)

    return load
