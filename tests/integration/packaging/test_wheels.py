"""What is in a wheel: all of the package, its licence and types, and nothing beside."""

import zipfile
from email import message_from_bytes

from packaging.requirements import Requirement

from .isolation import build_wheel_from
from .workspace import packages


def contents(wheel) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(package, built):
    info = f"{package.import_name}-{package.version}.dist-info"
    return message_from_bytes(contents(built[package].wheel)[f"{info}/METADATA"])


def test_a_wheel_holds_the_package_its_licence_and_nothing_else(package, built):
    found = set(contents(built[package].wheel))
    info = f"{package.import_name}-{package.version}.dist-info"
    records = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}
    if {"scripts", "entry-points"} & set(package.pyproject["project"]):
        records.add("entry_points.txt")
    assert f"{package.import_name}/py.typed" in found
    assert found == built[package].sources | {f"{info}/{name}" for name in records}


def test_no_test_is_shipped(package, built):
    assert not [name for name in contents(built[package].wheel) if "test" in name.split("/")]


def test_a_source_distribution_builds_the_same_wheel(package, built, tmp_path):
    assert contents(build_wheel_from(built[package].sdist, tmp_path)) == contents(
        built[package].wheel
    )


def test_the_metadata_says_what_an_index_page_needs(package, built):
    found = metadata(package, built)
    assert found["Name"] == package.distribution
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in found.get_all("Classifier")
    links = {line.split(",")[0] for line in found.get_all("Project-URL")}
    assert links >= {"Source", "Changelog", "Issues"}
    assert found.get_payload().startswith(f"# {package.distribution}")


def test_tpu_libraries_come_only_with_the_extra(package, built):
    required = [Requirement(line) for line in metadata(package, built).get_all("Requires-Dist")]
    tpu = [found for found in required if found.name == "jax" and found.extras == {"tpu"}]
    assert tpu
    assert all(found.marker and found.marker.evaluate({"extra": "tpu"}) for found in tpu)
    assert not any(found.marker.evaluate({"extra": ""}) for found in tpu)
    assert "libtpu" not in {found.name for found in required}


def test_sister_packages_accept_each_others_versions():
    by_name = {package.distribution: package for package in packages()}
    for package in packages():
        for requirement in (*package.dependencies, *package.extra_dependencies):
            if requirement.name in by_name:
                version = by_name[requirement.name].version
                assert requirement.specifier.contains(version), f"{package}: {requirement}"
