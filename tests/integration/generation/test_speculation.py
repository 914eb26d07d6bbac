"""Speculative decoding with the real model: drafts change the number of steps, never the tokens.

Text of the embedded model never repeats itself, so there would be nothing to look up. Its circular
variant has all its layers, turned low, and a head that prefers the next token of a circle.
"""

import json
import shutil

import jax
import numpy as np
import pytest
from kda_mla_kernels.checkpoint import open_checkpoint
from kda_mla_kernels.sampling import Sampling, SamplingParams, sample
from kda_mla_kernels.testing import recompiled
from megakernel_qwen import package
from safetensors.numpy import save_file
from spec_dspark import PromptLookup, Request, generate
from tpu_collectives.testing import quick_options

CIRCLE = 8
OUTPUTS = ("linear_attn.out_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")
COUNT = 40


@pytest.fixture(scope="module")
def model(embedded, tmp_path_factory):
    """The circular variant: token i is mostly followed by i + 1, the last of 8 by the first."""
    folder = tmp_path_factory.mktemp("circular") / "checkpoint"
    shutil.copytree(embedded, folder)
    checkpoint = open_checkpoint(embedded)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    for name in tensors:
        if name.endswith(OUTPUTS):
            tensors[name] = (tensors[name].astype(np.float32) / 16).astype(tensors[name].dtype)
    table = tensors["model.language_model.embed_tokens.weight"]
    circles = table.reshape(-1, CIRCLE, table.shape[1])
    tensors["lm_head.weight"] = np.roll(circles, 1, axis=1).reshape(table.shape)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = package.load(folder, devices=jax.devices()[:1], max_rows=4, max_context=128)
    return recompiled(loaded, quick_options(same_bits=True))


def decode_plainly(model, prompt, params, row=2):
    """One token a step, without drafts."""
    sampling = Sampling.of([params] * model.info.max_rows)
    active = np.arange(model.info.max_rows) == row
    logits, _, state = model.prefill(model.init_state(), row, prompt, 0)
    first = sample(logits[None], Sampling.of([params]), np.array([len(prompt)], np.int32))
    chosen = [int(first[0])]
    while len(chosen) < COUNT:
        tokens = np.where(active, chosen[-1], 0)
        positions = np.where(active, len(prompt) + len(chosen) - 1, 0)
        stepped = model.decode(state, tokens, positions, active, sampling)
        state = stepped.state
        chosen.append(int(stepped.tokens[row]))
    return tuple(chosen)


def speculate(model, prompt, params):
    request = Request(prompt, COUNT, params)
    return generate(model, model.init_state(), PromptLookup(max_drafts=3), request, row=1)[0]


REPETITIVE = tuple(range(160, 168)) * 3


def test_greedy_tokens_are_those_of_plain_decoding_in_fewer_steps(model):
    plain = decode_plainly(model, REPETITIVE, SamplingParams())
    found = speculate(model, REPETITIVE, SamplingParams())
    assert found.tokens == plain
    assert len(set(plain)) == CIRCLE
    assert 0 < found.accepted <= found.drafted
    assert found.rounds < COUNT / 2
    assert found.tokens_per_round > 2


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_sampled_tokens_are_those_of_plain_decoding_with_the_same_seed(model, seed):
    params = SamplingParams(temperature=1.8, top_p=0.99, seed=seed)
    plain = decode_plainly(model, REPETITIVE, params)
    found = speculate(model, REPETITIVE, params)
    assert found.tokens == plain
    assert len(set(plain)) > CIRCLE  # chance left the circle
    assert 0 < found.accepted < found.drafted  # and some drafts were refused


def test_a_prompt_without_repetition_costs_nothing_but_steps(model):
    prompt = (3, 500, 77, 1201)
    found = speculate(model, prompt, SamplingParams())
    assert found.tokens == decode_plainly(model, prompt, SamplingParams())
