"""Programs of the kernel at full size on 32 ranks, for the compiler alone."""

from megakernel_kimi.kernel.abstract import AbstractModel
from megakernel_kimi.presets import kimi_k3
from tpu_collectives import Topology

CONTEXT, LONG = 32768, 1 << 20
FEATURE_LAYERS = (24, 48, 72)


def model(topology, rows, context=CONTEXT, **options):
    ordered = Topology.from_devices(topology.devices)
    return AbstractModel.of(kimi_k3(), ordered, rows=rows, context=context, **options)


def parts(program):
    return program.function, program.arguments


def decode_1_row(topology):
    return parts(model(topology, 1).decode())


def decode_1_row_8_steps(topology):
    return parts(model(topology, 1).decode(steps=8))


def decode_8_rows(topology):
    return parts(model(topology, 8).decode())


def decode_16_rows(topology):
    return parts(model(topology, 16).decode())


def verify_8_tokens(topology):
    return parts(model(topology, 8, feature_layers=FEATURE_LAYERS).verify(8))


def decode_8_rows_of_a_million_on_8_holders(topology):
    return parts(model(topology, 8, LONG, holders=8).decode())


def decode_8_rows_of_a_million_on_32_holders(topology):
    return parts(model(topology, 8, LONG, holders=32).decode())


def verify_8_tokens_of_a_million_on_8_holders(topology):
    return parts(model(topology, 8, LONG, feature_layers=FEATURE_LAYERS, holders=8).verify(8))
