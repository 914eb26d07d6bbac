"""Programs of published models at full size, for the compiler alone."""

from family import bare
from megakernel_qwen.config import QwenConfig
from megakernel_qwen.kernel.abstract import AbstractModel
from tpu_collectives import Topology

CONTEXT = 32768
FEATURE_LAYERS = (5, 19, 33, 47, 61)


def model(size, topology, rows, ranks=8, context=CONTEXT, feature_layers=()):
    ordered = Topology.from_devices(topology.devices[:ranks])
    config = QwenConfig.from_json(bare(size))
    return AbstractModel.of(
        config, ordered, rows=rows, context=context, feature_layers=feature_layers
    )


def parts(program):
    return program.function, program.arguments


def decode_27b_1_row(topology):
    return parts(model("27B", topology, 1).decode())


def decode_27b_1_row_8_steps(topology):
    return parts(model("27B", topology, 1).decode(steps=8))


def decode_27b_8_rows(topology):
    return parts(model("27B", topology, 8).decode())


def decode_27b_16_rows(topology):
    return parts(model("27B", topology, 16).decode())


def decode_27b_2_ranks(topology):
    return parts(model("27B", topology, 8, ranks=2, context=4096).decode())


def verify_27b_8_tokens(topology):
    return parts(model("27B", topology, 8, feature_layers=FEATURE_LAYERS).verify(8))


def decode_4b_8_ranks(topology):
    return parts(model("4B", topology, 1).decode())


def decode_08b_1_rank(topology):
    return parts(model("0.8B", topology, 1, ranks=1).decode())


def prefill_27b(topology):
    return parts(model("27B", topology, 1, feature_layers=FEATURE_LAYERS).prefill(1024))
