"""Imports point downwards and are declared: read from the sources, nothing is executed."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions

import pytest
from packaging.utils import canonicalize_name

from .imports import imports_of
from .workspace import LAYERS, ROOT, packages, sources

OWN = {package.import_name: package for package in packages()}
MODELS = {"megakernel_kimi", "megakernel_qwen"}


def names(requirements) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


@cache
def providers() -> Mapping[str, list[str]]:
    return packages_distributions()


def distributions_of(module: str) -> set[str]:
    if module in OWN:
        return {OWN[module].distribution}
    return {canonicalize_name(name) for name in providers().get(module, [module])}


def test_every_package_has_a_layer():
    assert set(OWN) == set().union(*LAYERS)


def test_imports_point_to_lower_layers_only(package):
    allowed = set().union(*LAYERS[: package.layer]) | {package.import_name}
    wrong = [
        str(found)
        for file in sources(package.folder / "src")
        for found in imports_of(file)
        if found.module in OWN and found.module not in allowed
    ]
    assert not wrong, wrong


def test_serve_and_drafters_know_models_by_their_protocol_only():
    wrong = [
        str(found)
        for name in ("megakernel_serve", "spec_dspark")
        for file in sources(OWN[name].folder / "src")
        for found in imports_of(file)
        if found.module in MODELS
    ]
    assert not wrong, wrong


def test_declared_sister_packages_are_lower_too(package):
    declared = names(package.dependencies) & {p.distribution for p in packages()}
    lower = {p.distribution for p in packages() if p.layer < package.layer}
    assert declared <= lower


def test_every_import_of_a_package_is_declared(package):
    """Extras count where a feature asks for them; type checkers find the rest."""
    required = names(package.dependencies) | {package.distribution}
    optional = required | names(package.extra_dependencies)
    wrong = [
        str(found)
        for file in sources(package.folder / "src")
        for found in imports_of(file)
        if not found.type_only
        and not distributions_of(found.module) & (optional if found.optional else required)
    ]
    assert not wrong, wrong


def test_every_import_of_the_tests_is_declared(package):
    declared = {package.distribution} | names(
        (*package.dependencies, *package.extra_dependencies, *package.test_dependencies)
    )
    tests = sources(package.folder / "tests")
    local = {part for file in tests for part in (file.stem, *file.relative_to(ROOT).parts)}
    wrong = [
        str(found)
        for file in tests
        for found in imports_of(file)
        if found.module not in local and not distributions_of(found.module) & declared
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import jax.numpy as jnp, os", [("jax", False, False)]),
        ("from a.b import c\nfrom . import d\nfrom .e import f", [("a", False, False)]),
        ("def f():\n    import a", [("a", False, True)]),
        ("try:\n    import a\nexcept ImportError:\n    a = None", [("a", False, True)]),
        (
            "if TYPE_CHECKING:\n    import a\nelse:\n    import b",
            [("a", True, False), ("b", False, False)],
        ),
        ("importlib.import_module('a.b')", [("a", False, False)]),
        ("class C:\n    if True:\n        import a", [("a", False, False)]),
    ],
)
def test_the_reader_of_imports_sees_every_form(tmp_path, source, expected):
    file = tmp_path / "module.py"
    file.write_text(source)
    seen = [(found.module, found.type_only, found.optional) for found in imports_of(file)]
    assert seen == expected
