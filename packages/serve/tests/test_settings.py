"""Where settings come from, and which one wins."""

from __future__ import annotations

import pytest
from megakernel_serve.settings import Layers, Settings, SettingsError


def layers(tmp_path, flags=None, environment=None, dotenv="", toml=""):
    (tmp_path / ".env").write_text(dotenv)
    (tmp_path / "megakernel.toml").write_text(toml)
    return Layers.read(flags or {}, environment or {}, tmp_path)


PLACES = [
    ("flags", {"port": "1"}),
    ("environment", {"MEGAKERNEL_PORT": "2"}),
    ("dotenv", "MEGAKERNEL_PORT=3\n"),
    ("toml", "port = 4\n"),
]


@pytest.mark.parametrize("missing", range(5))
def test_the_strongest_place_that_names_a_setting_wins(tmp_path, missing):
    settings = layers(tmp_path, **dict(PLACES[missing:])).resolve()
    assert settings.port == [1, 2, 3, 4, 8000][missing]


def test_empty_variables_count_as_unset(tmp_path):
    settings = layers(tmp_path, environment={"MEGAKERNEL_PORT": ""}, toml="port = 4").resolve()
    assert settings.port == 4


def test_nothing_set_gives_the_defaults(tmp_path):
    assert layers(tmp_path).resolve() == Settings()


def test_a_switch_can_be_turned_off_by_each_place(tmp_path):
    assert layers(tmp_path, flags={"thinking": False}).resolve().thinking is False
    assert layers(tmp_path, toml="thinking = false").resolve().thinking is False
    off = layers(tmp_path, environment={"MEGAKERNEL_THINKING": "off"})
    assert off.resolve().thinking is False


def test_lists_come_from_repeated_flags_commas_and_toml(tmp_path):
    flags = layers(tmp_path, flags={"api_key": ["a", "b,c"]})
    assert flags.resolve().api_key == ("a", "b", "c")
    variable = layers(tmp_path, environment={"MEGAKERNEL_API_KEY": "a, b"})
    assert variable.resolve().api_key == ("a", "b")
    assert layers(tmp_path, toml='api-key = ["a"]').resolve().api_key == ("a",)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"flags": {"port": "x"}}, "--port must be a whole number from 0 to 65535, not 'x'"),
        ({"flags": {"port": "65536"}}, "--port must be a whole number from 0 to 65535"),
        ({"flags": {"seed": str(2**64)}}, f"--seed must be a whole number .* to {2**64 - 1}"),
        ({"toml": "thinking = 'maybe'"}, "thinking in .*toml must be true or false, not 'maybe'"),
        ({"toml": "rows = true"}, "rows in .*toml must be a whole number >= 1, not True"),
        ({"environment": {"MEGAKERNEL_TOP_P": "0"}}, "MEGAKERNEL_TOP_P must be a number above 0"),
        ({"dotenv": "MEGAKERNEL_ROWS=0"}, "MEGAKERNEL_ROWS in .env must be a whole number >= 1"),
        ({"flags": {"api_key": [""]}}, "--api-key must be a comma-separated list"),
        ({"toml": "temperature = 3"}, "temperature in .*toml must be a number from 0 to 2"),
        ({"toml": "model = [1]"}, "model in .*toml must be text"),
        ({"toml": "backend = 'gpu'"}, "must be one of auto, megakernel, xla, not 'gpu'"),
        ({"flags": {"temperature": "nan"}}, "--temperature must be a number"),
        ({"flags": {"model": ""}}, "^--model must be text that is not empty, not ''$"),
        ({"flags": {"weights": " "}}, "^--weights must be text that is not empty, not ' '$"),
        ({"flags": {"revision": ""}}, "--revision must be text that is not empty"),
        ({"flags": {"host": ""}}, "--host must be text that is not empty"),
        ({"toml": "weights = ''"}, "weights in .*toml must be text that is not empty"),
    ],
)
def test_a_bad_value_is_named_with_its_place(tmp_path, place, message):
    with pytest.raises(SettingsError, match=message):
        layers(tmp_path, **place).resolve()


@pytest.mark.parametrize("seed", [0, 2**64 - 1, -(2**63)])
def test_seeds_have_64_bits(tmp_path, seed):
    assert layers(tmp_path, flags={"seed": str(seed)}).resolve().seed == seed
    assert layers(tmp_path, toml=f"seed = {seed}").resolve().seed == seed


def test_an_unknown_key_in_the_file_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match="unknown key 'prot'"):
        layers(tmp_path, toml="prot = 1")


def test_a_damaged_file_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match="not valid TOML"):
        layers(tmp_path, toml="port =")


def test_a_named_file_must_exist_and_the_default_one_need_not(tmp_path):
    assert Layers.read({}, {}, tmp_path).config == {}
    with pytest.raises(SettingsError, match=r"cannot read .*other\.toml"):
        Layers.read({}, {}, tmp_path, tmp_path / "other.toml")
    with pytest.raises(SettingsError, match="cannot read"):
        Layers.read({}, {"MEGAKERNEL_CONFIG": str(tmp_path / "other.toml")}, tmp_path)
