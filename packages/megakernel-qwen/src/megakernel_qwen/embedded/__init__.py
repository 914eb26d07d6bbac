"""The tiny checkpoint that ships with the package, in the format of the real ones."""

from importlib.resources import files
from pathlib import Path

__all__ = ["folder"]


def folder() -> Path:
    """The checkpoint's folder.

    Raises:
        RuntimeError: the package was imported from an archive, where it has no folder.
    """
    found = files(__name__)
    if not isinstance(found, Path):
        raise RuntimeError(f"the embedded model needs a package on disk, not {found}")
    return found
