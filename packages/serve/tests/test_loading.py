"""What is loaded when the command line says little, much, or something that contradicts itself."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import kda_mla_kernels.model as registry
import pytest
from bigram import BigramPackage
from bigram import package as bigram
from kda_mla_kernels.errors import CheckpointError
from megakernel_serve import loading
from megakernel_serve.loading import choose, load_model
from megakernel_serve.settings import Layers, SettingsError


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Makes the test family known under some names, as if so many packages were installed."""
    monkeypatch.chdir(tmp_path)

    def entry_points(*names):
        found = [EntryPoint(name, "bigram:package", "megakernel.models") for name in names]
        monkeypatch.setattr(registry, "entry_points", lambda group: found)

    return entry_points


def chosen(family=None, **flags):
    layers = Layers(flags, {}, {}, {})
    return choose(SimpleNamespace(family=family, settings=layers.resolve(), layers=layers))


def test_the_only_installed_family_brings_its_small_checkpoint(install):
    install("bigram")
    assert chosen().checkpoint == bigram.embedded_checkpoint()


def test_of_several_families_none_is_preferred(install):
    install("zeta", "alpha")
    with pytest.raises(LookupError, match=r"\(alpha, zeta\): .* as in --model alpha"):
        chosen()
    assert chosen(model="zeta").checkpoint == bigram.embedded_checkpoint()


@pytest.fixture
def bare_family(monkeypatch):
    """The entry point of a family that ships no small checkpoint."""

    def embedded_checkpoint():
        raise CheckpointError("this package ships no small checkpoint")

    package = SimpleNamespace(embedded_checkpoint=embedded_checkpoint)
    monkeypatch.setitem(sys.modules, "bare_family", SimpleNamespace(package=package))
    return EntryPoint("bare", "bare_family:package", "megakernel.models")


def test_a_family_without_a_small_checkpoint_does_not_stand_in_the_way(
    install, bare_family, monkeypatch
):
    install("bigram")
    both = [bare_family, *registry.entry_points(group="megakernel.models")]
    monkeypatch.setattr(registry, "entry_points", lambda group: both)
    assert chosen().checkpoint == bigram.embedded_checkpoint()
    monkeypatch.setattr(registry, "entry_points", lambda group: [bare_family])
    with pytest.raises(LookupError, match=r"no installed model package \(bare\) ships a small"):
        chosen()


def test_without_any_family_the_error_says_what_to_install(install):
    install()
    with pytest.raises(LookupError, match="no model package is installed; try: pip install"):
        chosen()


def test_a_folder_comes_before_a_family_of_the_same_name(install, tmp_path):
    install("bigram")
    (tmp_path / "bigram").mkdir()
    (tmp_path / "bigram" / "config.json").write_text(json.dumps({"model_type": "bigram"}))
    assert chosen(model="bigram").checkpoint == "bigram"


def test_a_folder_may_be_named_from_home(install, tmp_path, monkeypatch):
    install("bigram")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "bigram"}))
    assert chosen(model="~/mine").package is bigram
    with pytest.raises(CheckpointError, match="no checkpoint '~/other'"):
        chosen(model="~/other")


@pytest.mark.parametrize("model", ["org/tiny", "org/tiny@v1"])
def test_a_repository_is_asked_for_the_config_of_its_revision(
    install, monkeypatch, tmp_path, model
):
    """The hub's client is replaced by a note of what it is asked for."""
    import huggingface_hub

    install("bigram")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "bigram"}))
    asked = []

    def download(repo, name, *, revision, local_files_only):
        asked.append((repo, name, revision))
        return str(config)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert chosen(model=model).package is bigram
    assert asked == [("org/tiny", "config.json", "v1" if "@" in model else None)]


def test_two_revisions_contradict_each_other(install):
    install("bigram")
    with pytest.raises(CheckpointError, match="already names a revision, so 'v2' contradicts it"):
        chosen(model="org/tiny@v1", revision="v2")


