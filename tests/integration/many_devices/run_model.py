"""Runs a checkpoint on one and on many devices: ``python run_model.py FOLDER RANKS``."""

import sys
from pathlib import Path

import jax
import numpy as np
from megakernel_qwen import package

PROMPT, BLOCK, STEPS = [3, 99, 0, 50, 51, 7, 7, 98], [5, 80], 4


def run(folder: Path, ranks: int) -> dict[str, np.ndarray]:
    """A prompt, a verified block of which one token is accepted, and greedy steps after it."""
    devices = jax.devices()[:ranks]
    model = package.load(folder, devices=devices, max_rows=2, max_context=64)
    out = model.prefill(model.init_state(), 1, PROMPT, 0, all_logits=True)
    verified = model.verify(out.state, [1], [BLOCK], [len(PROMPT)])
    state = model.commit(verified.state, [1])
    token, position, tokens, decoded = 80, len(PROMPT) + 1, [], []
    for _ in range(STEPS):
        step = model.decode(state, [0, token], [0, position], [False, True], with_logits=True)
        state, token, position = step.state, int(step.tokens[1]), position + 1
        tokens.append(token)
        decoded.append(np.asarray(step.logits)[1])
    return {
        "logits": np.asarray(out.logits),
        "verified": np.asarray(verified.logits),
        "decoded": np.stack(decoded),
        "tokens": np.array(tokens),
    }


def main(folder: Path, ranks: int) -> None:
    """Writes ``results.npz`` into the folder."""
    jax.config.update("jax_num_cpu_devices", ranks)
    results = {}
    for name, count in (("one", 1), ("many", ranks)):
        results |= {f"{key}_{name}": value for key, value in run(folder, count).items()}
    np.savez(folder / "results.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
