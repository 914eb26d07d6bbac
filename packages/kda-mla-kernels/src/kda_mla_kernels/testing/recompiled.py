"""The same model, compiled otherwise."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

__all__ = ["recompiled"]


def recompiled(model: Any, options: dict[str, Any], **changes: Any) -> Any:
    """A model whose programs are compiled with more options; weights are shared.

    Args:
        model: a dataclass with :class:`~kda_mla_kernels.backend.Programs` as ``programs``.
        options: of the compiler, beside those that the programs have.
        changes: fields of the programs that differ.
    """
    old = model.programs
    kind = type(old)
    parts = {one.name: getattr(old, one.name) for one in fields(old)} | changes
    own = {"compiler_options": {**kind.compiler_options, **options}}
    return replace(model, programs=type(kind.__name__, (kind,), own)(**parts))
