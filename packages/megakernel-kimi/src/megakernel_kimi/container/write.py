"""Converting a checkpoint, in memory that does not grow with the number of experts."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from kda_mla_kernels.checkpoint import Checkpoint
from kda_mla_kernels.errors import CheckpointError
from vmem_pool import ContainerError
from vmem_pool.container import WriteOptions, remaining_bytes, replacing, write_container

from megakernel_kimi.checkpoint import check_tensors
from megakernel_kimi.container.origin import origin_of
from megakernel_kimi.container.reads import SharedReads
from megakernel_kimi.container.target import Target
from megakernel_kimi.kernel.source import RankRows
from megakernel_kimi.loading import RankReader

__all__ = ["check_folder", "convert"]

COMPANIONS = ("*.json", "*.model", "*.jinja", "LICENSE*")
"""What a model needs beside its weights: configuration, tokenizer, defaults, and its licence."""
NOT_COMPANIONS = {"model.safetensors.index.json", "manifest.json"}

TOGETHER = ("experts.down", "experts.scales")
"""What is cut out of columns, which :class:`SharedReads` reads once for all ranks."""


def convert(
    checkpoint: Checkpoint,
    folder: str | Path,
    target: Target,
    options: WriteOptions | None = None,
) -> None:
    """Writes what is missing of a checkpoint's converted weights; does nothing if all is there.

    One sublayer's matrices of one rank, or one expert, are in memory at a time. Stopped at any
    point, the next call goes on to the same bytes. The folder then stands for the checkpoint: its
    configuration and tokenizer are in it.

    Args:
        folder: made if it does not exist.
        options: which ranks, progress, and how much may be lost when it is stopped; ``together`` is
            decided here.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape or type; a scale of an expert is
            such that decoding would not be exact; FP8 would round a weight; or the folder is not
            one to write to, for want of space or as it holds something else.
    """
    where, layout = Path(folder).expanduser(), target.layout
    check_tensors(checkpoint, layout.config)
    check_folder(where, checkpoint)
    spec = target.spec(origin_of(checkpoint, layout.config))

    shared = SharedReads(checkpoint)

    @cache
    def rows_of(rank: int) -> RankRows:
        return RankRows(RankReader(shared, target.dtype, layout, rank), target.shape)

    def source(rank: int, name: str, start: int) -> Iterator[np.ndarray]:
        return rows_of(rank).rows(name, start)

    try:
        remaining_bytes(where, spec)  # before anything of another container is replaced
        _copy_companions(checkpoint.folder, where)
        chosen = replace(options or WriteOptions(), together=TOGETHER)
        write_container(where, spec, source, chosen)
    except ContainerError as error:
        raise CheckpointError(str(error)) from None


def check_folder(folder: Path, checkpoint: Checkpoint) -> None:
    """Makes sure that a conversion would overwrite nothing of another model.

    Raises:
        CheckpointError: the folder holds a checkpoint, or another configuration.
    """
    if folder.exists() and folder.samefile(checkpoint.folder):
        raise CheckpointError(f"{folder} is the checkpoint itself; convert it into another folder")
    weights = [*folder.glob("model*.safetensors"), *folder.glob("model.safetensors.index.json")]
    if weights:
        raise CheckpointError(
            f"{folder} holds a checkpoint ({weights[0].name}); convert into a folder of its own"
        )
    ours, theirs = checkpoint.folder / "config.json", folder / "config.json"
    if theirs.exists() and not filecmp.cmp(ours, theirs, shallow=False):
        raise CheckpointError(
            f"{theirs} is not that of the checkpoint; convert into a folder of its own"
        )


def _copy_companions(source: Path, folder: Path) -> None:
    """Each is either as it was or complete, whenever this is stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.name not in NOT_COMPANIONS:
                with replacing(folder / file.name) as unfinished:
                    shutil.copyfile(file, unfinished)
