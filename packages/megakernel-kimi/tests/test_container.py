"""Converted weights: the same arrays as without, what is refused, and what a damaged file does."""

import json
import runpy
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from kda_mla_kernels.backend import RANKS
from kda_mla_kernels.checkpoint import Checkpoint, open_checkpoint
from kda_mla_kernels.errors import CheckpointError, ConfigError
from kda_mla_kernels.numerics import BF16, F32
from kda_mla_kernels.testing import Sequence, recompiled
from megakernel_kimi import convert as command
from megakernel_kimi import package
from megakernel_kimi.config import KimiConfig
from megakernel_kimi.container import (
    VARIABLE,
    Converted,
    Target,
    convert,
    find_converted,
    load_converted,
)
from megakernel_kimi.container.origin import origin_of
from megakernel_kimi.kernel import source
from megakernel_kimi.kernel.loading import load_kernel_weights
from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.loading import RankReader
from tpu_collectives.testing import quick_options
from vmem_pool.container import WriteOptions, open_container
from vmem_pool.container.files import locked

TINY = Path(__file__).parent / "golden" / "k3_tiny"
write_mini = runpy.run_path(str(Path(__file__).parent / "mini_checkpoint.py"))["write"]


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def target(config, ranks, numerics=F32, form="mxfp4", **options):
    return Target.of(KimiLayout.of(config, ranks, **options), numerics, form)


@pytest.fixture(scope="module")
def converted(tmp_path_factory, tiny_checkpoint, tiny_config):
    """The golden checkpoint for two ranks, in float32."""
    folder = tmp_path_factory.mktemp("two") / "converted"
    convert(tiny_checkpoint, folder, target(tiny_config, 2))
    return folder


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """Two layers and eight experts."""
    folder = tmp_path_factory.mktemp("mini") / "mini"
    write_mini(folder, experts=8)
    return open_checkpoint(folder)


@pytest.fixture
def copied(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "copied")


def load(folder, ranks=2, **options):
    options = {"max_rows": 1, "max_context": 64, **options}
    return package.load(folder, devices=jax.devices()[:ranks], **options)


def assert_same(ours, theirs):
    def check(a, b):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(check, ours, theirs)


# The same weights.


@pytest.mark.parametrize(
    ("ranks", "numerics", "form", "options"),
    [
        (1, BF16, "mxfp4", {}),
        (8, F32, "fp8", {}),
        (4, BF16, "fp8", {"expert_tp": 2, "lanes": 2}),
    ],
)
def test_converted_weights_have_the_bits_of_those_read_directly(
    ranks, numerics, form, options, mini, tmp_path
):
    wanted = target(KimiConfig.from_dict(mini.config), ranks, numerics, form, **options)
    convert(mini, tmp_path / "out", wanted)
    found = Converted(open_container(tmp_path / "out"), "out")
    mesh = Mesh(np.array(jax.devices()[:ranks]), (RANKS,))
    ours = load_converted(found, wanted, mesh)
    theirs = load_kernel_weights(mini, wanted.layout, wanted.shape, mesh, wanted.dtype)
    assert_same(ours, theirs)
    assert (found.expert_form, found.expert_tp) == (form, wanted.layout.expert_tp)
    assert found.numerics == numerics.name


def test_a_padded_vocabulary_is_the_same_in_pieces(tmp_path, monkeypatch):
    """Of 509 rows the last of two ranks has 254, behind which zeros fill whole tiles."""
    write_mini(tmp_path / "mini", experts=4, vocab_size=509, pad_token_id=0)
    checkpoint = open_checkpoint(tmp_path / "mini")
    wanted = target(KimiConfig.from_dict(checkpoint.config), 2)
    reader = RankReader(checkpoint, wanted.dtype, wanted.layout, 1)
    monkeypatch.setattr(source, "TABLE_ROWS_AT_ONCE", 100)
    pieces = list(source.RankRows(reader, wanted.shape).rows("embedding", 7))
    assert {len(piece) for piece in pieces[:-1]} == {100}
    whole = checkpoint.read("language_model.model.embed_tokens.weight").astype(np.float32)
    rows = np.concatenate(pieces)
    np.testing.assert_array_equal(rows[: 254 - 7], whole[255 + 7 :])
    assert len(rows) > 254 - 7
    assert not rows[254 - 7 :].any()


