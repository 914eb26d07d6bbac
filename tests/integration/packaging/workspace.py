"""Facts about the workspace: its packages, their layers, and what each declares."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"tpu_collectives", "vmem_pool"}),
    frozenset({"kda_mla_kernels"}),
    frozenset({"megakernel_kimi", "megakernel_qwen"}),
    frozenset({"spec_dspark"}),
    frozenset({"megakernel_serve"}),
)
"""Import names, lowest layer first. Imports point to strictly lower layers only."""


@dataclass(frozen=True)
class Package:
    """One member of the workspace."""

    folder: Path

    @cached_property
    def pyproject(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))

    @cached_property
    def distribution(self) -> str:
        return self.pyproject["project"]["name"]

    @cached_property
    def version(self) -> str:
        return self.pyproject["project"]["version"]

    @cached_property
    def import_name(self) -> str:
        return self.distribution.replace("-", "_")

    @cached_property
    def layer(self) -> int:
        return next(at for at, names in enumerate(LAYERS) if self.import_name in names)

    @cached_property
    def dependencies(self) -> tuple[Requirement, ...]:
        return tuple(map(Requirement, self.pyproject["project"]["dependencies"]))

    @cached_property
    def extra_dependencies(self) -> tuple[Requirement, ...]:
        extras = self.pyproject["project"].get("optional-dependencies", {})
        return tuple(Requirement(text) for group in extras.values() for text in group)

    @cached_property
    def test_dependencies(self) -> tuple[Requirement, ...]:
        return tuple(map(Requirement, self.pyproject["dependency-groups"]["test"]))

    def __str__(self) -> str:
        return self.distribution


@cache
def packages() -> tuple[Package, ...]:
    """All members, lowest layer first."""
    members = [Package(file.parent) for file in (ROOT / "packages").glob("*/pyproject.toml")]
    return tuple(sorted(members, key=lambda package: (package.layer, package.distribution)))


@cache
def member(name: str) -> Package | None:
    """The member with this distribution name, None for a third party's."""
    wanted = canonicalize_name(name)
    return next((p for p in packages() if canonicalize_name(p.distribution) == wanted), None)


def sources(folder: Path) -> list[Path]:
    """Python files below a folder."""
    return sorted(file for file in folder.rglob("*.py") if "__pycache__" not in file.parts)


def repository_files(folder: Path = ROOT) -> list[Path]:
    """Files below a folder that are, or would be, under version control."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    files = {folder / name for name in listing.stdout.split("\0") if name}
    return sorted(file for file in files if file.is_file())