def test_a_familys_own_command_may_load_its_small_checkpoint_too(install):
    install("bigram", "other")
    assert chosen(family="bigram").checkpoint == "example/bigram"
    assert chosen(family="bigram", model="bigram").checkpoint == bigram.embedded_checkpoint()


# Converted weights.


@dataclass(frozen=True)
class ConvertingPackage(BigramPackage):
    """The test family with converted weights; its models are named after what ``load`` is given."""

    weights_variable: str = "BIGRAM_CONVERTED"

    def load(self, checkpoint, *, weights="auto", **options):
        model = super().load(checkpoint, **options)
        model.info = replace(model.info, name=weights)
        return model


@pytest.fixture
def load_converted(monkeypatch, install):
    """What a converting package is given as weights."""
    package = SimpleNamespace(package=ConvertingPackage())
    monkeypatch.setitem(sys.modules, "converting_family", package)
    entry = EntryPoint("bigram", "converting_family:package", "megakernel.models")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    monkeypatch.setattr(loading, "keep_programs", lambda: None)
    monkeypatch.delenv("BIGRAM_CONVERTED", raising=False)

    def given(flags=(), environment=(), config=(), dotenv=()):
        layers = Layers(dict(flags), dict(environment), dict(dotenv), dict(config))
        asked = SimpleNamespace(family=None, settings=layers.resolve(), layers=layers)
        return load_model(choose(asked), asked.settings).info.name

    return given


def test_weights_reach_the_package_and_nothing_does_if_there_are_none(load_converted):
    assert load_converted() == "auto"
    assert load_converted({"weights": "a"}) == "a"
    assert load_converted({}, {"MEGAKERNEL_WEIGHTS": "b"}, {"weights": "c"}) == "b"
    assert load_converted({}, {}, {"weights": "c"}) == "c"


def test_the_familys_variable_is_left_to_the_package_and_beaten_by_the_flag(
    load_converted, monkeypatch
):
    monkeypatch.setenv("BIGRAM_CONVERTED", "own")
    assert load_converted({}, {"MEGAKERNEL_WEIGHTS": "b"}, {"weights": "c"}) == "auto"
    assert load_converted({"weights": "a"}) == "a"
    monkeypatch.setenv("BIGRAM_CONVERTED", "")
    assert load_converted({}, {"MEGAKERNEL_WEIGHTS": "b"}) == "b"


def test_an_empty_variable_of_the_family_does_not_hide_the_one_in_dotenv(
    load_converted, monkeypatch
):
    monkeypatch.setenv("BIGRAM_CONVERTED", "")
    dotenv = {"BIGRAM_CONVERTED": "own"}
    assert load_converted({}, {"MEGAKERNEL_WEIGHTS": "b"}, dotenv=dotenv) == "auto"
    assert os.environ["BIGRAM_CONVERTED"] == "own"
    monkeypatch.setenv("BIGRAM_CONVERTED", "stronger")
    assert load_converted(dotenv=dotenv) == "auto"
    assert os.environ["BIGRAM_CONVERTED"] == "stronger"


@pytest.mark.parametrize(
    ("places", "named"),
    [
        (({"weights": "a"}, {}, {}, {}), "--weights"),
        (({}, {"MEGAKERNEL_WEIGHTS": "a"}, {}, {}), "MEGAKERNEL_WEIGHTS"),
        (({}, {}, {"MEGAKERNEL_WEIGHTS": "a"}, {}), "MEGAKERNEL_WEIGHTS in .env"),
        (({}, {}, {}, {"weights": "a"}), "weights in megakernel.toml"),
    ],
)
def test_a_family_without_converted_weights_is_given_none(install, places, named):
    install("bigram")
    layers = Layers(*places)
    with pytest.raises(SettingsError, match=f"^{named} does not go with the bigram family, which"):
        choose(SimpleNamespace(family=None, settings=layers.resolve(), layers=layers))
