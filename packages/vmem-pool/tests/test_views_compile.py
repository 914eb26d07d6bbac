"""Views compile for TPU v7, without one. Their values are checked in the interpreters only."""

from pathlib import Path

import pytest
from vmem_pool import aot


@pytest.mark.tpu_compile
def test_kernels_of_views_compile():
    found = aot.report(f"{Path(__file__).with_name('view_kernels.py')}:build")
    names = {kernel.name.partition(".")[0] for kernel in found.kernels}
    dtypes = ("float32", "bfloat16", "float8_e4m3fn", "uint8", "int4")
    assert names == {f"views_{dtype}" for dtype in dtypes}
    assert found.custom_calls == len(dtypes)
    assert all(kernel.spills == 0 for kernel in found.kernels)
