"""Which modules a source file imports, and under which circumstances."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One imported top-level module."""

    file: Path
    line: int
    module: str
    """The top-level name; relative imports are left out."""
    type_only: bool
    """Below ``if TYPE_CHECKING``: never executed."""
    optional: bool
    """Inside a function or ``try``: only executed when a feature needs it."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(file: Path) -> Iterator[Import]:
    """All imports of a file, except those of the standard library."""
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    for found in _walk(tree, file, type_only=False, optional=False):
        if found.module not in sys.stdlib_module_names:
            yield found


def _walk(node: ast.AST, file: Path, *, type_only: bool, optional: bool) -> Iterator[Import]:
    for name in _modules(node):
        yield Import(file, node.lineno, name.split(".")[0], type_only, optional)  # type: ignore[attr-defined]
    optional |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try)
    guarded = node.body if isinstance(node, ast.If) and _is_type_checking(node.test) else []
    for child in ast.iter_child_nodes(node):
        only = type_only or child in guarded
        yield from _walk(child, file, type_only=only, optional=optional)


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        first = node.args[0] if node.args else None
        literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
        return [first.value] if literal and not first.value.startswith(".") else []
    return []


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
