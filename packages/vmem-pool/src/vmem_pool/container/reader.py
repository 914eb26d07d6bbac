"""Opens a container, checks that it is the expected one, and maps it into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from vmem_pool.container.files import digest
from vmem_pool.container.manifest import REMEDY, FileEntry, Manifest, read_manifest
from vmem_pool.container.spec import Spec, spell
from vmem_pool.errors import ContainerError

__all__ = ["Container", "Expected", "Verify", "open_container"]


class Verify(Enum):
    """How much is checked before anything is used."""

    FAST = "sizes and headers"
    FULL = "sizes, headers and checksums"


@dataclass(frozen=True)
class Expected:
    """What the reader needs; None accepts anything."""

    config_hash: str | None = None
    mesh: Mapping[str, int] | None = None
    quantisation: str | None = None


@dataclass(frozen=True)
class Container:
    """A verified container."""

    folder: Path
    manifest: Manifest

    @property
    def spec(self) -> Spec:
        """What it holds."""
        return self.manifest.spec

    def rank(self, rank: int) -> dict[str, np.ndarray]:
        """The tensors of a rank by name, mapped read-only; nothing is read until it is used.

        Raises:
            ContainerError: a rank outside the mesh.
        """
        self._check_rank(rank)
        mapped = np.memmap(self.folder / self.manifest.files[rank].name, np.uint8, mode="r")
        tensors, at = {}, len(self.spec.header)
        for tensor in self.spec.tensors:
            data = mapped[at : at + tensor.bytes]
            tensors[tensor.name] = data.view(tensor.dtype).reshape(tensor.shape)
            at += tensor.bytes
        return tensors

    def verify(self, rank: int, how: Verify = Verify.FULL) -> None:
        """Checks the file of a rank; several may be checked by threads at the same time.

        Raises:
            ContainerError: the file is missing or damaged; or a rank outside the mesh.
        """
        self._check_rank(rank)
        _check_file(self.folder, self.spec, self.manifest.files[rank], how)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.spec.num_ranks:
            raise ContainerError(f"rank {rank} is outside 0..{self.spec.num_ranks - 1}")


def open_container(
    folder: str | Path,
    expected: Expected | None = None,
    verify: Verify = Verify.FAST,
    ranks: Sequence[int] | None = None,
) -> Container:
    """Opens a container for reading.

    Args:
        folder: where it was written.
        expected: what the reader needs.
        verify: checksums take as long as reading all bytes.
        ranks: whose files are checked, by default all; a host may have only its own.

    Raises:
        ContainerError: no container, or one of another version, configuration, mesh or
            quantisation, or a missing or damaged file; the message names it.
    """
    manifest = read_manifest(folder)
    _compare(Path(folder), manifest.spec, expected or Expected())
    for rank in range(manifest.spec.num_ranks) if ranks is None else ranks:
        _check_file(Path(folder), manifest.spec, manifest.files[rank], verify)
    return Container(Path(folder), manifest)


def _compare(folder: Path, spec: Spec, expected: Expected) -> None:
    pairs = {
        "configuration": (spec.config_hash, expected.config_hash),
        "mesh": (spell(spec.mesh), expected.mesh and spell(expected.mesh)),
        "quantisation": (spec.quantisation, expected.quantisation),
    }
    for name, (found, wanted) in pairs.items():
        if wanted is not None and found != wanted:
            raise ContainerError(
                f"{folder} was made for {name} {found}, not {wanted}; convert the weights again"
            )


def _check_file(folder: Path, spec: Spec, entry: FileEntry, verify: Verify) -> None:
    path = folder / entry.name
    if not path.exists():
        raise ContainerError(f"{path} is missing; convert the weights again")
    size = path.stat().st_size
    if size != entry.bytes or size != spec.file_bytes:
        raise ContainerError(f"{path} has {size} bytes instead of {entry.bytes}; {REMEDY}")
    with path.open("rb") as file:
        if file.read(len(spec.header)) != spec.header:
            raise ContainerError(f"{path} has a header that is not that of the manifest; {REMEDY}")
    if verify is Verify.FULL and digest(path).hexdigest() != entry.sha256:
        raise ContainerError(
            f"{path} is damaged: its SHA-256 is not that of the manifest; {REMEDY}"
        )
