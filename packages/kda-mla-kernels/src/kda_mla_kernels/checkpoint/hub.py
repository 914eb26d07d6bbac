"""Finding a checkpoint: a local folder, or a Hugging Face repository through its cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_mla_kernels.checkpoint.folder import read_json
from kda_mla_kernels.checkpoint.opened import Checkpoint
from kda_mla_kernels.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

__all__ = ["fetch_file", "fetch_json", "open_checkpoint"]

FILES = [
    "*.safetensors",
    "*.json",
    "*.model",  # tiktoken.model, sentencepiece
    "*.jinja",
    "tokenizer*",
    "merges.txt",
    "vocab.txt",
]
"""What a repository is asked for: weights, configuration, tokenizer and chat template."""
NEVER = ["*.py", "*.pyc", "*.so", "*.bin", "*.pt", "*.pth", "*.pkl"]
"""Code and pickles, should one of their names match the above."""

REPOSITORY = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^@]+))?", re.ASCII)


def open_checkpoint(
    path_or_repo: str | os.PathLike[str],
    revision: str | None = None,
    *,
    offline: bool | None = None,
    progress: bool = True,
) -> Checkpoint:
    """Opens a local folder, or a Hugging Face repository that is downloaded if needed.

    A name that exists as a folder is that folder; otherwise ``ORGANISATION/NAME`` is a repository.
    Its files live in the cache that all Hugging Face tools share (``HF_HOME``, ``HF_HUB_CACHE``).
    Code files are never downloaded.

    Args:
        path_or_repo: folder, ``ORGANISATION/NAME`` or ``ORGANISATION/NAME@REVISION``.
        revision: branch, tag or commit of a repository; None is its main branch.
        offline: True never asks the network; None and False follow ``HF_HUB_OFFLINE``.
        progress: shows the download's progress on stderr.

    Raises:
        CheckpointError: nothing of this name exists (the message says what was tried), the
            repository cannot be reached and is not cached, or a file is missing or damaged.
    """
    place = _locate(path_or_repo, revision)
    if isinstance(place, Path):
        return Checkpoint(place, place.resolve().name)
    with _explained(place, bool(offline)):
        folder = _snapshot(place, bool(offline), progress)
    return Checkpoint(folder, place.name)


def fetch_file(
    path_or_repo: str | os.PathLike[str],
    name: str,
    revision: str | None = None,
    *,
    offline: bool | None = None,
) -> Path | None:
    """One small file of a checkpoint, without its weights: to decide what to do with it.

    Args:
        path_or_repo, revision, offline: as for :func:`open_checkpoint`.
        name: the file, relative to the checkpoint's folder.

    Returns:
        The file's path; None if the checkpoint has no such file. Without a network a repository
        has the files that its complete snapshot in the cache has.

    Raises:
        CheckpointError: nothing of this name exists, or it can neither be reached nor is cached.
    """
    place = _locate(path_or_repo, revision)
    if isinstance(place, Path):
        return place / name if (place / name).is_file() else None
    from huggingface_hub import errors, hf_hub_download

    with _explained(place, bool(offline)):
        try:
            found = hf_hub_download(
                place.name, name, revision=place.revision, local_files_only=bool(offline)
            )
        except errors.LocalEntryNotFoundError:  # an EntryNotFoundError too, but of the network
            _snapshot(place, offline=True, progress=False)
            return None
        except errors.EntryNotFoundError:
            return None
    return Path(found)


def fetch_json(
    path_or_repo: str | os.PathLike[str],
    name: str,
    revision: str | None = None,
    *,
    offline: bool | None = None,
) -> dict[str, Any] | None:
    """One JSON object of a checkpoint, parsed; None if there is no such file.

    Args:
        path_or_repo, name, revision, offline: as for :func:`fetch_file`.

    Raises:
        CheckpointError: the file is not a JSON object, or see :func:`fetch_file`.
    """
    file = fetch_file(path_or_repo, name, revision, offline=offline)
    if file is None:
        return None
    values = read_json(file)
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(values).__name__}")
    return values


@dataclass(frozen=True)
class _Repository:
    name: str
    revision: str | None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def _locate(path_or_repo: str | os.PathLike[str], revision: str | None) -> Path | _Repository:
    """The folder or the repository that a name means."""
    text = os.fspath(path_or_repo)
    if not text:  # as a path it would be the working directory
        raise CheckpointError(
            "the checkpoint's name is empty; give a folder, or a repository (ORGANISATION/NAME)"
        )
    folder = Path(text).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"{text!r} is a local folder, so revision {revision!r} cannot be chosen:"
                " revisions belong to repositories"
            )
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{text!r} is a file; give the folder that holds config.json and weights"
        )
    match = REPOSITORY.fullmatch(text) if isinstance(path_or_repo, str) else None
    if match is None:
        raise CheckpointError(
            f"no checkpoint {text!r}: the folder {str(folder.absolute())!r} does not exist, and"
            " the name is no Hugging Face repository (ORGANISATION/NAME)"
        )
    if revision is not None and match["revision"] is not None:
        raise CheckpointError(f"{text!r} already names a revision, so {revision!r} contradicts it")
    return _Repository(match["repo"], revision or match["revision"])


def _snapshot(repository: _Repository, offline: bool, progress: bool) -> Path:
    """The repository's folder in the cache, complete as far as the hub's listing is known."""
    # Imported here since these modules read environment variables when they are imported.
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository.name,
            revision=repository.revision,
            allow_patterns=FILES,
            ignore_patterns=NEVER,
            local_files_only=offline,
            tqdm_class=None if progress else _silent_bar(),
        )
    )


@contextmanager
def _explained(repository: _Repository, offline: bool) -> Iterator[None]:
    """Turns what the hub's library raises into one sentence that says what was tried."""
    from huggingface_hub import constants, errors

    tried = f"no folder {repository.name!r} exists here, and the repository {str(repository)!r}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{tried} needs access rights: request them on its page and log in with 'hf auth login'"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{tried} has no such revision") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"{tried} does not exist or is private") from error
    except errors.LocalEntryNotFoundError as error:
        reason = "offline mode is on" if offline or constants.HF_HUB_OFFLINE else "no connection"
        raise CheckpointError(
            f"{tried} is not (completely) in the cache {str(constants.HF_HUB_CACHE)!r} and cannot"
            f" be downloaded: {reason}"
        ) from error
    except (OSError, errors.HFValidationError) as error:
        raise CheckpointError(f"{tried} could not be downloaded: {error}") from error


def _silent_bar() -> type[tqdm]:
    from huggingface_hub.utils import tqdm

    class SilentBar(tqdm):
        """A bar that is never drawn."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return SilentBar
