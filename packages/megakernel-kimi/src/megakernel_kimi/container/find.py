"""Where a model's weights are: in its checkpoint, or converted, in a folder of their own."""

from __future__ import annotations

import os
from pathlib import Path

from kda_mla_kernels.checkpoint import Checkpoint, open_checkpoint
from kda_mla_kernels.errors import CheckpointError, ConfigError
from vmem_pool import ContainerError
from vmem_pool.container import open_container, read_manifest

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
    if _is_converted(folder):
        return ConvertedFolder(folder)
    if _is_unfinished(folder):
        raise CheckpointError(
            f"{folder} holds an unfinished conversion; run the same conversion again to finish it:"
            f" python -m megakernel_kimi.convert CHECKPOINT {folder} --ranks N"
        )
    return open_checkpoint(checkpoint, revision, progress=progress)


def find_converted(checkpoint: str | Path, weights: str | Path = "auto") -> Converted | None:
    """The converted weights of a model; None if its checkpoint is to be read.

    Args:
        checkpoint: what is to be opened; it need not exist here yet.
        weights: their folder, or ``auto``: the checkpoint itself if it is such a folder, else the
            one that :data:`VARIABLE` names.

    Raises:
        CheckpointError: there is no such folder, or it holds no container, or a damaged one.
        ConfigError: ``weights`` is no name.
    """
    if not isinstance(weights, str | os.PathLike):
        raise ConfigError(f"weights {weights!r} must name a folder, or be 'auto'")
    folder, named = weights, ""
    if weights == "auto" and _is_converted(Path(checkpoint).expanduser()):
        folder = checkpoint
    elif weights == "auto":
        folder, named = os.environ.get(VARIABLE, ""), f" (named by {VARIABLE})"
        if not folder:
            return None
    if not str(folder):
        raise CheckpointError(
            "weights is empty; name a folder of converted weights, or leave it at 'auto'"
        )
    where = Path(folder).expanduser()
    if not where.is_dir():
        raise CheckpointError(f"there is no folder {folder}{named} of converted weights")
    if not (where / MANIFEST).exists():
        raise CheckpointError(
            f"the folder {folder}{named} has no {MANIFEST}, so it holds no converted weights, or"
            " not all of them; python -m megakernel_kimi.convert CHECKPOINT FOLDER --ranks N writes"
            " them"
        )
    try:
        # Files are looked at when they are loaded: a host may have only those of its own ranks.
        return Converted(open_container(where, ranks=()), f"{folder}{named}")
    except ContainerError as error:
        raise CheckpointError(f"{error}{named}") from None


def _is_converted(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and any(folder.glob("rank-*.safetensors"))


def _is_unfinished(folder: Path) -> bool:
    if any(folder.glob("rank-*.safetensors*")):
        return True
    try:
        read_manifest(folder)
    except ContainerError:  # none, or that of something else
        return False
    return True
