"""The guard of releases, and what the workflows must hold."""

import importlib.util
import re

import pytest

from .workspace import ROOT, packages

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def guard():
    file = ROOT / ".github" / "scripts" / "check_release.py"
    spec = importlib.util.spec_from_file_location("check_release", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def workspace(tmp_path):
    """Two packages, the upper of which requires the lower."""
    for name, version, needs in (
        ("pool", "0.3.1", ""),
        ("pool-kernels", "1.2.0", '"pool>=0.3,<0.4"'),
    ):
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        project = f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = [{needs}]\n'
        (folder / "pyproject.toml").write_text(project)
        sections = ["# Changelog", "## Unreleased", f"## {version} - 2026-01-01", "- New."]
        sections += ["## 0.0.1", "- Old."]
        (folder / "CHANGELOG.md").write_text("\n\n".join(sections))
    return tmp_path


@pytest.mark.parametrize(
    ("tag", "name"), [("pool-v0.3.1", "pool"), ("pool-kernels-v1.2.0", "pool-kernels")]
)
def test_a_tag_that_fits_gives_its_package_and_notes(guard, workspace, tag, name):
    folder, distribution, notes = guard.check(tag, workspace)
    assert (folder, distribution, notes) == (workspace / "packages" / name, name, "- New.")


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("v0.3.1", "must be PACKAGE-v"),
        ("pool-0.3.1", "must be PACKAGE-v"),
        ("pool-v0.3", "must be PACKAGE-v"),
        ("other-v1.0.0", "with one of: pool, pool-kernels"),
        ("pool-v0.3.2", "names version 0.3.2, the package has 0.3.1"),
        ("pool-v1.2.0", "names version 1.2.0, the package has 0.3.1"),
    ],
)
def test_a_tag_that_fits_nothing_is_refused(guard, workspace, tag, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        guard.check(tag, workspace)


def test_a_release_without_notes_is_refused(guard, workspace):
    (workspace / "packages" / "pool" / "CHANGELOG.md").write_text(
        "## Unreleased\n\n## 0.3.10\n\n- x\n"
    )
    with pytest.raises(ValueError, match=r"no section '## 0\.3\.1'"):
        guard.check("pool-v0.3.1", workspace)


def test_a_release_that_excludes_its_sister_is_refused(guard, workspace):
    file = workspace / "packages" / "pool" / "pyproject.toml"
    file.write_text(file.read_text().replace("0.3.1", "0.4.0"))
    with pytest.raises(ValueError, match=r"pool<0\.4,>=0\.3 excludes the present 0\.4\.0"):
        guard.check("pool-kernels-v1.2.0", workspace)


def test_no_package_name_is_the_start_of_anothers_tag():
    names = [package.distribution for package in packages()]
    assert not [(one, two) for one in names for two in names if two.startswith(f"{one}-v")]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_by_commit(workflow):
    used = re.findall(r"uses: (\S+)", workflow.read_text(encoding="utf-8"))
    assert used
    assert not [action for action in used if not re.search(r"@[0-9a-f]{40}$", action)]


def test_every_package_is_tested_alone_on_each_push():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    listed = re.search(r"package:\n((?: +- \S+\n)+)", text)
    assert listed is not None
    names = {line.strip().removeprefix("- ") for line in listed[1].splitlines()}
    assert names == {package.distribution for package in packages()}


def test_only_the_publishing_job_may_ask_for_an_identity():
    text = "\n".join(file.read_text(encoding="utf-8") for file in WORKFLOWS)
    assert text.count("id-token: write") == 1
    publish = re.search(r"^  publish:\n(.*?)(?=^  \w|\Z)", text, re.M | re.S)
    assert publish is not None
    assert "id-token: write" in publish[1]
    assert "environment: pypi-" in publish[1]
    assert "actions/checkout" not in publish[1]
