"""A model of four layers, compiled once: bytes against the plan, phases, cycles, the command."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from vmem_pool.aot.report import ENVIRONMENT

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]
ROOT = Path(__file__).resolve().parents[3]
CONFIG = {
    "model_type": "qwen3_5",
    "text_config": {
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "vocab_size": 8192,
    },
}
LAYERS, LINEAR = 4, 3


@pytest.fixture(scope="module")
def compiled():
    from benchmarks.accounting.cases import Case
    from benchmarks.accounting.compiled import compile_case

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        return compile_case(Case(1, 1, 300, 1, 1024, "tpu7x:2x2x1", CONFIG))


@pytest.fixture(scope="module")
def account(compiled):
    from benchmarks.accounting.account import account

    return account(compiled)


def test_the_stream_is_read_once_and_taken_in_order(compiled, account):
    stream = compiled.model.programs.model.stream
    assert account.stream_bytes == stream.bytes
    taken = [
        step.event.semaphore.at[0]
        for step in compiled.kernels[0].program.steps
        if step.kind == "weights" and step.event.op == "dma_wait"
    ]
    assert taken == [slot % stream.depth for slot in range(stream.num_slots)]


def test_state_is_read_by_the_step_and_read_and_written_by_the_commit(compiled, account):
    shape = compiled.model.programs.model.gdn_shape
    states = shape.value_heads * shape.key_dim * shape.value_dim * 4
    step, commit = account.simulated
    # Convolution tails come on top; of a model as small as this they may stand in VMEM.
    assert LINEAR * states <= step.bytes["state"] < 1.1 * LINEAR * states
    assert 2 * LINEAR * states <= commit.bytes["state"] < 2.2 * LINEAR * states


def test_phases_are_a_barrier_one_embedding_two_a_layer_and_the_arg_max(account):
    assert account.phases == 1 + 1 + 2 * LAYERS + 1
    assert account.phases_per_layer == 2


def test_products_are_known_by_the_matrices_in_their_slots(compiled, account):
    stream = compiled.model.programs.model.stream
    stages = [stage for stage in account.cycles if stage.startswith("product ")]
    for name, segment in stream.segments.items():
        named = "+".join(s.partition(f"{name}.")[2] for s in stages if f" {name}." in s)
        assert {matrix.name for matrix in segment.matrices} == set(named.split("+"))


def test_the_way_through_the_schedule_stays_within_the_longest_path_of_its_loops(compiled):
    step = compiled.kernels[0]
    cycles = sum(s.cycles for s in step.program.steps)
    (layers,) = [loop for loop in step.report.root.children if loop.source.startswith("step.py")]
    low, high = layers.cycles
    outside = step.report.root.cycles[1] - high
    assert LAYERS * low < cycles < outside + LAYERS * high


def test_a_step_takes_longer_than_its_bytes_and_than_its_work(account):
    assert account.total_us > account.floor_us
    assert account.total_us > account.core_us
    waited = sum(account.waited_us.values())
    assert account.total_us == pytest.approx(account.core_us + waited)


def test_layers_of_one_kind_cost_the_same_each_time(compiled):
    """From one product with the gate to the next: two linear layers follow each other."""
    steps = compiled.kernels[0].program.steps
    sent = [n for n, s in enumerate(steps) if s.event and s.event.device is not None]
    per_layer = Counter()
    for number, step in enumerate(steps):
        layer = sum(at <= number for at in sent) // 14  # two all-reduces to seven peers
        per_layer[layer] += step.cycles
    assert per_layer[1] == pytest.approx(per_layer[2], rel=0.02)


def test_an_account_is_plain_data(account):
    stored = json.loads(json.dumps(account.to_json()))
    assert stored["static_bytes"] == account.static_bytes
    assert stored["total_us"] == pytest.approx(sum(account.step_us))
    assert sum(stored["cycles"].values()) == sum(account.cycles.values())


def test_a_cache_takes_the_bytes_of_its_context(compiled, account):
    config = compiled.model.programs.model.layout.config
    heads, positions = 1, compiled.case.context
    assert account.held_cache_bytes == 2 * heads * positions * config.head_dim * 2


def test_a_timeline_is_drawn(account, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.accounting.timeline import save_timeline

    step = account.simulated[0]
    save_timeline(step, tmp_path / "step.png", account.title, (0.0, step.us))
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_bytes_and_the_models_error_as_json(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "benchmarks.accounting", "--rows", "--verify"]
    done = subprocess.run(
        [*command, "--config", str(config), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["accounts"] == []
    assert {check["name"] for check in found["reference"]} == {
        "Qwen round of 8 rows",
        "Kimi K3 step of 1 row",
    }
