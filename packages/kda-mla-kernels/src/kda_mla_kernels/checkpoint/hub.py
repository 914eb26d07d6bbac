"""Finding a checkpoint: a local folder, or a Hugging Face repository through its cache."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kda_mla_kernels.checkpoint.opened import Checkpoint
from kda_mla_kernels.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

__all__ = ["open_checkpoint"]

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
    text = os.fspath(path_or_repo)
    folder = Path(text).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"{text!r} is a local folder, so revision {revision!r} cannot be chosen:"
                " revisions belong to repositories"
            )
        return Checkpoint(folder, folder.resolve().name)
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
    found = _snapshot(match["repo"], revision or match["revision"], bool(offline), progress)
    return Checkpoint(found, match["repo"])


def _snapshot(repo: str, revision: str | None, offline: bool, progress: bool) -> Path:
    """The repository's folder in the cache, complete as far as the hub's listing is known."""
    # Imported here since these modules read environment variables when they are imported.
    from huggingface_hub import constants, errors, snapshot_download

    where = repo if revision is None else f"{repo}@{revision}"
    tried = f"no folder {repo!r} exists here, and the repository {where!r}"
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=FILES,
                ignore_patterns=NEVER,
                local_files_only=offline,
                tqdm_class=None if progress else _silent_bar(),
            )
        )
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
