"""Small files that are either old or new, never half written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

__all__ = ["digest", "replace_text", "sync_folder"]

READ_BYTES = 8 << 20


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves the old one or the new one."""
    unfinished = path.with_name(path.name + ".new")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync_folder(path.parent)


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
