"""Wheels of all packages and one isolated environment per package, each made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from .isolation import Environment, build, create
from .workspace import Package, packages, repository_files


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "isolated: installs packages; seconds per package")


@dataclass(frozen=True)
class Built:
    """What was built of one package."""

    wheel: Path
    sdist: Path
    sources: frozenset[str]
    """What the wheel must hold: files below ``src`` at that time."""


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> dict[Package, Built]:
    """Wheel and source distribution of every package."""
    target = tmp_path_factory.mktemp("dist")

    def built_now(package: Package) -> Built:
        source = package.folder / "src"
        files = {file.relative_to(source).as_posix() for file in repository_files(source)}
        return Built(*build(package, target), frozenset(files))

    return {package: built_now(package) for package in packages()}


@pytest.fixture(scope="session", params=packages(), ids=str)
def package(request) -> Package:
    """Each package in turn."""
    return request.param


@pytest.fixture(scope="session")
def environment_of(built, tmp_path_factory) -> Callable[[Package], Environment]:
    """Environments that hold one package and its declared dependencies; not to be added to."""

    @cache
    def make(package: Package) -> Environment:
        folder = tmp_path_factory.mktemp("environment") / package.import_name
        return create(folder, built[package].wheel.parent, package)

    return make


@pytest.fixture
def environment(package, environment_of) -> Environment:
    """The environment of the test's package."""
    return environment_of(package)
