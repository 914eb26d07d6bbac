"""Compiles a program of the published model for 32 ranks: ``python compiled_programs.py NAME``.

Prints the compiler's memory figures of one rank as JSON. A process of its own, without the options
that tests set for programs on a CPU.
"""

import json
import sys

import jax
from megakernel_kimi.presets import kimi_k3
from megakernel_kimi.xla.abstract import abstract_model
from tpu_collectives import Topology

CONTEXT, ROWS = 32768, 8
FEATURE_LAYERS = (24, 48, 72)
FIGURES = ("argument", "alias", "temp", "generated_code")


def compiled(name):
    jax.config.update("jax_platforms", "cpu")
    topology = Topology.from_name("tpu7x:2x2x4")
    built = abstract_model(
        kimi_k3(), topology, rows=ROWS, context=CONTEXT, feature_layers=FEATURE_LAYERS
    )
    program = built.prefill(1024) if name == "prefill" else built.decode()
    return program.lower().compile()


if __name__ == "__main__":
    memory = compiled(sys.argv[1]).memory_analysis()
    print(json.dumps({name: getattr(memory, f"{name}_size_in_bytes") for name in FIGURES}))
