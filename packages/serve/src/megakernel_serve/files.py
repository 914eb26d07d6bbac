"""Single small files of a checkpoint, before and beside the loading of its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_mla_kernels.errors import CheckpointError

__all__ = ["Checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """A folder, or a Hugging Face repository whose files are fetched as they are asked for."""

    name: str | Path
    revision: str | None = None

    def json(self, name: str) -> Mapping[str, Any] | None:
        """A JSON object; None if there is no such file.

        Raises:
            CheckpointError: it is not a JSON object, or see :meth:`file`.
        """
        path = self.file(name)
        if path is None:
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} is not a JSON object")
        return values

    def file(self, name: str) -> Path | None:
        """The path of one file; None if there is no such file.

        Raises:
            CheckpointError: there is no such folder or repository, or it cannot be reached.
        """
        folder = Path(self.name)
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(str(self.name), name, revision=self.revision))
        except LocalEntryNotFoundError:
            pass  # a kind of EntryNotFoundError, but about the network
        except EntryNotFoundError:
            return None
        except Exception as error:  # the library raises many kinds: names, access, network
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"cannot open {str(self.name)!r}: {reason}") from None
        raise CheckpointError(
            f"{str(self.name)!r} is not a folder, and as a repository it can neither be reached"
            " nor found in the local cache"
        )
