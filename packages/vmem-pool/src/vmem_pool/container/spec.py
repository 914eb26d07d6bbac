"""What a container holds: the same table of tensors for every rank of a mesh."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from vmem_pool.errors import ContainerError

__all__ = ["ALIGNMENT", "FORMAT", "VERSION", "Spec", "Tensor", "file_name", "spell"]

FORMAT = "vmem-pool container"
VERSION = 1
"""Of the layout of files and manifest. A reader refuses every other."""
ALIGNMENT = 4096
"""The data of a file begins at a multiple of this, so that mapped memory is aligned."""
MAX_HEADER = 100 << 20
"""Longer ones safetensors refuses too."""

# Names in the header of a safetensors file.
CODES: Mapping[np.dtype, str] = MappingProxyType(
    {
        np.dtype(np.uint8): "U8",
        np.dtype(np.int8): "I8",
        np.dtype(np.uint16): "U16",
        np.dtype(np.int16): "I16",
        np.dtype(np.uint32): "U32",
        np.dtype(np.int32): "I32",
        np.dtype(np.uint64): "U64",
        np.dtype(np.int64): "I64",
        np.dtype(np.float16): "F16",
        np.dtype(np.float32): "F32",
        np.dtype(np.float64): "F64",
        np.dtype(ml_dtypes.bfloat16): "BF16",
        np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
        np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    }
)
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Tensor:
    """One array of a rank; a stream is ``Tensor("stream", plan.image_shape, np.uint8)``.

    Raises:
        ContainerError: no name, no dimension, a size below 1, or a dtype that safetensors lacks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DTypeLike

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if not self.name or self.name == "__metadata__":
            raise ContainerError(f"a tensor cannot have the name {self.name!r}")
        if not self.shape or min(self.shape) < 1:
            raise ContainerError(f"tensor {self.name} has the empty shape {self.shape}")
        if self.dtype not in CODES:
            raise ContainerError(f"tensor {self.name} has dtype {self.dtype}; store it as uint8")

    @property
    def code(self) -> str:
        """Name of the dtype in a file."""
        return CODES[np.dtype(self.dtype)]

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return self.shape[0] * self.row_bytes


@dataclass(frozen=True)
class Spec:
    """Everything that decides the bytes of a container, except the values.

    Args:
        config_hash: of whatever the weights were made for.
        mesh: sizes of the mesh axes, in order; their product is the number of ranks.
        quantisation: name of the numeric format, e.g. "bf16".
        tensors: of each rank, in consumption order.
        metadata: anything else a reader wants to know, such as the slot size of a stream.

    Raises:
        ContainerError: no tensors, a name twice, or a mesh axis below 1.
    """

    config_hash: str
    mesh: Mapping[str, int]
    quantisation: str
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        repeated = [n for n, k in Counter(t.name for t in self.tensors).items() if k > 1]
        if repeated or not self.tensors:
            raise ContainerError(f"a container needs tensors with distinct names, not {repeated}")
        if not self.mesh or min(self.mesh.values()) < 1:
            raise ContainerError(f"the mesh {dict(self.mesh)} has no ranks")

    @property
    def num_ranks(self) -> int:
        """Files of the container."""
        return prod(self.mesh.values())

    @cached_property
    def header(self) -> bytes:
        """What stands before the data in every file, its length included."""
        entries: dict[str, Any] = {"__metadata__": {"layout": self.fingerprint}}
        at = 0
        for tensor in self.tensors:
            entries[tensor.name] = {
                "dtype": tensor.code,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.bytes],
            }
            at += tensor.bytes
        text = json.dumps(entries).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def offset(self, tensor: Tensor) -> int:
        """Where a tensor begins in every file."""
        before = self.tensors[: self.tensors.index(tensor)]
        return len(self.header) + sum(other.bytes for other in before)

    @property
    def file_bytes(self) -> int:
        """Bytes of each file."""
        return len(self.header) + sum(tensor.bytes for tensor in self.tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return self.num_ranks * self.file_bytes

    @cached_property
    def fingerprint(self) -> str:
        """Differs when anything in the specification does."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "config_hash": self.config_hash,
            "mesh": [[axis, size] for axis, size in self.mesh.items()],
            "quantisation": self.quantisation,
            "tensors": [[t.name, t.code, list(t.shape)] for t in self.tensors],
            "metadata": dict(self.metadata),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Spec:
        """The inverse of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: what is stored is not what it made.
        """
        spec = cls(
            config_hash=stored["config_hash"],
            mesh={axis: size for axis, size in stored["mesh"]},
            quantisation=stored["quantisation"],
            tensors=tuple(
                Tensor(name, tuple(shape), DTYPES[code]) for name, code, shape in stored["tensors"]
            ),
            metadata=dict(stored["metadata"]),
        )
        texts = (spec.config_hash, spec.quantisation, *spec.mesh, *spec.metadata.values())
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a name that is not text")
        if not all(type(size) is int for size in spec.mesh.values()):
            raise TypeError("a size of the mesh that is not a whole number")
        return spec

    def differences(self, wanted: Spec) -> str:
        """What distinguishes this specification from another, for a message."""
        pairs = {
            "mesh": (spell(self.mesh), spell(wanted.mesh)),
            "quantisation": (self.quantisation, wanted.quantisation),
            "configuration": (self.config_hash, wanted.config_hash),
        }
        for name in {**self.metadata, **wanted.metadata}:
            pairs[name] = (self.metadata.get(name, "none"), wanted.metadata.get(name, "none"))
        found = [
            f"{name} {ours}, not {theirs}" if len(ours + theirs) < 100 else f"another {name}"
            for name, (ours, theirs) in pairs.items()
            if ours != theirs
        ]
        return " and ".join(found[:2]) or "other tensors"

    def other_tensor(self, path: Path) -> str:
        """What distinguishes the tensors of a file, for a message; nothing if it is damaged."""
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                stored = json.loads(file.read(min(size, MAX_HEADER)))
            found = {tensor: stored[tensor.name] for tensor in self.tensors}
            for tensor, entry in found.items():  # the more telling of both first
                if entry["dtype"] != tensor.code:
                    return f"{tensor.name} is {entry['dtype']}, not {tensor.code}"
            for tensor, entry in found.items():
                if tuple(entry["shape"]) != tensor.shape:
                    return f"{tensor.name} is {tuple(entry['shape'])}, not {tensor.shape}"
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        return ""


def spell(mesh: Mapping[str, int]) -> str:
    """A mesh in a message."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.safetensors"
