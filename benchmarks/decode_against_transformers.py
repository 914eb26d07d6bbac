"""Decode speed of the XLA backend and of transformers: one checkpoint, CPU, default threads.

Both generate greedily from the same prompt with a cache; runs alternate, and the median is
reported. Compilation (ours) and warm-up (theirs) are timed apart. torch and transformers are not
dependencies of this project; install them beside it to run this::

    python benchmarks/decode_against_transformers.py CHECKPOINT [--numerics f32 bf16] [--batch 1 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from megakernel_qwen import package

Run = Callable[[], float]
"""Generates once and returns the seconds of the decode steps."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    checkpoint: Path
    numerics: str
    batch: int
    prompt: list[int]
    tokens: int


def ours(case: Case) -> tuple[Run, float]:
    """Our runner and the seconds of its first, compiling run."""
    model = package.load(case.checkpoint, numerics=case.numerics, max_rows=case.batch)

    def run() -> float:
        state = model.init_state()
        for row in range(case.batch):
            state = model.prefill(state, row, case.prompt, 0).state
        jax.block_until_ready(state)
        tokens = [case.prompt[-1]] * case.batch
        start = time.perf_counter()
        for step in range(case.tokens):
            positions = [len(case.prompt) + step] * case.batch
            out = model.decode(state, tokens, positions, [True] * case.batch)
            state, tokens = out.state, np.asarray(out.tokens).tolist()
        return time.perf_counter() - start

    start = time.perf_counter()
    run()
    return run, time.perf_counter() - start


def theirs(case: Case) -> tuple[Run, float]:
    """The runner on transformers and the seconds of its first run."""
    import torch
    from transformers import AutoConfig, Qwen3_5ForConditionalGeneration

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[case.numerics]
    config = AutoConfig.from_pretrained(case.checkpoint)
    loader: Any = Qwen3_5ForConditionalGeneration
    model = loader.from_pretrained(case.checkpoint, config=config, dtype=dtype).eval()

    @torch.inference_mode()
    def run() -> float:
        ids = torch.tensor([case.prompt] * case.batch)
        out = model(input_ids=ids, use_cache=True)
        tokens = ids[:, -1:]
        start = time.perf_counter()
        for _ in range(case.tokens):
            out = model(input_ids=tokens, past_key_values=out.past_key_values, use_cache=True)
            tokens = out.logits[:, -1:].argmax(-1)
        return time.perf_counter() - start

    start = time.perf_counter()
    run()
    return run, time.perf_counter() - start


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Medians of alternating runs, in milliseconds per step."""
    runners = {"ours": ours(case), "transformers": theirs(case)}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, (run, _) in runners.items():
            seconds[name].append(run())
    step = {name: statistics.median(times) / case.tokens * 1e3 for name, times in seconds.items()}
    return {
        "numerics": case.numerics,
        "batch": case.batch,
        **{f"{name}_ms_per_step": round(value, 3) for name, value in step.items()},
        **{f"{name}_first_run_s": round(first, 2) for name, (_, first) in runners.items()},
        "ratio": round(step["transformers"] / step["ours"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--numerics", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    prompt = np.random.default_rng(0).integers(0, 500, args.prompt_tokens).tolist()
    for numerics in args.numerics:
        for batch in args.batch:
            case = Case(args.checkpoint, numerics, batch, prompt, args.tokens)
            print(json.dumps(measure(case, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