def test_an_expert_is_read_once_for_all_ranks(mini, tmp_path, monkeypatch):
    reads, read = Counter(), Checkpoint.read

    def counted(self, name, index=None):
        reads[name] += 1
        return read(self, name, index)

    monkeypatch.setattr(Checkpoint, "read", counted)
    config = KimiConfig.from_dict(mini.config)
    wanted = target(config, 8)
    origin_of(mini, config)
    before = reads.copy()
    convert(mini, tmp_path / "out", wanted)
    packed = [name for name in mini.names() if name.endswith("w2.weight_packed")]
    assert len(packed) == 8
    assert {reads[name] - 2 * before[name] for name in packed} == {1}


def test_arrays_stand_in_the_order_of_their_use(converted, tiny_config):
    names = list(open_container(converted).rank(1))
    wanted = target(tiny_config, 2)
    assert names == list(source.row_shapes(wanted.layout, wanted.shape, wanted.dtype))
    assert names[:3] == ["image", "experts.gate_up", "experts.down"]


def test_a_converted_folder_stands_for_its_checkpoint(converted):
    model = load(converted)
    direct = load(TINY, backend="megakernel", numerics="f32")
    assert_same(model.weights, direct.weights)
    assert (model.info.backend, model.info.numerics) == ("megakernel", "f32")
    assert model.info.parameters == direct.info.parameters
    assert (model.info.legal_ranks, direct.info.legal_ranks) == ((2,), (1, 2, 4, 8))
    assert model.generation == direct.generation


@pytest.mark.parametrize("named", ["argument", "variable"])
def test_converted_weights_may_stand_beside_the_checkpoint(named, converted, monkeypatch):
    options = {"weights": converted} if named == "argument" else {}
    if named == "variable":
        monkeypatch.setenv(VARIABLE, str(converted))
    monkeypatch.setattr(package, "load_kernel_weights", None)
    model = load(TINY, **options)
    assert model.info.backend == "megakernel"


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 1}, r"are cut for 2 ranks, not for 1; take 2 devices, or convert"),
        ({"expert_tp": 1}, "have expert_tp 2, not 1"),
        ({"expert_form": "fp8"}, "have expert_form mxfp4, not fp8"),
        ({"numerics": "bf16"}, "have numerics f32, not bf16; leave numerics open, or convert"),
        ({"backend": "xla"}, "are in the form of the kernel, which backend xla does not read"),
    ],
)
def test_weights_for_something_else_are_refused(options, message, converted):
    with pytest.raises(ConfigError, match=f"^the weights in {converted} {message}"):
        load(converted, **options)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mesh": [["hosts", 1], ["x", 2]]}, "'lanes' is missing or unknown"),
        ({"metadata": {"dtype": "x"}}, "'x' is missing or unknown"),
        ({"metadata": {"expert_form": "int4"}}, "'int4' is missing or unknown"),
        ({"metadata": {"origin": None}}, "'origin' is missing or unknown"),
        ({"metadata": {"expert_tp": "x"}}, "invalid literal .*"),
    ],
)
def test_a_manifest_that_does_not_say_what_the_weights_are_is_refused(change, why, copied):
    file = copied / "manifest.json"
    stored = json.loads(file.read_text())
    metadata = stored["metadata"] | change.get("metadata", {})
    known = {name: value for name, value in metadata.items() if value is not None}
    file.write_text(json.dumps(stored | change | {"metadata": known}))
    message = rf"^the manifest of the weights in .* is damaged \({why}\); delete it and convert"
    with pytest.raises(CheckpointError, match=message):
        load(copied)


def test_weights_of_another_configuration_are_refused_and_the_variable_is_named(
    converted, monkeypatch, tmp_path
):
    write_mini(tmp_path / "mini", experts=4)
    monkeypatch.setenv(VARIABLE, str(converted))
    with pytest.raises(ConfigError, match=f"named by {VARIABLE}.* with another configuration"):
        load(tmp_path / "mini")


