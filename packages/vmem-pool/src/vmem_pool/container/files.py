"""Small files that are either old or new, never half written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from vmem_pool.errors import ContainerError

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

__all__ = ["digest", "locked", "read_json", "replace_text", "replacing", "sync_folder"]

READ_BYTES = 8 << 20


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, of this writer alone; at the end it takes the file's place."""
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}.new")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves the old one or the new one."""
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def read_json(path: Path, remedy: str) -> Any:
    """Parses a file.

    Args:
        path: to the file.
        remedy: what to do if it is damaged.

    Raises:
        ContainerError: it cannot be read or is not JSON.
        FileNotFoundError: there is none.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ContainerError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ContainerError(f"{path} is damaged ({error}); {remedy}") from error


def locked(file: BinaryIO) -> bool:
    """Locks a file until it is closed; False if it is locked already, as far as can be known."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # the file system has no locks
            pass
    return True


def sync_folder(folder: Path) -> None:
    """Makes renames durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path, size: int | None = None) -> hashlib._Hash:
    """SHA-256 of a file, or of its first bytes, read in pieces."""
    found = hashlib.sha256()
    left = path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left and (piece := file.read(min(left, READ_BYTES))):
            found.update(piece)
            left -= len(piece)
    return found
