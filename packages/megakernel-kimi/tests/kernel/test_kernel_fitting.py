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


def by_cost(rows, context):
    return holders_by_cost(K3, ranks=32, lanes=8, rows=rows, context=context)


def test_the_first_that_fits_is_taken():
    assert holders(1, LONG, by_cost(1, LONG)) == 32
    assert by_cost(16, LONG)[0] == 32
    assert holders(16, LONG, by_cost(16, LONG)) == 8  # what 32 ranks find does not fit
    assert holders(8, 4096, by_cost(8, 4096)) == 1


@pytest.mark.parametrize("rows", [8, 16])
def test_where_none_fits_the_message_is_that_of_the_first(rows):
    """Eight rows of one token would fit on 32 holders, a verified block of eight does not."""
    match = r"of VMEM for the weight stream.*spilled .*; or take fewer holders than 32$"
    with pytest.raises(ConfigError, match=match):
        holders(rows, LONG, [32])


def test_holders_are_blamed_only_where_fewer_would_help():
    with pytest.raises(
        ConfigError, match="takes at most 16 rows, not 17; take fewer, or back"
    ) as no:
        holders(17, 4096, [8])
    assert "holders" not in str(no.value)
