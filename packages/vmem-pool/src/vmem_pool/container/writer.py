"""Writes a container, in bounded memory, and goes on where it was stopped.

Files of a rank while it is written, each of which is replaced as a whole or only appended to::

    rank-00003.safetensors.partial   the header and data so far, and maybe a torn end
    rank-00003.journal               how many of those bytes are on disk for certain
    rank-00003.sha256                the finished file's checksum; ``sha256sum -c`` reads it
    rank-00003.safetensors           the finished file, by renaming

A killed writer loses at most what it wrote since the last entry of the journal; the next one cuts
the torn end off, so that the finished bytes do not depend on when it was killed. Who writes a rank
holds a lock on the first of these files, which dies with the process.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from heapq import heappop, heapreplace
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from vmem_pool.container.files import digest, locked, read_json, replace_text, sync_folder
from vmem_pool.container.manifest import MANIFEST, SHA256, FileEntry, Manifest, read_manifest
from vmem_pool.container.spec import Spec, Tensor, file_name
from vmem_pool.errors import ContainerError

__all__ = ["Source", "WriteOptions", "remaining_bytes", "write_container"]

Source: TypeAlias = Callable[[int, str, int], Iterable[np.ndarray]]
"""From rank, tensor name and first row to arrays ``[n, ...]`` that follow one another to the end.
It must give the same values every time."""

ANEW = "delete it to write its rank anew"


@dataclass(frozen=True)
class WriteOptions:
    """How to write.

    Attributes:
        ranks: which files, by default all; several processes may share the work.
        progress: show a progress bar.
        sync_bytes: how much of a file a killed writer loses at most, besides one array of its
            source.
        together: names of tensors of which all ranks get a row before any gets the next, so that a
            source may read once what it cuts for all of them. Other tensors are written rank after
            rank; without any, whole files are.
    """

    ranks: Sequence[int] | None = None
    progress: bool = False
    sync_bytes: int = 256 << 20
    together: Collection[str] = ()


def write_container(
    folder: str | Path, spec: Spec, source: Source, options: WriteOptions | None = None
) -> None:
    """Writes what is missing of a container; does nothing if it is complete.

    Only one array of the source is held at a time. When the files of all ranks are there, the
    manifest is written, which makes the container readable.

    Raises:
        ContainerError: too little space, damaged files or those of another specification in the
            folder, a rank that is outside the mesh or that another process is writing, or arrays
            that are not what the specification says.
    """
    chosen, where = options or WriteOptions(), Path(folder)
    ranks = _ranks(spec, chosen)
    where.mkdir(parents=True, exist_ok=True)
    missing = remaining_bytes(where, spec, ranks)
    free = shutil.disk_usage(where).free
    if missing > free:
        raise ContainerError(f"{where} needs {missing} more bytes, but only {free} are free")
    with _progress(chosen, spec.file_bytes * len(ranks)) as advance:
        writers = [_RankWriter(where, spec, r, chosen.sync_bytes, advance) for r in ranks]
        for group in [writers] if chosen.together else [[writer] for writer in writers]:
            _write_group(group, spec, source, chosen.together)
    _finish(where, spec)


def _write_group(
    writers: Sequence[_RankWriter], spec: Spec, source: Source, together: Collection[str]
) -> None:
    """Files that are open at the same time."""
    with ExitStack() as stack:
        for writer in writers:
            stack.enter_context(writer)
        for tensor in spec.tensors:
            runs = [writer.write(tensor, source) for writer in writers]
            if tensor.name in together:
                _take_turns(runs)
            else:
                for run in runs:
                    deque(run, maxlen=0)
        for writer in writers:
            writer.finish()


def _take_turns(runs: Sequence[Iterator[int]]) -> None:
    """Goes on with whichever has come least far: killed writers may have left them apart."""
    waiting = [(0, number) for number in range(len(runs))]
    while waiting:
        done = next(runs[waiting[0][1]], None)
        if done is None:
            heappop(waiting)
        else:
            heapreplace(waiting, (done, waiting[0][1]))


def remaining_bytes(folder: str | Path, spec: Spec, ranks: Sequence[int] | None = None) -> int:
    """Bytes that :func:`write_container` has still to write; writes nothing.

    Raises:
        ContainerError: damaged files, or those of another specification, in the folder.
    """
    where = Path(folder)
    if (where / MANIFEST).exists():
        stored = read_manifest(where).spec
        if stored.fingerprint != spec.fingerprint:
            raise _foreign(where / MANIFEST, stored.differences(spec))
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
                raise _foreign(self.final, self.spec.other_tensor(self.final))
            return self.spec.file_bytes
        try:
            written, entry = self.partial.stat().st_size, read_json(self.journal, ANEW)
        except FileNotFoundError:
            return 0
        match entry:
            case {"layout": str(layout), "bytes": int(durable)}:
                if layout != self.spec.fingerprint:
                    raise _foreign(self.partial, self.spec.other_tensor(self.partial))
                if len(self.spec.header) <= durable <= self.spec.file_bytes:
                    return durable if durable <= written else 0
        raise ContainerError(f"{self.journal} is damaged; {ANEW}")

    def __enter__(self) -> _RankWriter:
        """Goes back to what is on disk for certain."""
        self._file: BinaryIO | None = None
        if not self.final.exists():
            self._file = self.partial.open("ab")
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        """Locks the file, and cuts off what a killed process left behind."""
        if self._file is not None and not locked(self._file):
            raise ContainerError(
                f"another process is writing rank {self.rank} of {self.final.parent}"
            )
        self._done = self._synced = self.durable_bytes()
        self.advance(self._done)
        if self._file is None:
            return
        if self.final.exists():  # finished by another process before the file was locked
            self._file.close()
            self._file = None
            self.partial.unlink(missing_ok=True)
            return
        for left in self.final.parent.glob(f"{self.final.stem}.*.new"):  # by a killed process
            left.unlink(missing_ok=True)
        self._file.truncate(self._done)
        self._hashed = digest(self.partial, self._done)
        if not self._done:
            self._put(memoryview(self.spec.header))

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, tensor: Tensor, source: Source) -> Iterator[int]:
        """Writes what is missing of a tensor, and yields the length of the file again and again."""
        if self._file is None:
            return
        row = max(self._done - self.spec.offset(tensor), 0) // tensor.row_bytes
        if row >= tensor.shape[0]:
            return
        yield self._done
        for piece in self._rows(source, tensor, row):
            self._put(piece)
            yield self._done

    def finish(self) -> None:
        """Renames, when every tensor is written."""
        if self._file is not None:
            self._sync()
            replace_text(self.checksum, f"{self._hashed.hexdigest()}  {self.final.name}\n")
            os.replace(self.partial, self.final)
            sync_folder(self.final.parent)
            self._file.close()  # and with it the lock
        self.journal.unlink(missing_ok=True)

    def _put(self, piece: memoryview) -> None:
        assert self._file is not None
        self._file.write(piece)
        self._hashed.update(piece)
        self._done += len(piece)
        self.advance(len(piece))
        if self._done - self._synced >= self.sync_bytes:
            self._sync()

    def _sync(self) -> None:
        """Notes in the journal what is on disk."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        entry = {"layout": self.spec.fingerprint, "bytes": self._done}
        replace_text(self.journal, json.dumps(entry) + "\n")
        self._synced = self._done

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


def _foreign(path: Path, why: str) -> ContainerError:
    told = f" ({why})" if why else ""
    return ContainerError(
        f"{path} is not of this specification{told}; delete it or write elsewhere"
    )


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
    entries = tuple(FileEntry(file.name, spec.file_bytes, _checksum(file)) for file in files)
    replace_text(folder / MANIFEST, Manifest(spec, entries).to_text())


def _checksum(file: Path) -> str:
    """What was noted when a file was finished."""
    path = file.with_suffix(".sha256")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not (found := SHA256.match(text)):
        raise ContainerError(
            f"{path} is missing or damaged; delete {file.name} and convert the weights again"
        )
    return found[0]


@contextmanager
def _progress(options: WriteOptions, total: int) -> Iterator[Callable[[int], None]]:
    if not options.progress:
        yield lambda size: None
        return
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("writing", total=total)
        yield lambda size: bar.advance(task, size)
