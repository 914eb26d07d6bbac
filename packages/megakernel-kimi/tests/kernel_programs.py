"""Programs of the kernel at full size on 32 ranks, for the compiler alone."""

from megakernel_kimi.kernel.abstract import AbstractModel
from megakernel_kimi.presets import kimi_k3
from tpu_collectives import Topology

CONTEXT = 32768
FEATURE_LAYERS = (24, 48, 72)


def model(topology, rows, feature_layers=()):
    ordered = Topology.from_devices(topology.devices)
    return AbstractModel.of(
        kimi_k3(), ordered, rows=rows, context=CONTEXT, feature_layers=feature_layers
    )


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
    return parts(model(topology, 8, FEATURE_LAYERS).verify(8))
