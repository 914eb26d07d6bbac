"""Converted weights through the command line: where they are named, what loads, what is refused.

That the loaded weights have the right bits and give the right tokens is tested in megakernel-kimi.
"""

import base64
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from megakernel_kimi import convert
from megakernel_serve import loading
from megakernel_serve.cli import execute
from megakernel_serve.settings import Layers

VARIABLE = "KIMI_PRESHARDED_WEIGHTS"
GOLDEN = Path(__file__).parents[3] / "packages/megakernel-kimi/tests/golden/k3_tiny"
CONTROL = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
RANKS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The golden checkpoint with a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("source") / "tiny"
    folder.mkdir()
    for file in [GOLDEN / "config.json", *GOLDEN.glob("model*")]:
        (folder / file.name).symlink_to(file)
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (folder / "tiktoken.model").write_text("".join(lines))
    tokens = {str(500 + i): {"content": name, "special": True} for i, name in enumerate(CONTROL)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    return folder


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "converted"
    arguments = [checkpoint, folder, "--ranks", RANKS, "--numerics", "f32"]
    assert convert.main([str(argument) for argument in arguments]) == 0
    return folder


@pytest.fixture
def info(monkeypatch, tmp_path, capfd):
    """``megakernel info`` in this process and an empty folder: its output, or its one error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "keep_programs", lambda: None)
    before = dict(os.environ)

    def run(*arguments, code=0, **variables):
        os.environ.update(variables)
        try:
            returned = execute(["info", *map(str, arguments)])
        finally:
            os.environ.clear()
            os.environ.update(before)
        output = capfd.readouterr()
        assert returned == code, output.err
        return output.err if code else output.out

    return run


def loads_converted(shown):
    """On CPU only converted weights bring the kernel; and theirs were converted for f32."""
    return "megakernel, f32 numerics, 2 rank(s)" in shown


# What they load.


def test_the_variable_may_stand_in_the_dotenv(megakernel, checkpoint, converted, tmp_path):
    (tmp_path / ".env").write_text(f"{VARIABLE}={converted}\n", encoding="utf-8")
    assert loads_converted(megakernel("info", checkpoint, "--devices", RANKS).stdout)


@pytest.mark.parametrize("place", ["flag", "general variable", "file", "folder"])
def test_each_place_brings_the_converted_weights(place, info, checkpoint, converted, tmp_path):
    arguments, variables = [checkpoint, "--devices", RANKS], {}
    if place == "flag":
        arguments += ["--weights", converted]
    if place == "general variable":
        variables["MEGAKERNEL_WEIGHTS"] = str(converted)
    if place == "file":
        Path("megakernel.toml").write_text(f"weights = '{converted}'\n", encoding="utf-8")
    if place == "folder":
        arguments[0] = converted
        variables[VARIABLE] = "./for-other-checkpoints"
    shown = info(*arguments, **variables)
    assert loads_converted(shown)
    assert shown.split()[:2] == ["name", "converted" if place == "folder" else "tiny"]


def test_a_converted_folder_takes_text_as_its_checkpoint_does(converted, monkeypatch):
    monkeypatch.setattr(loading, "keep_programs", lambda: None)
    layers = Layers({"model": str(converted), "devices": RANKS}, {}, {}, {})
    asked = SimpleNamespace(family=None, settings=layers.resolve(), layers=layers)
    loaded = loading.load(loading.choose(asked), asked.settings)
    assert loaded.tokenizer.encode("hi<|sep|>").ids == [*b"hi", 505]
    assert loaded.chat_format is not None


# Which place is believed. A folder that does not exist makes the error say which.

PLACES = ("flag", "variable", "dotenv", "general variable", "file")
"""Strongest first."""


@pytest.mark.parametrize("strongest", range(len(PLACES)), ids=PLACES)
def test_the_strongest_place_is_believed(strongest, info, checkpoint):
    places, arguments, variables = PLACES[strongest:], [checkpoint], {}
    if "flag" in places:
        arguments += ["--weights", "./from-flag"]
    if "variable" in places:
        variables[VARIABLE] = "./from-variable"
    if "dotenv" in places:
        Path(".env").write_text(f"{VARIABLE}=./from-dotenv\n", encoding="utf-8")
    if "general variable" in places:
        variables["MEGAKERNEL_WEIGHTS"] = "./from-general variable"
    if "file" in places:
        Path("megakernel.toml").write_text("weights = './from-file'\n", encoding="utf-8")
    error = info(*arguments, code=1, **variables)
    named = f" (named by {VARIABLE})" if places[0] in ("variable", "dotenv") else ""
    assert f"no folder ./from-{places[0]}{named} of converted weights" in error


def test_an_empty_variable_does_not_hide_the_one_in_dotenv(info, checkpoint):
    Path(".env").write_text(f"{VARIABLE}=./from-dotenv\n", encoding="utf-8")
    error = info(checkpoint, code=1, **{VARIABLE: ""})
    assert f"no folder ./from-dotenv (named by {VARIABLE}) of converted weights" in error


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", 1], "are cut for 2 ranks, not for 1; take 2 devices, or convert"),
        (["--devices", RANKS, "--backend", "xla"], "which backend xla does not read; take"),
    ],
)
def test_weights_for_something_else_are_refused(arguments, message, info, checkpoint, converted):
    error = info(checkpoint, "--weights", converted, *arguments, code=1)
    assert error.startswith(f"megakernel: error: the weights in {converted} ")
    assert message in error


@pytest.mark.parametrize("form", ["checkpoint", "converted"])
def test_weights_of_another_checkpoint_are_refused(form, info, checkpoint, converted, tmp_path):
    """Also where the other checkpoint is known by its conversion only."""
    other = tmp_path / "other"
    if form == "checkpoint":
        shutil.copytree(checkpoint, other)
        index = json.loads((other / "model.safetensors.index.json").read_text())
        name = "language_model.model.norm.weight"
        file = other / index["weight_map"][name]
        with file.open("r+b") as data:
            length = int.from_bytes(data.read(8), "little")
            header = json.loads(data.read(length))
            data.seek(8 + length + header[name]["data_offsets"][0])
            data.write(b"?")
    else:
        shutil.copytree(converted, other)
        manifest = json.loads((other / "manifest.json").read_text())
        manifest["metadata"]["origin"] = "0" * 64
        (other / "manifest.json").write_text(json.dumps(manifest))
    error = info(other, "--weights", converted, "--devices", RANKS, code=1)
    assert f"the weights in {converted} were not converted from 'other', but from" in error


def test_a_checkpoint_is_no_folder_of_converted_weights(info, checkpoint):
    error = info(checkpoint, "--weights", checkpoint, code=1)
    assert f"the folder {checkpoint} has no manifest.json, so it holds no converted" in error


def test_a_family_without_converted_weights_takes_none(info, monkeypatch):
    monkeypatch.setattr(jax, "devices", None)  # nothing is loaded
    error = info("qwen", "--weights", "folder", code=2)
    assert error == (
        "megakernel: error: --weights does not go with the qwen family, which has no converted"
        " weights\n"
    )
