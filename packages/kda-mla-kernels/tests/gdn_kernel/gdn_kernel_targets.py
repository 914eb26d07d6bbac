"""The stage and the commit at real sizes, for compiling only: ``build(topology)`` each."""

import re
import sys
from dataclasses import replace
from pathlib import Path

# A process that compiles knows this folder alone.
sys.path.append(str(Path(__file__).parents[1] / "delta_kernel"))

from delta_kernel_targets import commit, stage, targets
from gdn_kernel_harness import Net
from kda_mla_kernels.block import Block
from kda_mla_kernels.gdn.kernel import GdnShape
from kda_mla_kernels.numerics import BF16
from vmem_pool.aot.target import topology_of

RANK = GdnShape(key_heads=2, value_heads=6, key_dim=128, value_dim=128, taps=4, tail_padding=1)
"""A rank of eight of the 27B model."""
CORE = GdnShape(key_heads=16, value_heads=48, key_dim=128, value_dim=128, taps=4, tail_padding=1)
"""All its heads on one core."""
NETS = {"rank": Net(RANK, BF16, layers=3, rows=16), "core": Net(CORE, BF16, layers=3, rows=16)}
SHORT = replace(NETS["rank"], shape=replace(RANK, tail_padding=0))
"""With tails of W-1 rows."""

globals().update(targets(NETS, ((1, 1), (8, 1), (16, 1), (2, 4), (1, 16))))


def stage_short_tail(topology):
    return stage(topology, SHORT, Block(8, 1))


def commit_short_tail(topology):
    return commit(topology, SHORT, Block(8, 1))


def print_copies(build):
    """Prints the shapes that the compiled program copies, outside of its kernels."""
    function, arguments = globals()[build](topology_of("tpu7x:2x2x1"))
    text = function.lower(*arguments).compile().as_text()
    print("copied:", *re.findall(r"= \(?(\w+\[[\d,]*\])[^=\n]*\bcopy(?:-start)?\(", text))