def test_weights_of_another_checkpoint_are_refused(converted, tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "trained_on")
    info = open_checkpoint(folder).info("language_model.model.norm.weight")
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"?")
    with pytest.raises(CheckpointError, match="were not converted from 'trained_on'"):
        load(folder, weights=converted)


def test_weights_of_another_conversion_must_be_of_the_same_checkpoint(converted, copied):
    assert load(copied, weights=converted).info.name == "copied"
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["metadata"]["origin"] = "0" * 64
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="were not converted from 'copied'"):
        load(copied, weights=converted)
    del manifest["metadata"]["origin"]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest.json names no checkpoint"):
        load(copied, weights=converted)


def test_hosts_of_another_size_are_refused(mini, tmp_path):
    convert(mini, tmp_path / "out", target(KimiConfig.from_dict(mini.config), 2, lanes=1))
    with pytest.raises(ConfigError, match="are cut for hosts of 1 ranks, not of 2"):
        load(tmp_path / "out")


def test_another_arrangement_of_the_stream_is_refused(copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["metadata"]["stream"] = "other"
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="arranged by another version of megakernel-kimi"):
        load(copied)


def test_a_changed_byte_is_found_when_the_file_is_loaded(copied):
    with (copied / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    message = r"rank-00001.safetensors is damaged: its SHA-256 .*; delete it and convert the weig"
    with pytest.raises(CheckpointError, match=message):
        load(copied)


def test_a_missing_file_is_named(copied):
    (copied / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors is missing"):
        load(copied)


@pytest.mark.parametrize(
    "lost",
    [
        ["manifest.json"],
        ["manifest.json", "rank-00001.safetensors"],
        ["rank-00000.safetensors", "rank-00001.safetensors"],
    ],
)
def test_an_unfinished_conversion_is_named(lost, copied):
    for name in lost:
        (copied / name).unlink()
    message = rf"holds an unfinished conversion; run .*: python .* CHECKPOINT {copied} --ranks N$"
    with pytest.raises(CheckpointError, match=message):
        load(copied)


def test_a_conversion_that_has_finished_no_file_is_named(tmp_path):
    shutil.copy(TINY / "config.json", tmp_path)
    (tmp_path / "rank-00001.safetensors.partial").touch()
    with pytest.raises(CheckpointError, match="holds an unfinished conversion"):
        load(tmp_path)


def test_a_folder_that_does_not_exist_is_refused_before_anything_is_downloaded(monkeypatch):
    with pytest.raises(CheckpointError, match=r"^there is no folder ./none of converted weights"):
        load("org/huge", weights="./none")
    monkeypatch.setenv(VARIABLE, "./none")
    with pytest.raises(CheckpointError, match=rf"no folder ./none \(named by {VARIABLE}\) of"):
        load("org/huge")


def test_a_folder_without_weights_is_refused_and_what_makes_them_is_named(tmp_path, monkeypatch):
    remedy = r"python -m megakernel_kimi\.convert CHECKPOINT FOLDER --ranks N writes them$"
    with pytest.raises(CheckpointError, match=rf"^the folder .* has no manifest\.json, .*{remedy}"):
        load(TINY, weights=tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"\(named by {VARIABLE}\) has no manifest\.json"):
        load(TINY)


def test_an_empty_name_of_weights_is_refused_and_an_empty_variable_is_none(monkeypatch):
    with pytest.raises(CheckpointError, match=r"^weights is empty; name a folder of converted"):
        load(TINY, weights="")
    monkeypatch.setenv(VARIABLE, "")
    assert find_converted(TINY) is None


def test_a_conversion_for_something_else_leaves_the_folder_alone(
    copied, tiny_checkpoint, tiny_config
):
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    with pytest.raises(CheckpointError, match="is not of this specification"):
        convert(tiny_checkpoint, copied, target(tiny_config, 2, form="fp8"))
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before


def test_a_stale_manifest_is_refused_and_what_differs_is_told(copied, tiny_checkpoint, tiny_config):
    for path in copied.glob("rank-*"):
        path.unlink()
    before = sorted(path.name for path in copied.iterdir())
    message = (
        r"manifest.json is not of this specification \(mesh hosts=1,lanes=2, not hosts=1,lanes=1"
    )
    with pytest.raises(CheckpointError, match=message):
        convert(tiny_checkpoint, copied, target(tiny_config, 1))
    message = "float32 with mxfp4 experts, not bfloat16 with fp8 experts"
    with pytest.raises(CheckpointError, match=message):
        convert(tiny_checkpoint, copied, target(tiny_config, 2, BF16, form="fp8"))
    assert sorted(path.name for path in copied.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-00001-of-00002.safetensors", r"holds a checkpoint \(model-00001-of"),
        ("model.safetensors.index.json", r"holds a checkpoint \(model.safetensors.index"),
        (
            "config.json",
            r"config\.json is not that of the checkpoint; convert into a folder of its",
        ),
    ],
)
def test_a_folder_that_holds_another_model_is_left_alone(
    name, message, tiny_checkpoint, tiny_config, tmp_path
):
    (tmp_path / name).write_text("another")
    with pytest.raises(CheckpointError, match=message):
        convert(tiny_checkpoint, tmp_path, target(tiny_config, 2))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "another"


def test_a_checkpoint_is_not_converted_into_itself(tiny_checkpoint, tiny_config):
    with pytest.raises(CheckpointError, match="is the checkpoint itself"):
        convert(tiny_checkpoint, TINY, target(tiny_config, 2))


def test_an_expert_that_fp8_would_round_is_named(tmp_path):
    """Scales 20 powers of two apart in one block: MXFP4 holds them, FP8 does not."""
    write_mini(tmp_path / "mini", experts=4)
    checkpoint = open_checkpoint(tmp_path / "mini")
    name = "language_model.model.layers.1.block_sparse_moe.experts.2.w3.weight_scale"
    info = checkpoint.info(name)
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(bytes([100, 120]))
    wanted = target(KimiConfig.from_dict(checkpoint.config), 1, form="fp8")
    with pytest.raises(CheckpointError, match=r"experts.2.w1 and w3: the block of .* not lossless"):
        convert(checkpoint, tmp_path / "out", wanted)


# The command.


def test_ranks_may_be_converted_by_several_processes(tmp_path, capsys, converted):
    arguments = [str(TINY), str(tmp_path / "out"), "--ranks", "2", "--numerics", "f32"]
    assert command.main([*arguments, "--only-ranks", "1"]) == 0
    assert "still lacks files of other ranks" in capsys.readouterr().out
    assert command.main([*arguments, "--only-ranks", "0"]) == 0
    assert "is complete" in capsys.readouterr().out
    for path in converted.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_conversions_of_other_ranks_may_copy_the_same_file_at_once(
    tmp_path, tiny_checkpoint, tiny_config, converted, monkeypatch
):
    copy, wanted = shutil.copyfile, target(tiny_config, 2)

    def with_another(source, unfinished):
        monkeypatch.setattr(shutil, "copyfile", copy)
        copy(source, unfinished)
        convert(tiny_checkpoint, tmp_path, wanted, WriteOptions([1]))

    monkeypatch.setattr(shutil, "copyfile", with_another)
    convert(tiny_checkpoint, tmp_path, wanted, WriteOptions([0]))
    for path in converted.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert len(list(tmp_path.iterdir())) == len(list(converted.iterdir()))


CONVERT = ["--ranks", "2", "--numerics", "f32"]


def test_a_conversion_is_complete_only_with_all_files(copied, capsys):
    (copied / "rank-00000.safetensors").unlink()
    arguments = [str(TINY), str(copied), *CONVERT, "--only-ranks"]
    assert command.main([*arguments, "1"]) == 0
    assert "still lacks files of other ranks" in capsys.readouterr().out
    assert command.main([*arguments, "0"]) == 0
    assert "is complete" in capsys.readouterr().out
    load(copied)


def test_a_rank_that_another_process_writes_is_told(tmp_path, capsys):
    with (tmp_path / "rank-00001.safetensors.partial").open("ab") as file:
        assert locked(file)
        assert command.main([str(TINY), str(tmp_path), *CONVERT]) == 1
    told = f"error: another process is writing rank 1 of {tmp_path}\n"
    assert capsys.readouterr().err == told


def test_a_converted_folder_is_not_converted(converted, tmp_path, capsys):
    assert command.main([str(converted), str(tmp_path / "out"), *CONVERT]) == 1
    told = f"error: {converted} is a converted folder; name the checkpoint to convert\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("folder", ["", " "])
def test_a_folder_without_a_name_is_refused(folder, capsys):
    with pytest.raises(SystemExit):
        command.main([str(TINY), folder, *CONVERT])
    told = f"error: argument folder: must be text that is not empty, not {folder!r}"
    assert told in capsys.readouterr().err


def test_help_tells_the_defaults(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "policy to load with (default: bf16)" in shown
    assert "of gate and up of experts (default: mxfp4)" in shown


def test_a_dry_run_shows_the_sizes_and_writes_nothing(tmp_path, capsys):
    assert command.main([str(TINY), str(tmp_path / "out"), "--ranks", "8", "--dry-run"]) == 0
    assert "experts.gate_up" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path, capsys):
    assert command.main([str(TINY), str(tmp_path / "out"), "--ranks", "3"]) == 1
    assert capsys.readouterr().err.startswith("error: 3 ranks do not fit this model")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("x", "'x' must be a rank, such as 3, or a first and a last one, such as 0-7"),
        ("1-", "'1-' must be a rank"),
        ("-1", "'-1' must be a rank"),
        ("0-1-2", "'0-1-2' must be a rank"),
        ("1-0", "'1-0' holds no rank, since the first comes after the last: 0-1 does"),
    ],
)
def test_ranks_that_are_none_are_told(ranks, message, tmp_path, capsys):
    arguments = [str(TINY), str(tmp_path / "out"), "--ranks", "2", f"--only-ranks={ranks}"]
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert f"error: argument --only-ranks: {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ranks_beyond_the_last_are_told_before_anything_is_written(tmp_path, capsys):
    arguments = [str(TINY), str(tmp_path / "out"), "--ranks", "2", "--only-ranks", "1-2"]
    assert command.main(arguments) == 1
    told = "error: --only-ranks asks for rank 2, but --ranks 2 are counted from 0\n"
    assert capsys.readouterr().err == told
    assert not (tmp_path / "out").exists()


