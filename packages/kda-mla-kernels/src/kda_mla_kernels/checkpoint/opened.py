"""An opened checkpoint: its configuration, its table of tensors and their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kda_mla_kernels.checkpoint.folder import read_json, scan_tensors
from kda_mla_kernels.checkpoint.header import TensorInfo
from kda_mla_kernels.checkpoint.reading import Index, read_tensor
from kda_mla_kernels.errors import CheckpointError

__all__ = ["Checkpoint"]

REPORTED_PROBLEMS = 3


class Checkpoint:
    """A folder with ``config.json`` and safetensors files, all headers of which have been checked.

    Use :func:`open_checkpoint` to make one. Holds no open files; reading is safe from threads.

    Args:
        folder: the checkpoint's folder.
        name: what users call it: the repository, or the folder's name.

    Raises:
        CheckpointError: a file is missing or damaged; the message says which and how.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        config = self.json("config.json")
        if config is None:
            raise CheckpointError(f"{folder} is not a checkpoint: config.json does not exist")
        if not isinstance(config, dict):
            raise CheckpointError(f"{folder / 'config.json'} must hold a JSON object")
        self.config: dict[str, Any] = config
        """``config.json``, parsed."""
        self._tensors = scan_tensors(folder)

    def __repr__(self) -> str:
        return f"Checkpoint({self.name!r}, {len(self._tensors)} tensors)"

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names(self) -> tuple[str, ...]:
        """All tensor names, in the order of the index or file."""
        return tuple(self._tensors)

    def json(self, name: str) -> Any | None:
        """Another JSON file of the folder, parsed; None if it does not exist.

        Raises:
            CheckpointError: the file is not valid JSON.
        """
        file = self.folder / name
        return read_json(file) if file.is_file() else None

    def info(self, name: str) -> TensorInfo:
        """Shape, type and place of a tensor.

        Raises:
            CheckpointError: the checkpoint has no tensor of this name.
        """
        if name not in self._tensors:
            raise CheckpointError(f"checkpoint {self.name!r} has no tensor {name!r}")
        return self._tensors[name]

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """A tensor, or the part of it that a slice per axis selects, as a new array.

        Only the pages that hold selected bytes are read, and beside the result at most 64 MiB are
        mapped at a time.

        Args:
            name: the tensor.
            index: one slice, or a tuple of slices for the leading axes, counted in elements of
                ``info(name).shape``. Every axis remains; steps must be positive.

        Returns:
            An array of the stored type: a NumPy type, or ``bfloat16``, ``float8_e4m3fn``,
            ``float8_e5m2``, ``float8_e8m0fnu``, ``float4_e2m1fn`` of ``ml_dtypes``. Four-bit floats
            come unpacked, one to a byte.

        Raises:
            CheckpointError: no tensor of this name, or its file changed since it was opened.
            IndexError: more slices than axes, a bound beyond its axis, or a step below 1.
            TypeError: an entry of the index that is not a slice.
        """
        return read_tensor(self.info(name), index)

    def require(
        self, shapes: Mapping[str, Sequence[int]], dtypes: Iterable[DTypeLike] | None = None
    ) -> None:
        """Checks that tensors exist with these shapes, before anything is read.

        Args:
            shapes: expected shape of each tensor, in elements.
            dtypes: types that are allowed for all of them; None allows every type. Names of
                ``ml_dtypes`` count (``"bfloat16"``).

        Raises:
            CheckpointError: names the first problems and counts the rest.
        """
        allowed = None if dtypes is None else tuple(np.dtype(dtype) for dtype in dtypes)
        problems = [
            problem
            for name, shape in shapes.items()
            if (problem := self._problem(name, tuple(shape), allowed))
        ]
        if problems:
            shown, more = problems[:REPORTED_PROBLEMS], len(problems) - REPORTED_PROBLEMS
            rest = f"; and {more} more" if more > 0 else ""
            raise CheckpointError(f"checkpoint {self.name!r}: {'; '.join(shown)}{rest}")

    def _problem(
        self, name: str, shape: tuple[int, ...], allowed: tuple[np.dtype, ...] | None
    ) -> str | None:
        if name not in self._tensors:
            return f"tensor {name!r} is missing"
        info = self._tensors[name]
        if info.shape != shape:
            return f"tensor {name!r} has shape {list(info.shape)}, not {list(shape)}"
        if allowed is not None and info.dtype not in allowed:
            names = " or ".join(dtype.name for dtype in allowed)
            return f"tensor {name!r} is {info.dtype.name}, not {names}"
        return None
