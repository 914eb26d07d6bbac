"""Which tensors a checkpoint folder holds, and in which files.

Three layouts: one ``model.safetensors``; ``model.safetensors.index.json`` with shards; shards
``*-00001-of-000NN.safetensors`` whose index was not copied.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PureWindowsPath
from typing import Any

from kda_mla_kernels.checkpoint.header import TensorInfo, read_header
from kda_mla_kernels.errors import CheckpointError

__all__ = ["INDEX", "SINGLE", "read_json", "scan_tensors"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")


def read_json(file: Path) -> Any:
    """Parses a JSON file.

    Raises:
        CheckpointError: it cannot be read or is not JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error


def scan_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder's weights, with all headers checked.

    Raises:
        CheckpointError: weights are missing, damaged, contradict their index or each other.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _scan_index(folder)
    shards = sorted(file for file in folder.glob("*.safetensors") if SHARD.fullmatch(file.name))
    if not shards:
        raise CheckpointError(
            f"no weights in {folder}: neither {SINGLE} nor {INDEX} exists"
            " (only safetensors files are read)"
        )
    return _scan_shards(folder, shards)


def _scan_index(folder: Path) -> dict[str, TensorInfo]:
    weight_map = _weight_map(folder / INDEX)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {len(shards)} weights files named in {folder / INDEX}"
            f" do not exist, the first is {missing[0]!r}; the download is incomplete"
        )
    headers = {shard: read_header(folder / shard) for shard in shards}
    absent = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if absent:
        raise CheckpointError(
            f"{folder / INDEX} says that tensor {absent[0]!r} is in {weight_map[absent[0]]!r},"
            f" which does not contain it{_and_more(len(absent) - 1)}"
        )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensor names to files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise CheckpointError(
                f"{index} puts tensor {name!r} in {shard!r}, which must be a .safetensors file"
                " inside the checkpoint's folder"
            )
    return weight_map


def _stays_inside(shard: str) -> bool:
    """Judged by the text alone: a download cache links its files to a folder elsewhere.

    Windows rules are the stricter ones (both slashes, drives), so they decide everywhere.
    """
    path = PureWindowsPath(shard)
    anchored = bool(path.drive or path.root)
    return not anchored and ".." not in path.parts and shard.endswith(".safetensors")


def _scan_shards(folder: Path, shards: list[Path]) -> dict[str, TensorInfo]:
    _check_complete(folder, shards)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} is in both {tensors[name].file.name!r} and {shard.name!r},"
                    f" and {folder / INDEX} does not exist to say which counts"
                )
            tensors[name] = info
    return tensors


def _check_complete(folder: Path, shards: list[Path]) -> None:
    matches = [match for shard in shards if (match := SHARD.fullmatch(shard.name))]
    series = sorted({(match["stem"], match["total"]) for match in matches})
    if len(series) > 1:
        names = " and ".join(f"{stem}-*-of-{total}" for stem, total in series[:2])
        raise CheckpointError(f"{folder} holds two series of weights files ({names}) and no index")
    stem, total = series[0]
    present = {int(match["number"]) for match in matches}
    missing = [number for number in range(1, int(total) + 1) if number not in present]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of its {int(total)} weights files,"
            f" the first is '{stem}-{missing[0]:05d}-of-{total}.safetensors'"
        )


def _and_more(count: int) -> str:
    return f" (and {count} more like it)" if count else ""
