"""Refuses a release tag that does not fit the package it names.

A tag is ``DISTRIBUTION-vVERSION``. The version must be the package's own, its changelog must have a
section for it, and the sister packages that it requires must accept each other's versions. Prints
``package=FOLDER`` and ``distribution=NAME`` for the workflow, and writes the changelog's section to
the file given as the second argument.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
TAG = re.compile(r"(?P<distribution>[a-z0-9-]+)-v(?P<version>\d+\.\d+\.\d+([a-z]+\d+)?)")


def projects(root: Path) -> dict[str, tuple[Path, dict]]:
    """Folder and ``[project]`` table of every package, by distribution name."""
    files = sorted((root / "packages").glob("*/pyproject.toml"))
    tables = [(file.parent, tomllib.loads(file.read_text(encoding="utf-8"))) for file in files]
    return {table["project"]["name"]: (folder, table["project"]) for folder, table in tables}


def changelog_section(text: str, version: str) -> str:
    """The text under the heading of a version; empty if there is none."""
    found = re.search(rf"^## \[?{re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return found[1].strip() if found else ""


def check(tag: str, root: Path = ROOT) -> tuple[Path, str, str]:
    """Folder, distribution and release notes of a tag.

    Raises:
        ValueError: the tag fits no package in this state; the message says why.
    """
    match = TAG.fullmatch(tag)
    members = projects(root)
    if match is None or match["distribution"] not in members:
        raise ValueError(
            f"tag {tag!r} must be PACKAGE-vMAJOR.MINOR.PATCH with one of: {', '.join(members)}"
        )
    folder, project = members[match["distribution"]]
    version = match["version"]
    if project["version"] != version:
        raise ValueError(
            f"tag {tag!r} names version {version}, the package has {project['version']}"
        )
    notes = changelog_section((folder / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if not notes:
        raise ValueError(f"the changelog of {match['distribution']} has no section '## {version}'")
    for requirement in map(Requirement, project["dependencies"]):
        sister = members.get(requirement.name)
        if sister and not requirement.specifier.contains(sister[1]["version"]):
            raise ValueError(f"{requirement} excludes the present {sister[1]['version']}")
    return folder, match["distribution"], notes


def main(arguments: list[str]) -> int:
    """Checks ``TAG`` and writes its notes to ``FILE``."""
    tag, notes_file = arguments
    try:
        folder, distribution, notes = check(tag)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    Path(notes_file).write_text(notes + "\n", encoding="utf-8")
    print(f"package={folder.relative_to(ROOT).as_posix()}\ndistribution={distribution}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
