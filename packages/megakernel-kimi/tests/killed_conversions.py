"""Kills conversions: ``python killed_conversions.py CHECKPOINT FOLDER RANKS SIZE...``.

For each size, a child starts to convert and is killed as soon as it has written so many bytes; then
the conversion is run to its end. Prints, for each, the bytes that the killed child left and the
digest of every file. A process of its own, which may fork since it never starts JAX.
"""

import hashlib
import json
import multiprocessing
import shutil
import sys
import time
from pathlib import Path

from kda_mla_kernels.checkpoint import open_checkpoint
from kda_mla_kernels.numerics import BF16
from megakernel_kimi.config import KimiConfig
from megakernel_kimi.container import Target, convert
from megakernel_kimi.layout import KimiLayout
from vmem_pool.container import WriteOptions

OFTEN = WriteOptions(sync_bytes=256 << 10)


def written(folder):
    return sum(path.stat().st_size for path in folder.glob("rank-*.safetensors*"))


def killed(size, folder, job):
    """Bytes that a converter left that was killed by SIGKILL when it had written ``size``."""
    folder.mkdir()
    process = multiprocessing.get_context("fork").Process(target=convert, args=job)
    process.start()
    while process.is_alive() and written(folder) < size:
        time.sleep(2e-4)
    process.kill()
    process.join()
    return written(folder)


def main(checkpoint, folder, ranks, *sizes):
    opened, out = open_checkpoint(Path(checkpoint)), Path(folder)
    layout = KimiLayout.of(KimiConfig.from_dict(opened.config), int(ranks))
    job = (opened, out, Target.of(layout, BF16, "mxfp4"), OFTEN)
    for size in map(int, sizes):
        left = killed(size, out, job)
        finished = (out / "manifest.json").exists()
        convert(*job)
        files = {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in sorted(out.iterdir())}
        print(json.dumps({"left": left, "finished": finished, "files": files}))
        shutil.rmtree(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
