"""Opening: layouts, the table of required tensors, and every way a checkpoint can be damaged."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from kda_mla_kernels.checkpoint import header, open_checkpoint
from kda_mla_kernels.errors import CheckpointError
from safetensors.numpy import save_file

ONE = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
TWO = {"b.weight": np.ones(4, np.float16), "b.bias": np.zeros(2, np.float16)}
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def single(tmp_path) -> Path:
    """One weights file."""
    (tmp_path / "config.json").write_text('{"model_type": "tiny", "layers": 2}')
    save_file({**ONE, **TWO}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path) -> Path:
    """Two shards and their index."""
    (tmp_path / "config.json").write_text("{}")
    save_file(ONE, tmp_path / SHARDS[0])
    save_file(TWO, tmp_path / SHARDS[1])
    weight_map = {**dict.fromkeys(ONE, SHARDS[0]), **dict.fromkeys(TWO, SHARDS[1])}
    write_index(tmp_path, weight_map)
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_header(folder: Path, entries: object, data: bytes = b"") -> None:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    content = len(text).to_bytes(8, "little") + text + data
    (folder / "model.safetensors").write_bytes(content)


def refuses(folder: Path, message: str) -> None:
    """Opening fails with one sentence."""
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


# Layouts


def test_a_single_file_gives_config_names_infos_and_values(single):
    checkpoint = open_checkpoint(str(single))
    assert checkpoint.folder == single
    assert checkpoint.name == single.name
    assert checkpoint.config == {"model_type": "tiny", "layers": 2}
    assert set(checkpoint.names()) == {"a.weight", "b.weight", "b.bias"}
    assert "a.weight" in checkpoint
    assert "c.weight" not in checkpoint
    info = checkpoint.info("a.weight")
    assert (info.name, info.shape, info.dtype, info.bytes) == ("a.weight", (2, 3), np.float32, 24)
    assert info.file == single / "model.safetensors"
    assert repr(checkpoint) == f"Checkpoint({single.name!r}, 3 tensors)"


def test_an_index_leads_to_the_right_shards_whatever_else_lies_there(sharded):
    save_file({"a.weight": np.zeros(1, np.float32)}, sharded / "extra.safetensors")
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.names() == ("a.weight", *TWO)
    for name, value in {**ONE, **TWO}.items():
        np.testing.assert_array_equal(checkpoint.read(name), value)
    assert checkpoint.info("b.bias").file.name == SHARDS[1]


def test_shards_without_an_index_are_joined(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    checkpoint = open_checkpoint(sharded)
    assert set(checkpoint.names()) == {*ONE, *TWO}


def test_shards_may_be_links_as_in_a_download_cache(sharded, tmp_path_factory):
    blob = tmp_path_factory.mktemp("blobs") / "0123abcd"
    (sharded / SHARDS[0]).rename(blob)
    (sharded / SHARDS[0]).symlink_to(blob)
    np.testing.assert_array_equal(open_checkpoint(sharded).read("a.weight"), ONE["a.weight"])


def test_other_json_files_are_optional(single):
    (single / "generation_config.json").write_text('{"top_k": 20}')
    (single / "broken.json").write_text("{")
    checkpoint = open_checkpoint(single)
    assert checkpoint.json("generation_config.json") == {"top_k": 20}
    assert checkpoint.json("tokenizer_config.json") is None
    with pytest.raises(CheckpointError, match=r"broken\.json is not valid JSON"):
        checkpoint.json("broken.json")


def test_code_in_a_checkpoint_is_never_run(single):
    (single / "modeling_tiny.py").write_text("raise SystemExit('executed')")
    (single / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_tiny.Model"}}')
    assert open_checkpoint(single).config["auto_map"]


def test_the_example_of_the_readme_runs(capsys):
    readme = Path(__file__).parents[1] / "README.md"
    examples = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [text for text in examples if "open_checkpoint" in text]
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "tiny (128, 64) float32\n"


# The table of required tensors


def test_a_table_that_fits_is_accepted(single):
    checkpoint = open_checkpoint(single)
    checkpoint.require({"a.weight": (2, 3)}, dtypes=[np.float32])
    checkpoint.require({"b.weight": [4], "b.bias": [2]}, dtypes=["bfloat16", "float16"])
    checkpoint.require({"a.weight": (2, 3), "b.bias": (2,)})


@pytest.mark.parametrize(
    ("shapes", "dtypes", "problem"),
    [
        ({"c.weight": (1,)}, None, "tensor 'c.weight' is missing"),
        ({"a.weight": (3, 2)}, None, r"tensor 'a.weight' has shape \[2, 3\], not \[3, 2\]"),
        ({"a.weight": (6,)}, None, r"has shape \[2, 3\], not \[6\]"),
        ({"a.weight": (2, 3)}, ["bfloat16"], "'a.weight' is float32, not bfloat16"),
        ({"b.bias": (2,)}, ["bfloat16", np.int8], "'b.bias' is float16, not bfloat16 or int8"),
    ],
)
def test_a_tensor_that_differs_is_named(single, shapes, dtypes, problem):
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(single).require(shapes, dtypes)


def test_many_problems_are_counted(single):
    shapes = {f"layers.{layer}.weight": (1,) for layer in range(10)}
    with pytest.raises(CheckpointError, match=r"layers\.0\..*layers\.2\..*; and 7 more$") as caught:
        open_checkpoint(single).require(shapes)
    assert "layers.3" not in str(caught.value)


def test_an_unknown_name_is_an_error_of_the_checkpoint(single):
    checkpoint = open_checkpoint(single)
    with pytest.raises(CheckpointError, match=r"has no tensor 'lm_head\.weight'"):
        checkpoint.read("lm_head.weight")


# Damaged folders


def test_a_folder_without_config_is_refused(single):
    (single / "config.json").unlink()
    refuses(single, r"is not a checkpoint: config\.json does not exist")


@pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 100_000])
def test_a_config_that_is_not_json_is_refused(single, text):
    (single / "config.json").write_text(text)
    refuses(single, r"config\.json is not valid JSON")


def test_a_config_that_is_no_object_is_refused(single):
    (single / "config.json").write_text("[1]")
    refuses(single, r"config\.json must hold a JSON object")


def test_a_folder_without_weights_is_refused(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    refuses(single, r"no weights in .*only safetensors files are read")


def test_missing_shards_are_counted(sharded):
    (sharded / SHARDS[1]).unlink()
    refuses(sharded, rf"1 of the 2 weights files named in .* do not exist, .*{SHARDS[1]}")


def test_a_missing_shard_is_noticed_without_an_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / SHARDS[0]).unlink()
    refuses(sharded, rf"lacks 1 of its 2 weights files, the first is '{SHARDS[0]}'")


def test_a_tensor_that_its_shard_lacks_is_named(sharded):
    write_index(sharded, {"a.weight": SHARDS[0], "b.weight": SHARDS[0], "b.bias": SHARDS[0]})
    refuses(sharded, rf"says that tensor 'b\.weight' is in '{SHARDS[0]}', .*\(and 1 more like it\)")


def test_a_tensor_in_two_shards_is_ambiguous_without_an_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    save_file({**TWO, **ONE}, sharded / SHARDS[1])
    refuses(sharded, r"tensor 'a\.weight' is in both .*00001.* and .*00002")


def test_two_series_of_shards_without_an_index_are_ambiguous(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    save_file(ONE, sharded / "draft-00001-of-00001.safetensors")
    refuses(sharded, "two series of weights files")


@pytest.mark.parametrize(
    "shard",
    [
        "../other.safetensors",
        "a/../../other.safetensors",
        "/etc/other.safetensors",
        "..\\other.safetensors",
        "C:\\other.safetensors",
        "weights.bin",
        7,
        None,
    ],
)
def test_an_index_may_not_leave_its_folder(sharded, shard):
    save_file(ONE, sharded.parent / "other.safetensors")
    write_index(sharded, {"a.weight": shard})
    refuses(sharded, "must be a .safetensors file inside the checkpoint's folder")


@pytest.mark.parametrize("weight_map", [None, {}, ["a.weight"], "model.safetensors"])
def test_an_index_without_a_map_is_refused(sharded, weight_map):
    write_index(sharded, weight_map)
    refuses(sharded, "has no weight_map")


# Damaged files


def test_a_git_lfs_pointer_is_recognised(single):
    (single / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
    )
    refuses(single, "git-lfs pointer, not weights; run 'git lfs pull'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is truncated: 0 bytes"),
        (b"\x01\x00\x00", "is truncated: 3 bytes"),
        ((1000).to_bytes(8, "little") + b"{}", "its header has 1000 bytes, the file only 10"),
        (b"\xff" * 16, "not a safetensors file: its header would have 18446744073709551615"),
        ((100_000_001).to_bytes(8, "little"), "more than the limit of 100000000"),
    ],
)
def test_a_header_length_that_cannot_be_is_refused(single, content, message):
    (single / "model.safetensors").write_bytes(content)
    refuses(single, message)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"{}x", b"\xff\xfe", b"[" * 50_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_a_header_that_is_not_json_is_refused(single, text):
    write_header(single, text)
    refuses(single, r"the header of .* is not valid JSON|has no valid dtype, shape")


def test_a_header_that_is_no_object_is_refused(single):
    write_header(single, [1, 2])
    refuses(single, "must be a JSON object, not list")


def test_a_name_that_appears_twice_in_a_header_is_refused(single):
    entry = b'{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    write_header(single, b'{"a": ' + entry + b', "a": ' + entry + b"}", b"\0")
    refuses(single, "names 'a' twice")


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {"dtype": "U8", "shape": [4]},
        {"dtype": "U8", "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [4], "data_offsets": [0]},
        {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]},
        {"dtype": "U8", "shape": [4], "data_offsets": ["0", "4"]},
    ],
)
def test_a_malformed_entry_is_refused(single, entry):
    write_header(single, {"w": entry}, bytes(4))
    refuses(single, "tensor 'w' in .* has no valid dtype, shape and data_offsets")


@pytest.mark.parametrize("dtype", ["F6_E2M3", "U4", "float32", "", None, 3, ["F32"]])
def test_an_unknown_type_is_refused(single, dtype):
    write_header(single, {"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}}, bytes(4))
    refuses(single, "has the unknown dtype .*known: BOOL, U8")


@pytest.mark.parametrize(
    ("dtype", "shape", "offsets", "message"),
    [
        ("F32", [2], [0, 4], r"F32 of shape \[2\] takes 8 bytes"),
        ("U8", [4], [4, 0], r"U8 of shape \[4\] takes 4 bytes"),
        ("U8", [2**40, 2**40], [0, 4], "takes 1208925819614629174706176 bytes"),
        ("U8", [16], [0, 16], r"ends at byte \d+, but the file has only \d+ bytes: it is truncat"),
        ("U8", [4], [10**18, 10**18 + 4], "it is truncated"),
        ("F4", [3], [0, 1], r"F4 of shape \[3\], whose last axis must be even"),
        ("F4", [], [0, 0], r"F4 of shape \[\], whose last axis must be even"),
    ],
)
def test_an_entry_that_contradicts_its_data_is_refused(single, dtype, shape, offsets, message):
    entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    write_header(single, {"w": entry}, bytes(8))
    refuses(single, message)


def test_tensors_that_overlap_are_refused(single):
    entry = {"dtype": "U8", "shape": [4]}
    entries = {
        "a": {**entry, "data_offsets": [2, 6]},
        "b": {**entry, "data_offsets": [0, 4]},
    }
    write_header(single, entries, bytes(8))
    refuses(single, "tensors 'b' and 'a' overlap")


def test_a_truncated_weights_file_is_refused_when_it_is_opened(single):
    weights = single / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refuses(single, "it is truncated")


def test_random_damage_gives_an_error_of_ours_or_a_table_that_can_be_read(single):
    weights = single / "model.safetensors"
    good = bytearray(weights.read_bytes())
    header_end = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        bad = good.copy()
        for place in rng.integers(0, header_end, int(rng.integers(1, 4))):
            bad[place] = int(rng.integers(0, 256))
        weights.write_bytes(bad[: int(rng.integers(header_end, len(bad) + 1))])
        try:
            tensors = header.read_header(weights)
        except CheckpointError:
            refused += 1
            continue
        checkpoint = open_checkpoint(single)
        for name in tensors:
            checkpoint.read(name)
    assert refused > 300
