"""Containers: bytes, resuming, verification, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from vmem_pool import ContainerError
from vmem_pool.container import (
    Expected,
    Spec,
    Tensor,
    Verify,
    WriteOptions,
    files,
    open_container,
    print_dry_run,
    remaining_bytes,
    write_container,
    writer,
)
from vmem_pool.container.__main__ import main

SPEC = Spec(
    config_hash="cafe",
    mesh={"host": 1, "tp": 2},
    quantisation="bf16",
    tensors=(
        Tensor("stream", (6, 32, 128), np.uint8),
        Tensor("embedding", (5, 3), jnp.bfloat16),
        Tensor("scale", (4,), np.float32),
    ),
    metadata={"slot_bytes": "4096"},
)


def _values(rank, name):
    tensor = next(t for t in SPEC.tensors if t.name == name)
    random = np.random.default_rng([rank, *name.encode()])
    return random.integers(0, 100, tensor.shape).astype(tensor.dtype)


def _source(rank, name, start):
    """Arrays of one, two, three, ... rows."""
    values, size = _values(rank, name)[start:], 1
    while len(values):
        yield values[:size]
        values, size = values[size:], size + 1


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_container(folder, SPEC, _source)
    return folder


@pytest.fixture
def copy(written, tmp_path):
    for path in written.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def _bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_written_is_read_again(written):
    found = open_container(written, Expected("cafe", SPEC.mesh, "bf16"), Verify.FULL)
    assert found.spec == SPEC
    for rank in range(2):
        tensors = found.rank(rank)
        assert list(tensors) == ["stream", "embedding", "scale"]
        for name, tensor in tensors.items():
            assert tensor.dtype == _values(rank, name).dtype
            np.testing.assert_array_equal(tensor, _values(rank, name))


def test_arrays_are_mapped_and_cannot_be_written(written):
    stream = open_container(written).rank(0)["stream"]
    assert stream.ctypes.data % 4096 == 0
    with pytest.raises(ValueError, match="read-only"):
        stream[0, 0, 0] = 1


def test_one_rank_is_verified_alone(copy):
    with (copy / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    found = open_container(copy)
    found.verify(0)
    found.verify(1, Verify.FAST)
    with pytest.raises(ContainerError, match=r"rank-00001.safetensors is damaged"):
        found.verify(1)
    with pytest.raises(ContainerError, match=r"rank 2 is outside 0\.\.1"):
        found.verify(2)


def test_the_files_are_safetensors(written):
    loaded = load_file(written / "rank-00001.safetensors")
    np.testing.assert_array_equal(loaded["stream"], _values(1, "stream"))


def test_checksums_are_those_of_sha256sum(written):
    subprocess.run(["sha256sum", "-c", "rank-00000.sha256"], cwd=written, check=True)


def test_only_finished_files_are_left(written):
    assert sorted(_bytes(written)) == [
        "manifest.json",
        *(f"rank-0000{r}.{end}" for r in range(2) for end in ("safetensors", "sha256")),
    ]


class Killed(BaseException):
    """Not an ``Exception``, as nothing may catch it."""


@pytest.mark.parametrize("torn", [b"", b"half a row"])
def test_a_writer_that_is_stopped_anywhere_goes_on_to_the_same_bytes(written, tmp_path, torn):
    for stop_after in range(20):
        folder = tmp_path / str(stop_after)
        left = stop_after

        def source(rank, name, start):
            nonlocal left
            for array in _source(rank, name, start):
                if not left:
                    raise Killed
                left -= 1
                yield array

        try:
            write_container(folder, SPEC, source, WriteOptions(sync_bytes=5000))
        except Killed:
            assert not (folder / "manifest.json").exists()
            for partial in folder.glob("*.partial"):
                with partial.open("ab") as file:
                    file.write(torn)
            write_container(folder, SPEC, _source)
        assert _bytes(folder) == _bytes(written)


RANK = "rank-00001.safetensors"
TOGETHER = WriteOptions(sync_bytes=5000, together=("embedding", "scale"))


def test_rows_that_are_written_together_take_turns(written, tmp_path):
    given = []

    def source(rank, name, start):
        for row in _values(rank, name)[start:]:
            given.append((name, rank))
            yield row[None]

    write_container(tmp_path, SPEC, source, TOGETHER)
    assert _bytes(tmp_path) == _bytes(written)
    assert given[:12] == [("stream", rank) for rank in (0, 1) for _ in range(6)]
    assert given[12:] == [
        (name, rank)
        for name, rows in (("embedding", 5), ("scale", 4))
        for _ in range(rows)
        for rank in (0, 1)
    ]


def test_ranks_that_were_written_together_catch_up_after_a_stop(written, tmp_path):
    for stop_after in range(12):
        folder, left = tmp_path / str(stop_after), stop_after

        def source(rank, name, start):
            nonlocal left
            for array in _source(rank, name, start):
                if not left:
                    raise Killed
                left -= 1
                yield array

        with pytest.raises(Killed):
            write_container(folder, SPEC, source, TOGETHER)
        write_container(folder, SPEC, _source, TOGETHER)
        assert _bytes(folder) == _bytes(written)


def test_a_writer_that_goes_on_asks_only_for_what_is_missing(tmp_path):
    asked = []

    def source(rank, name, start):
        asked.append((rank, name, start))
        for array in _source(rank, name, start):
            if name == "embedding":
                raise Killed
            yield array

    with pytest.raises(Killed):
        write_container(tmp_path, SPEC, source, WriteOptions(sync_bytes=1))
    missing = remaining_bytes(tmp_path, SPEC)
    assert missing == SPEC.total_bytes - len(SPEC.header) - SPEC.tensors[0].bytes
    asked.clear()
    with pytest.raises(Killed):
        write_container(tmp_path, SPEC, source)
    assert asked == [(0, "embedding", 0)]


PROGRAM = """
import sys, time
import numpy as np
from vmem_pool.container import Spec, Tensor, WriteOptions, write_container

