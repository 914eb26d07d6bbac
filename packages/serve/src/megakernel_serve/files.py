"""Single files of a checkpoint, be it a folder or a Hugging Face repository."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kda_mla_kernels.errors import CheckpointError

__all__ = ["file_of", "read_json"]


def read_json(checkpoint: str | Path, name: str, revision: str | None) -> Mapping[str, Any] | None:
    """A JSON object; None if the checkpoint has no such file.

    Raises:
        CheckpointError: it is not a JSON object, or see :func:`file_of`.
    """
    path = file_of(checkpoint, name, revision)
    if path is None:
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values


def file_of(checkpoint: str | Path, name: str, revision: str | None) -> Path | None:
    """One file of a checkpoint folder, or of a repository (fetched if need be); None if absent.

    Raises:
        CheckpointError: there is no such folder or repository, or it cannot be reached.
    """
    folder = Path(checkpoint)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(str(checkpoint), name, revision=revision))
    except LocalEntryNotFoundError:
        pass  # a kind of EntryNotFoundError, but about the network
    except EntryNotFoundError:
        return None
    except Exception as error:  # the library raises many kinds for names, access and network
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"cannot open {str(checkpoint)!r}: {reason}") from None
    raise CheckpointError(
        f"{str(checkpoint)!r} is not a folder, and as a repository it can neither be reached nor"
        " found in the local cache"
    )
