"""Where a model's weights are: in its checkpoint, or converted, in a folder of their own."""

from __future__ import annotations

import os
from pathlib import Path

from kda_mla_kernels.checkpoint import Checkpoint, open_checkpoint
from kda_mla_kernels.errors import CheckpointError
from vmem_pool import ContainerError
from vmem_pool.container import open_container

from megakernel_kimi.container.opened import Converted, ConvertedFolder

__all__ = ["VARIABLE", "find_converted", "open_source"]

VARIABLE = "KIMI_PRESHARDED_WEIGHTS"
"""Environment variable with a folder of converted weights, used if the caller names none."""
MANIFEST = "manifest.json"


def open_source(
    checkpoint: str | Path, revision: str | None, *, progress: bool
) -> Checkpoint | ConvertedFolder:
    """Opens a checkpoint, or a folder that one was converted to.

    Raises:
        CheckpointError: see :func:`kda_mla_kernels.checkpoint.open_checkpoint`; or a conversion
            that was not finished.
    """
    folder = Path(checkpoint).expanduser()
    if (folder / MANIFEST).is_file() and any(folder.glob("rank-*.safetensors")):
        return ConvertedFolder(folder)
    if any(folder.glob("rank-*.partial")):
        raise CheckpointError(
            f"{folder} holds an unfinished conversion; run the same conversion again to finish it"
        )
    return open_checkpoint(checkpoint, revision, progress=progress)


def find_converted(
    source: Checkpoint | ConvertedFolder, weights: str | Path = "auto"
) -> Converted | None:
    """The converted weights of a model; None if its checkpoint is to be read.

    Args:
        source: what was opened.
        weights: their folder, or ``auto``: the opened folder itself, else the one that
            :data:`VARIABLE` names.

    Raises:
        CheckpointError: the folder holds no container, or a damaged one.
    """
    folder, place = weights, str(weights)
    if weights == "auto" and isinstance(source, ConvertedFolder):
        folder, place = source.folder, str(source.folder)
    elif weights == "auto":
        folder = os.environ.get(VARIABLE, "")
        place = f"{folder} (named by {VARIABLE})"
    if not folder:
        return None
    try:
        # Files are looked at when they are loaded: a host may have only those of its own ranks.
        return Converted(open_container(Path(folder).expanduser(), ranks=()), place)
    except ContainerError as error:
        raise CheckpointError(str(error)) from None
