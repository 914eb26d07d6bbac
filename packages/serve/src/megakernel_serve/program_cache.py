"""Compiled programs kept on disk, so that the second start of a model does not compile again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["default_folder", "keep_programs"]

_WORTH_KEEPING_SECONDS = 0.5


def default_folder() -> Path:
    """``megakernel/programs`` in the user's cache folder (``XDG_CACHE_HOME``)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megakernel" / "programs"


def keep_programs(folder: Path | None = None) -> None:
    """Lets jax keep compiled programs in a folder, unless the user has chosen one for jax.

    Programs are keyed by their code, the jax version and the machine, so an old one is never run
    by mistake; the folder may be deleted at any time.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(folder or default_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_SECONDS)
