"""``manifest.json``: written last, so that a folder with one is complete."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from vmem_pool.container.files import read_json
from vmem_pool.container.spec import FORMAT, VERSION, Spec, file_name
from vmem_pool.errors import ContainerError

__all__ = ["MANIFEST", "REMEDY", "SHA256", "FileEntry", "Manifest", "read_manifest"]

MANIFEST = "manifest.json"
REMEDY = "delete it and convert the weights again"
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """A file of the container.

    Raises:
        ContainerError: a size or a checksum that is none.
    """

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if type(self.bytes) is not int or not SHA256.fullmatch(self.sha256):
            raise ContainerError(f"file {self.name} has no size or no SHA-256")


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
    stored = read_json(path, REMEDY)
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
        why = f"{error} is missing or unknown" if isinstance(error, KeyError) else error
        raise ContainerError(f"{path} is damaged ({why}); {REMEDY}") from error
    if len(files) != manifest.spec.num_ranks:
        raise ContainerError(
            f"{path} is damaged (it lists {len(files)} files for {manifest.spec.num_ranks} ranks);"
            f" {REMEDY}"
        )
    for rank, file in enumerate(files):
        if file.name != file_name(rank):
            raise ContainerError(
                f"{path} is damaged (the file of rank {rank} cannot be called {file.name!r});"
                f" {REMEDY}"
            )
    return manifest
