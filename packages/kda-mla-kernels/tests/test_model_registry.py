"""Finding model packages by entry point, with made-up packages in place of installed ones."""

import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType

import pytest
from kda_mla_kernels import model


def make_package(monkeypatch, family: str, *model_types: str) -> ModuleType:
    """An importable module with the attributes of a model package."""
    module = ModuleType(f"registry_test_{family}")
    module.family = family
    module.model_types = frozenset(model_types)
    module.default_repo = f"org/{family}"
    module.variable_prefix = family.upper()
    module.embedded_checkpoint = lambda: None
    module.load = lambda *args, **kwargs: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def install(monkeypatch, *values: tuple[str, str]) -> None:
    """Makes (family, module) pairs the only entry points there are."""
    group = model.ENTRY_POINT_GROUP
    installed = EntryPoints(EntryPoint(name, value, group) for name, value in values)
    monkeypatch.setattr(model, "entry_points", lambda **query: installed.select(**query))


@pytest.fixture
def two(monkeypatch) -> tuple[ModuleType, ModuleType]:
    one = make_package(monkeypatch, "alpha", "alpha_1", "alpha_2")
    other = make_package(monkeypatch, "beta", "beta_text")
    install(monkeypatch, ("alpha", one.__name__), ("beta", other.__name__))
    return one, other


def test_packages_are_listed_by_family_without_importing_them(monkeypatch):
    install(monkeypatch, ("gamma", "no_such_module_anywhere.package"))
    assert set(model.packages()) == {"gamma"}
    assert model.packages()["gamma"].value == "no_such_module_anywhere.package"


def test_entry_points_of_other_groups_do_not_count(monkeypatch):
    foreign = EntryPoints([EntryPoint("alpha", "json", "console_scripts")])
    monkeypatch.setattr(model, "entry_points", lambda **query: foreign.select(**query))
    assert model.packages() == {}


def test_a_family_is_found_by_name(two):
    assert model.find_package("alpha") is two[0]
    assert model.find_package("beta") is two[1]
    assert isinstance(model.find_package("beta"), model.ModelPackage)


def test_an_object_can_be_a_package_too(monkeypatch):
    holder = ModuleType("registry_test_holder")
    holder.package = make_package(monkeypatch, "delta", "delta_1")
    monkeypatch.setitem(sys.modules, holder.__name__, holder)
    install(monkeypatch, ("delta", "registry_test_holder:package"))
    assert model.find_package("delta") is holder.package


def test_only_the_asked_package_is_imported(monkeypatch):
    package = make_package(monkeypatch, "alpha", "alpha_1")
    install(monkeypatch, ("broken", "no_such_module_anywhere"), ("alpha", package.__name__))
    assert model.find_package("alpha") is package


def test_an_unknown_family_lists_those_installed(two):
    with pytest.raises(LookupError, match=r"named 'gamma' is installed \(installed: alpha, beta\)"):
        model.find_package("gamma")


def test_no_installed_package_is_said_plainly(monkeypatch):
    install(monkeypatch)
    with pytest.raises(LookupError, match=r"\(installed: none\)"):
        model.find_package("alpha")
    with pytest.raises(LookupError, match=r"\(known: none\)"):
        model.package_for_model_type("alpha_1")


@pytest.mark.parametrize(
    ("model_type", "place"), [("alpha_1", 0), ("alpha_2", 0), ("beta_text", 1)]
)
def test_a_model_type_leads_to_its_package(two, model_type, place):
    assert model.package_for_model_type(model_type) is two[place]


def test_an_unknown_model_type_lists_the_known_ones(two):
    with pytest.raises(
        LookupError, match=r"loads model_type 'llama' \(known: alpha_1, alpha_2, beta_text\)"
    ):
        model.package_for_model_type("llama")
