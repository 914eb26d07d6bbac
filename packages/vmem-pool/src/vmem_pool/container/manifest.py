"""``manifest.json``: written last, so that a folder with one is complete."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vmem_pool.container.spec import FORMAT, VERSION, Spec
from vmem_pool.errors import ContainerError

__all__ = ["MANIFEST", "FileEntry", "Manifest", "read_manifest"]

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileEntry:
    """A file of the container."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The specification, and the files by rank."""

    spec: Spec
    files: tuple[FileEntry, ...]

    def to_text(self) -> str:
        """As JSON, the same for the same container."""
        stored = {
            "format": FORMAT,
            "version": VERSION,
            **self.spec.to_json(),
            "files": [asdict(file) for file in self.files],
        }
        return json.dumps(stored, indent=1) + "\n"


def read_manifest(folder: str | Path) -> Manifest:
    """Reads the manifest of a container.

    Raises:
        ContainerError: there is none, it is damaged, or it is of another format or version.
    """
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise ContainerError(f"{folder} has no {MANIFEST}: it is no container, or is unfinished")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ContainerError(f"{path} is damaged: {error}") from error
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise ContainerError(f"{path} is not the manifest of a {FORMAT}")
    if stored.get("version") != VERSION:
        raise ContainerError(
            f"{folder} has container version {stored.get('version')}, but this reader knows"
            f" {VERSION}; convert the weights again"
        )
    try:
        files = tuple(FileEntry(**file) for file in stored["files"])
        manifest = Manifest(Spec.from_json(stored), files)
    except (KeyError, TypeError, ValueError) as error:
        raise ContainerError(f"{path} is damaged: {error!r}") from error
    if len(files) != manifest.spec.num_ranks:
        raise ContainerError(
            f"{path} lists {len(files)} files for {manifest.spec.num_ranks} ranks; it is damaged"
        )
    return manifest
