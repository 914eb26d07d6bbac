"""Environments in which one package and its declared dependencies exist, and nothing else.

The package's wheel and those of its sister packages are really installed, by pip and without an
index, so that pip checks every declared range. Third-party distributions are not downloaded again:
those in the closure of the declared requirements are linked from the running environment. All else
(the source tree, packages that happen to be installed) is out of reach.

From the root of the workspace, this runs all of a package's own tests that way::

    python -m tests.integration.packaging.isolation vmem-pool [pytest arguments]
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .workspace import Package, member, packages

PLUGIN = "bounded_run"

FOREIGN = ("PYTHON", "PYTEST", "HF_", "XLA_", "JAX_", "COV_")
SHARED_PROGRAMS = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
"""What an environment is not told of the running one, except for where compiled programs are."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment and what may be run in it."""

    folder: Path
    wheels: Path

    @property
    def scripts(self) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        return self.scripts / "python"

    @property
    def site_packages(self) -> Path:
        base = {"base": str(self.folder), "platbase": str(self.folder)}
        return Path(sysconfig.get_path("purelib", "venv", base))

    def run(
        self, *command: str | Path, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command away from the source tree, on CPU; output is captured."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in SHARED_PROGRAMS or not name.startswith(FOREIGN)
        }
        return subprocess.run(
            [str(part) for part in command],
            cwd=cwd or self.folder,
            env={**inherited, "JAX_PLATFORMS": "cpu", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
        )

    def install(self, requirements: Iterable[Requirement], target: Path | None = None) -> None:
        """Links third-party distributions and installs sister packages, with all they require.

        Args:
            requirements: what to install.
            target: a folder that is no part of the environment; None is the environment.
        """
        third_party, sisters = _closure(requirements)
        for found in third_party:
            _link(found, target or self.site_packages)
        if sisters:
            done = self.run(
                *_pip(self.python),
                "install",
                "--quiet",
                "--no-index",
                "--no-compile",
                "--disable-pip-version-check",
                f"--find-links={self.wheels}",
                *(["--no-deps", f"--target={target}"] if target else []),
                *(f"{sister.distribution}=={sister.version}" for sister in sisters),
            )
            if done.returncode:
                raise RuntimeError(
                    f"pip could not install {', '.join(map(str, sisters))}:\n{done.stdout}"
                )


def build(package: Package, target: Path) -> tuple[Path, Path]:
    """Builds wheel and source distribution with the declared back end."""
    _hatchling(package.folder, target, "wheel", "sdist")
    stem = f"{package.import_name}-{package.version}"
    return target / f"{stem}-py3-none-any.whl", target / f"{stem}.tar.gz"


def build_wheel_from(sdist: Path, target: Path) -> Path:
    """Unpacks a source distribution and builds its wheel, as an installer without wheels does."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(sdist, folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        _hatchling(unpacked, target, "wheel")
    (wheel,) = target.glob("*.whl")
    return wheel


def _hatchling(folder: Path, target: Path, *kinds: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--directory", target]
    command += [part for kind in kinds for part in ("--target", kind)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        what = " and ".join(kinds)
        raise RuntimeError(f"building {what} of {folder} failed:\n{done.stdout}{done.stderr}")


def create(folder: Path, wheels: Path, package: Package) -> Environment:
    """An environment with one package and what it declares."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    environment = Environment(folder.resolve(), wheels)
    environment.install([Requirement(f"{package.distribution}=={package.version}")])
    return environment


def copy_tests(package: Package, target: Path) -> Path:
    """The package's tests, configuration and papers (README examples are tested), no sources."""
    target.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(package.folder / name, target)
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(package.folder / "tests", target / "tests", ignore=ignored)
    return target


def run_tests(
    environment: Environment, package: Package, folder: Path, *arguments: str, seconds: float = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a package's own tests outside the source tree.

    Args:
        folder: must not exist; the tests are copied there.
        arguments: passed to pytest.
        seconds: no further test starts after this time; 0 runs all.
    """
    where = copy_tests(package, folder)
    tools = where / "tools"
    tools.mkdir()
    environment.install(package.test_dependencies, tools)
    shutil.copy(Path(__file__).with_name(f"{PLUGIN}.py"), tools)
    return environment.run(
        environment.python,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN),
        *(f"--rootdir={where}", f"--run-seconds={seconds}", *arguments, "tests"),
        cwd=where,
        PYTHONPATH=str(tools),
        PYTHONDONTWRITEBYTECODE="1",
    )


def _pip(python: Path) -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError("isolated installs need pip in the running environment")
    return [sys.executable, "-m", "pip", "--python", str(python)]


def _closure(requirements: Iterable[Requirement]) -> tuple[list[Distribution], list[Package]]:
    """Installed third-party distributions and sister packages that the requirements lead to."""
    third_party: dict[str, Distribution] = {}
    sisters: dict[str, Package] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = list(requirements)
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if sister := member(name):
            sisters[name] = sister
            queue += sister.dependencies
            continue
        try:
            third_party[name] = distribution(name)
        except PackageNotFoundError:
            raise RuntimeError(f"{requirement} is declared but not installed here") from None
        for text in third_party[name].requires or ():
            inner = Requirement(text)
            applies = [{"extra": extra} for extra in ("", *extras)]
            if inner.marker is None or any(map(inner.marker.evaluate, applies)):
                queue.append(inner)
    return list(third_party.values()), list(sisters.values())


def _link(found: Distribution, site_packages: Path) -> None:
    """Makes a distribution's top-level modules and its metadata visible."""
    if found.files is None:
        raise RuntimeError(f"{found.name} does not list its files")
    for part in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
        link, original = site_packages / part, Path(str(found.locate_file(part)))
        if not link.exists():
            link.symlink_to(original, target_is_directory=original.is_dir())


def main(arguments: list[str]) -> int:
    """Runs all tests of the named package."""
    package = member(arguments[0]) if arguments else None
    if package is None:
        names = ", ".join(map(str, packages()))
        print(
            f"usage: isolation PACKAGE [pytest arguments], PACKAGE one of {names}", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder) / "wheels"
        for each in packages():
            build(each, wheels)
        environment = create(Path(folder) / "environment", wheels, package)
        done = run_tests(environment, package, Path(folder) / "own", *arguments[1:])
    print(done.stdout)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
