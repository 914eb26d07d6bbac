"""Writes a container rank by rank, in bounded memory, and goes on where it was stopped.

Files of a rank while it is written, each of which is replaced as a whole or only appended to::

    rank-00003.safetensors.partial   the header and data so far, and maybe a torn end
    rank-00003.journal               how many of those bytes are on disk for certain
    rank-00003.sha256                the finished file's checksum; ``sha256sum -c`` reads it
    rank-00003.safetensors           the finished file, by renaming

A killed writer loses at most what it wrote since the last entry of the journal; the next one cuts
the torn end off, so that the finished bytes do not depend on when it was killed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from vmem_pool.container.files import digest, replace_text, sync_folder
from vmem_pool.container.manifest import MANIFEST, FileEntry, Manifest
from vmem_pool.container.spec import Spec, Tensor, file_name
from vmem_pool.errors import ContainerError

__all__ = ["Source", "WriteOptions", "remaining_bytes", "write_container"]

Source: TypeAlias = Callable[[int, str, int], Iterable[np.ndarray]]
"""From rank, tensor name and first row to arrays ``[n, ...]`` that follow one another to the end.
It must give the same values every time."""


@dataclass(frozen=True)
class WriteOptions:
    """How to write.

    Attributes:
        ranks: which files, by default all; several processes may share the work.
        progress: show a progress bar.
        sync_bytes: how much a killed writer loses at most, besides one array of its source.
    """

    ranks: Sequence[int] | None = None
    progress: bool = False
    sync_bytes: int = 256 << 20


def write_container(
    folder: str | Path, spec: Spec, source: Source, options: WriteOptions | None = None
) -> None:
    """Writes what is missing of a container; does nothing if it is complete.

    Only one array of the source is held at a time. When the files of all ranks are there, the
    manifest is written, which makes the container readable.

    Raises:
        ContainerError: too little space, files of another specification in the folder, a rank
            outside the mesh, or arrays that are not what the specification says.
    """
    chosen, where = options or WriteOptions(), Path(folder)
    ranks = _ranks(spec, chosen)
    where.mkdir(parents=True, exist_ok=True)
    missing = remaining_bytes(where, spec, ranks)
    free = shutil.disk_usage(where).free
    if missing > free:
        raise ContainerError(f"{where} needs {missing} more bytes, but only {free} are free")
    with _progress(chosen, spec.file_bytes * len(ranks)) as advance:
        for rank in ranks:
            _RankWriter(where, spec, rank, chosen.sync_bytes, advance).run(source)
    _finish(where, spec)


def remaining_bytes(folder: str | Path, spec: Spec, ranks: Sequence[int] | None = None) -> int:
    """Bytes that :func:`write_container` has still to write; writes nothing.

    Raises:
        ContainerError: files of another specification in the folder.
    """
    where = Path(folder)
    chosen = range(spec.num_ranks) if ranks is None else ranks
    writers = [_RankWriter(where, spec, rank, 1, lambda n: None) for rank in chosen]
    return sum(spec.file_bytes - writer.durable_bytes() for writer in writers)


class _RankWriter:
    """Writes the file of one rank."""

    def __init__(
        self, folder: Path, spec: Spec, rank: int, sync_bytes: int, advance: Callable[[int], None]
    ) -> None:
        self.spec, self.rank, self.sync_bytes, self.advance = spec, rank, sync_bytes, advance
        self.final = folder / file_name(rank)
        self.partial = self.final.with_suffix(".safetensors.partial")
        self.journal = self.final.with_suffix(".journal")
        self.checksum = self.final.with_suffix(".sha256")

    def durable_bytes(self) -> int:
        """How much is on disk for certain."""
        if self.final.exists():
            with self.final.open("rb") as file:
                same = file.read(len(self.spec.header)) == self.spec.header
            if not same or self.final.stat().st_size != self.spec.file_bytes:
                raise self._foreign(self.final)
            return self.spec.file_bytes
        if not (self.journal.exists() and self.partial.exists()):
            return 0
        entry = json.loads(self.journal.read_text(encoding="utf-8"))
        if entry["layout"] != self.spec.fingerprint:
            raise self._foreign(self.partial)
        return int(entry["bytes"]) if entry["bytes"] <= self.partial.stat().st_size else 0

    def run(self, source: Source) -> None:
        """Writes what is missing, and renames."""
        done = self.durable_bytes()
        self.advance(done)
        if not self.final.exists():
            self._append(source, done)
            os.replace(self.partial, self.final)
            sync_folder(self.final.parent)
        self.journal.unlink(missing_ok=True)

    def _append(self, source: Source, done: int) -> None:
        self.partial.touch()
        os.truncate(self.partial, done)
        hashed = digest(self.partial, done)
        synced = done
        with self.partial.open("ab") as file:
            for piece in self._pieces(source, done):
                file.write(piece)
                hashed.update(piece)
                done += len(piece)
                self.advance(len(piece))
                if done - synced >= self.sync_bytes:
                    file.flush()
                    os.fsync(file.fileno())
                    self._record(done)
                    synced = done
            file.flush()
            os.fsync(file.fileno())
        self._record(done)
        replace_text(self.checksum, f"{hashed.hexdigest()}  {self.final.name}\n")

    def _record(self, done: int) -> None:
        replace_text(
            self.journal, json.dumps({"layout": self.spec.fingerprint, "bytes": done}) + "\n"
        )

    def _pieces(self, source: Source, done: int) -> Iterator[memoryview]:
        """The bytes of the file from ``done`` on, which is the end of the header or of a row."""
        if not done:
            yield memoryview(self.spec.header)
        at = len(self.spec.header)
        for tensor in self.spec.tensors:
            row = max(done - at, 0) // tensor.row_bytes
            if row < tensor.shape[0]:
                yield from self._rows(source, tensor, row)
            at += tensor.bytes

    def _rows(self, source: Source, tensor: Tensor, row: int) -> Iterator[memoryview]:
        where = f"tensor {tensor.name} of rank {self.rank}"
        for array in source(self.rank, tensor.name, row):
            if array.shape[1:] != tensor.shape[1:] or array.dtype != tensor.dtype:
                raise ContainerError(
                    f"{where} consists of {tensor.dtype} {tensor.shape[1:]}, not of"
                    f" {array.dtype} {array.shape[1:]}"
                )
            row += len(array)
            if row > tensor.shape[0]:
                raise ContainerError(f"{where} has more than its {tensor.shape[0]} rows")
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        if row < tensor.shape[0]:
            raise ContainerError(f"{where} ends after {row} of its {tensor.shape[0]} rows")

    def _foreign(self, path: Path) -> ContainerError:
        return ContainerError(f"{path} is not of this specification; delete it or write elsewhere")


def _ranks(spec: Spec, options: WriteOptions) -> Sequence[int]:
    ranks = range(spec.num_ranks) if options.ranks is None else options.ranks
    outside = [rank for rank in ranks if not 0 <= rank < spec.num_ranks]
    if outside:
        raise ContainerError(f"rank {outside[0]} is outside 0..{spec.num_ranks - 1}")
    return ranks


def _finish(folder: Path, spec: Spec) -> None:
    """Writes the manifest if every rank's file is there."""
    files = [folder / file_name(rank) for rank in range(spec.num_ranks)]
    if not all(file.exists() for file in files):
        return
    entries = []
    for file in files:
        checksum = file.with_suffix(".sha256").read_text(encoding="utf-8").split()[0]
        entries.append(FileEntry(file.name, spec.file_bytes, checksum))
    replace_text(folder / MANIFEST, Manifest(spec, tuple(entries)).to_text())


@contextmanager
def _progress(options: WriteOptions, total: int) -> Iterator[Callable[[int], None]]:
    if not options.progress:
        yield lambda size: None
        return
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("writing", total=total)
        yield lambda size: bar.advance(task, size)
