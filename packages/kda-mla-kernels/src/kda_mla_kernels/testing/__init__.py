"""Helpers for the tests of model packages."""

from kda_mla_kernels.testing.recompiled import recompiled
from kda_mla_kernels.testing.sequence import Sequence

__all__ = ["Sequence", "recompiled"]
