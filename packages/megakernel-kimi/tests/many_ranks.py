"""A checkpoint in the decode kernel on many ranks and in the reference.

``python many_ranks.py FOLDER RANKS HOLDERS`` writes ``results.npz`` into the folder: logits of a
block of tokens that is verified, of the step after its commit, and of the reference for all of
them.
"""

import sys
from pathlib import Path

from tpu_collectives.testing import quick_options, virtual_devices

TOKENS = [5, 99, 0, 301]
ROW, CONTEXT = 1, 128


def main(folder: Path, ranks: int, holders: int) -> None:
    virtual_devices(ranks)
    # Only now: the devices are counted on the first use of jax.
    import jax
    import numpy as np
    from kda_mla_kernels.checkpoint import open_checkpoint
    from kda_mla_kernels.numerics import F32
    from kda_mla_kernels.testing import recompiled
    from megakernel_kimi import package, reference
    from megakernel_kimi.checkpoint import read_tensors
    from megakernel_kimi.config import KimiConfig

    loaded = package.load(
        folder,
        backend="megakernel",
        devices=jax.devices(),
        max_rows=4,
        max_context=CONTEXT,
        holders=holders,
    )
    model = recompiled(loaded, quick_options(same_bits=True))  # each program runs once
    *block, last = TOKENS
    verified = model.verify(model.init_state(), [ROW], [block], [0])
    state = model.commit(verified.state, [len(block)])
    following = model.verify(state, [ROW], [[last]], [len(block)])
    checkpoint = open_checkpoint(folder)
    config = KimiConfig.from_dict(checkpoint.config)
    tensors = read_tensors(checkpoint, config)
    expected, _ = reference.forward(config, F32, tensors, np.array(TOKENS))
    np.savez(
        folder / "results.npz",
        kernel=np.concatenate([np.asarray(x.logits)[0] for x in (verified, following)]),
        reference=np.asarray(expected),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
