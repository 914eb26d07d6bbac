"""Greedy decoding as a user of the library would write it: ``python decode_by_hand.py TEXT N``."""

import sys

import numpy as np
from megakernel_qwen import package

ROWS = 4


def main(text: str, count: int) -> None:
    """Prints the text and its continuation."""
    model = package.load(package.embedded_checkpoint(), max_rows=ROWS, max_context=512)
    ids = model.tokenizer.encode(text).ids
    logits, _, state = model.prefill(model.init_state(), 0, ids, 0)
    row = np.arange(ROWS) == 0
    chosen = [int(np.argmax(logits))]
    while len(chosen) < count and chosen[-1] not in model.generation.stop_ids:
        position = len(ids) + len(chosen) - 1
        token = np.where(row, chosen[-1], 0)
        tokens, _, state = model.decode(state, token, np.where(row, position, 0), row)
        chosen.append(int(tokens[0]))
    sys.stdout.buffer.write((text + model.tokenizer.decode(chosen)).encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
