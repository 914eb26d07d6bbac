"""Which way to hold cached positions is taken: the cheapest that leaves room for the ring."""

import pytest
from kda_mla_kernels.backend import LoadOptions
from kda_mla_kernels.errors import ConfigError
from kda_mla_kernels.numerics import BF16
from megakernel_kimi.holders import holders_by_cost
from megakernel_kimi.kernel.fitting import fitting_model
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.presets import kimi_k3
from tpu_collectives import Topology

K3, SLICE = kimi_k3(), Topology.from_name("tpu7x:2x2x4")
LONG = 1 << 20


def holders(rows, context, choices):
    layouts = [KimiLayout.of(K3, 32, lanes=8, holders=choice) for choice in choices]
    options = LoadOptions(BF16, rows, context, ())
    return fitting_model(layouts, options, "mxfp4", SLICE).layout.holders


def test_the_first_that_fits_is_taken():
    assert holders(1, LONG, holders_by_cost(K3, 32, 8, 1, LONG)) == 32
    choices = holders_by_cost(K3, 32, 8, 16, LONG)
    assert choices[0] == 32
    assert holders(16, LONG, choices) == 8  # what 32 ranks find would not fit beside the ring
    assert holders(8, 4096, holders_by_cost(K3, 32, 8, 8, 4096)) == 1


def test_where_none_fits_the_message_is_that_of_the_first():
    with pytest.raises(ConfigError, match=r"of VMEM for the weight stream.*shares\.1\.receive"):
        holders(16, LONG, [32])