spec = Spec("hash", {"tp": 1}, "u8", (Tensor("stream", (400, 4096), np.uint8),))

def source(rank, name, start):
    for row in range(start, 400):
        time.sleep(float(sys.argv[2]))
        yield np.full((1, 4096), row % 251, np.uint8)

write_container(sys.argv[1], spec, source, WriteOptions(sync_bytes=40_000))
"""


def test_what_a_killed_process_began_is_finished(tmp_path):
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    running = subprocess.Popen([*command, "0.01"])
    deadline = time.monotonic() + 60
    while not (folder / "rank-00000.journal").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert (folder / "rank-00000.safetensors.partial").exists()
    subprocess.run([*command, "0"], check=True, timeout=60)
    stored = open_container(folder, verify=Verify.FULL).rank(0)["stream"]
    assert (stored == (np.arange(400) % 251)[:, None]).all()


def test_processes_may_share_the_ranks(written, tmp_path):
    write_container(tmp_path, SPEC, _source, WriteOptions(ranks=[1]))
    assert not (tmp_path / "manifest.json").exists()
    write_container(tmp_path, SPEC, _source, WriteOptions(ranks=[0]))
    assert _bytes(tmp_path) == _bytes(written)


LOCKED = "another process is writing rank 1 of "


def test_a_rank_is_written_by_one_process_at_a_time(written, tmp_path):
    def source(rank, name, start):
        with pytest.raises(ContainerError, match=LOCKED):
            write_container(tmp_path, SPEC, _source, WriteOptions(ranks=[1]))
        return _source(rank, name, start)

    write_container(tmp_path, SPEC, source, WriteOptions(ranks=[1]))
    write_container(tmp_path, SPEC, _source)
    assert _bytes(tmp_path) == _bytes(written)


def test_a_rank_that_another_process_just_finished_is_left_alone(written, tmp_path, monkeypatch):
    def lock(file):
        monkeypatch.setattr(writer, "locked", locked)
        write_container(tmp_path, SPEC, _source)
        return locked(file)

    locked = writer.locked
    monkeypatch.setattr(writer, "locked", lock)
    write_container(tmp_path, SPEC, _source)
    assert _bytes(tmp_path) == _bytes(written)


def test_where_nothing_can_be_locked_files_are_written(written, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    write_container(tmp_path, SPEC, _source)
    assert _bytes(tmp_path) == _bytes(written)


def test_processes_may_replace_a_file_at_the_same_time(tmp_path):
    path = tmp_path / "file"
    with files.replacing(path) as ours, files.replacing(path) as theirs:
        ours.write_text("ours")
        theirs.write_text("theirs")
    assert _bytes(tmp_path) == {"file": b"ours"}


def test_what_a_killed_process_was_replacing_is_removed(written, tmp_path):
    (tmp_path / "rank-00001.journal.0123.new").write_text("{")
    write_container(tmp_path, SPEC, _source)
    assert _bytes(tmp_path) == _bytes(written)


@pytest.mark.parametrize(
    "journal",
    ["", "[]", "{}", "[" * 100_000]
    + [
        json.dumps({"layout": SPEC.fingerprint, "bytes": size})
        for size in (-5, 5, 5000.5, "7", None, 10**12)
    ],
)
def test_a_damaged_journal_is_named(journal, tmp_path):
    _stop_halfway(tmp_path)
    (tmp_path / "rank-00000.journal").write_text(journal)
    with pytest.raises(ContainerError, match=r"00000\.journal is damaged.*; delete it to write"):
        write_container(tmp_path, SPEC, _source)


@pytest.mark.parametrize("text", ["", "abc  file\n", None])
def test_a_checksum_that_is_none_is_named(text, copy):
    path = copy / "rank-00001.sha256"
    path.unlink() if text is None else path.write_text(text)
    message = rf"rank-00001\.sha256 is missing or damaged; delete {RANK} and convert the weights"
    with pytest.raises(ContainerError, match=message):
        write_container(copy, SPEC, _source)


def test_a_complete_container_is_not_written_again(copy):
    def source(rank, name, start):
        raise AssertionError("nothing is missing")

    write_container(copy, SPEC, source)
    assert remaining_bytes(copy, SPEC) == 0


def test_too_little_space_is_found_before_writing(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": SPEC.total_bytes - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    message = f"needs {SPEC.total_bytes} more bytes, but only {SPEC.total_bytes - 1} are free"
    with pytest.raises(ContainerError, match=message):
        write_container(tmp_path, SPEC, _source)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_sizes_and_writes_nothing(tmp_path, capsys):
    print_dry_run(tmp_path / "new", SPEC)
    printed = capsys.readouterr().out
    assert "24,576" in printed
    assert "2 files of 28.7 kB, 57.4 kB in all" in printed
    assert "still to write: 57.4 kB" in printed
    assert not (tmp_path / "new").exists()


def test_progress_reaches_the_end(tmp_path, capsys):
    write_container(tmp_path, SPEC, _source, WriteOptions(progress=True))
    assert "57.4/57.4 kB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (Expected(config_hash="beef"), "made for configuration cafe, not beef"),
        (Expected(mesh={"host": 1, "tp": 4}), "made for mesh host=1,tp=2, not host=1,tp=4"),
        (Expected(mesh={"tp": 2}), "made for mesh host=1,tp=2, not tp=2"),
        (Expected(quantisation="fp8"), "made for quantisation bf16, not fp8"),
    ],
)
def test_another_container_than_expected_is_named(written, expected, message):
    with pytest.raises(ContainerError, match=message):
        open_container(written, expected)


def _edit(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_files(folder, **changes):
    files = json.loads((folder / "manifest.json").read_text())["files"]
    _edit(folder, files=[file | changes for file in files])


def _flip(path, at):
    stored = bytearray(path.read_bytes())
    stored[at] ^= 1
    path.write_bytes(stored)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: _edit(f, version=99), "has container version 99, but this reader knows 1"),
        (lambda f: _edit(f, format="other"), "is not the manifest of a vmem-pool container"),
        (lambda f: _edit(f, files=[]), "lists 0 files for 2 ranks"),
        (lambda f: _edit(f, mesh=None), "is damaged"),
        (lambda f: _edit(f, mesh=[["host", 1], ["tp", 2.0]]), "is damaged .*not a whole number"),
        (lambda f: _edit(f, config_hash=None), "is damaged .*not text"),
        (lambda f: _edit(f, metadata={"slot_bytes": 7}), "is damaged .*not text"),
        (lambda f: _edit(f, metadata=None), "is damaged .*; delete it and convert the weights"),
        (
            lambda f: _edit_files(f, name=5),
            "damaged .the file of rank 0 cannot be called 5",
        ),
        (lambda f: _edit_files(f, name="/etc/passwd"), "cannot be called '/etc/passwd'"),
        (lambda f: _edit_files(f, sha256=None), r"manifest\.json is damaged"),
        (lambda f: _edit_files(f, sha256="abc"), r"manifest\.json is damaged .*no SHA-256"),
        (lambda f: _edit_files(f, bytes=7.5), r"manifest\.json is damaged .*no size"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), r"manifest\.json is damaged"),
        (lambda f: (f / "manifest.json").write_text("{"), "is damaged"),
        (lambda f: (f / "manifest.json").unlink(), r"has no manifest\.json"),
        (lambda f: (f / RANK).unlink(), f"{RANK} is missing"),
        (lambda f: os.truncate(f / RANK, 5000), f"{RANK} has 5000 bytes instead of"),
        (lambda f: _flip(f / RANK, 100), f"{RANK} has a header"),
    ],
)
def test_damage_is_found_by_the_fast_check(copy, damage, message):
    damage(copy)
    with pytest.raises(ContainerError, match=message):
        open_container(copy)


def test_damaged_values_are_found_by_checksums_only(copy, capsys):
    _flip(copy / RANK, -1)
    open_container(copy)
    open_container(copy, verify=Verify.FULL, ranks=[0])
    remedy = "delete it and convert the weights again$"
    with pytest.raises(ContainerError, match=f"{RANK} is damaged: its SHA-256 .*; {remedy}"):
        open_container(copy, verify=Verify.FULL)
    assert main([str(copy)]) == 0
    assert main([str(copy), "--full"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_files_of_another_specification_are_never_overwritten(copy):
    other = Spec("beef", SPEC.mesh, "bf16", SPEC.tensors)
    before = _bytes(copy)
    with pytest.raises(ContainerError, match="is not of this specification"):
        write_container(copy, other, _source)
    assert _bytes(copy) == before


@pytest.mark.parametrize(
    ("tensor", "difference"),
    [
        (Tensor("scale", (4,), np.int32), r" \(scale is F32, not I32\)"),
        (Tensor("scale", (2,), np.float32), r" \(scale is \(4,\), not \(2,\)\)"),
        (Tensor("offset", (4,), np.float32), ""),
    ],
)
def test_what_differs_in_a_file_is_told(tensor, difference, copy):
    (copy / "manifest.json").unlink()
    other = replace(SPEC, tensors=(*SPEC.tensors[:2], tensor))
    message = rf"rank-00000\.safetensors is not of this specification{difference}; delete it"
    with pytest.raises(ContainerError, match=message):
        write_container(copy, other, _source)


@pytest.mark.parametrize("header", [b"", b"{", b"\xff" * 20, bytes(8) + b"[]"])
def test_a_file_that_is_none_is_named(header, tmp_path):
    (tmp_path / RANK).write_bytes(header)
    with pytest.raises(ContainerError, match=f"{RANK} is not of this specification; delete"):
        write_container(tmp_path, SPEC, _source)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"mesh": {"host": 1, "tp": 4}}, "mesh host=1,tp=2, not host=1,tp=4"),
        ({"quantisation": "fp8"}, "quantisation bf16, not fp8"),
        ({"config_hash": "f" * 100}, "another configuration"),
        ({"metadata": {}}, "slot_bytes 4096, not none"),
        ({"tensors": SPEC.tensors[:2]}, "other tensors"),
    ],
)
def test_a_manifest_of_another_specification_is_refused_and_what_differs_is_told(
    change, difference, copy
):
    for path in copy.glob("rank-*"):
        path.unlink()
    message = rf"manifest\.json is not of this specification \({difference}\); delete it or write"
    with pytest.raises(ContainerError, match=message):
        write_container(copy, replace(SPEC, **change), _source)
    assert [path.name for path in copy.iterdir()] == ["manifest.json"]


def _stop_halfway(folder):
    def source(rank, name, start):
        yield from _source(rank, name, start)
        raise Killed

    with pytest.raises(Killed):
        write_container(folder, SPEC, source, WriteOptions(sync_bytes=1))


def test_an_unfinished_file_of_another_specification_is_not_continued(tmp_path):
    _stop_halfway(tmp_path)
    other = Spec("beef", SPEC.mesh, "bf16", SPEC.tensors)
    with pytest.raises(ContainerError, match="partial is not of this specification"):
        write_container(tmp_path, other, _source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda array: array.astype(np.int16), "stream of rank 0 consists of uint8"),
        (lambda array: array[:, :8], r"consists of uint8 \(32, 128\), not of uint8 \(8, 128\)"),
        (lambda array: np.concatenate([array] * 9), "has more than its 6 rows"),
        (lambda array: array[:0], "ends after 0 of its 6 rows"),
    ],
)
def test_other_arrays_than_specified_are_refused(tmp_path, change, message):
    def source(rank, name, start):
        return (change(array) for array in _source(rank, name, start))

    with pytest.raises(ContainerError, match=message):
        write_container(tmp_path, SPEC, source)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Tensor("", (1,), np.uint8), "cannot have the name ''"),
        (lambda: Tensor("t", (), np.uint8), "tensor t has the empty shape"),
        (lambda: Tensor("t", (2, 0), np.uint8), "tensor t has the empty shape"),
        (lambda: Tensor("t", (2,), jnp.int4), "dtype int4; store it as uint8"),
        (lambda: Spec("h", {"tp": 1}, "q", ()), "tensors with distinct names"),
        (lambda: Spec("h", {"tp": 1}, "q", SPEC.tensors * 2), "distinct names, not"),
        (lambda: Spec("h", {}, "q", SPEC.tensors), "has no ranks"),
    ],
)
def test_impossible_specifications_are_refused(wrong, message):
    with pytest.raises(ContainerError, match=message):
        wrong()


def test_ranks_outside_the_mesh_are_refused(written, tmp_path):
    with pytest.raises(ContainerError, match=r"rank 2 is outside 0\.\.1"):
        write_container(tmp_path, SPEC, _source, WriteOptions(ranks=[2]))
    with pytest.raises(ContainerError, match=r"rank 2 is outside 0\.\.1"):
        open_container(written).rank(2)


def test_a_large_tensor_is_written_in_bounded_memory(tmp_path):
    import tracemalloc

    spec = Spec("h", {"tp": 1}, "u8", (Tensor("stream", (64, 1 << 20), np.uint8),))

    def source(rank, name, start):
        for row in range(start, 64):
            yield np.full((1, 1 << 20), row, np.uint8)

    tracemalloc.start()
    write_container(tmp_path, spec, source, WriteOptions(sync_bytes=8 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    stored = open_container(tmp_path, verify=Verify.FULL).rank(0)["stream"]
    assert (stored == np.arange(64, dtype=np.uint8)[:, None]).all()
