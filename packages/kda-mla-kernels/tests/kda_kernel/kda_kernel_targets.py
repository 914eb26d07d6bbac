"""The stage and the commit at the sizes of Kimi K3, for compiling only."""

import sys
from pathlib import Path

# A process that compiles knows this folder alone.
sys.path.append(str(Path(__file__).parents[1] / "delta_kernel"))

from delta_kernel_targets import targets
from kda_kernel_harness import Net
from kda_mla_kernels.kda.kernel import KdaShape
from kda_mla_kernels.numerics import BF16

SIZES = ((1, 1), (8, 1), (16, 1), (1, 8))


def net(heads, slots, together):
    """Layers of that many heads of 128."""
    shape = KdaShape(heads, heads, key_dim=128, value_dim=128, taps=4, tail_padding=1)
    return Net(shape, BF16, layers=3, rows=16, slots=slots, together=together)


NETS = {"of32": net(3, slots=16, together=2), "of8": net(12, slots=2, together=1)}
"""A rank of 32, with all states at hand, and one of 8, with two at a time."""

globals().update(targets(NETS, SIZES))