# The same tokens.


FORMS = ("mxfp4", "fp8")


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_give_the_golden_tokens(form, tiny_checkpoint, tiny_config, golden, tmp_path):
    """The prompt and its greedy answer in one chunk: each logit's maximum is the next token."""
    convert(tiny_checkpoint, tmp_path / form, target(tiny_config, 1, form=form))
    answer = golden["len7/fp32/greedy_tokens"]
    tokens = [*golden["len7/input_ids"], *answer[:-1]]
    model = recompiled(load(tmp_path / form, ranks=1), quick_options())
    (logits,) = Sequence(model).prefill(tokens, all_logits=True)
    assert logits[6:].argmax(-1).tolist() == answer.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_decodes_the_golden_tokens(form, tiny_checkpoint, tiny_config, golden, tmp_path):
    convert(tiny_checkpoint, tmp_path / form, target(tiny_config, 1, form=form))
    model = load(tmp_path / form, ranks=1)
    # This interpreter, which other counts of ranks take too, compiles faster.
    programs = replace(model.programs, interpret=pltpu.InterpretParams())
    run, tokens = Sequence(replace(model, programs=programs)), [golden["len1/input_ids"][0]]
    for _ in range(6):
        tokens.append(int(run.decode(tokens[-1]).argmax()))
    assert tokens[1:] == golden["len1/fp32/greedy_tokens"][:6].tolist()
