"""Reading tensors: every element type, every kind of slice, and how much memory it takes."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kda_mla_kernels.checkpoint import open_checkpoint, reading
from kda_mla_kernels.errors import CheckpointError
from safetensors import deserialize
from safetensors.numpy import save_file

STORED = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


def write_raw(folder: Path, tensors: dict[str, tuple[str, list[int], bytes]], pad: int = 0) -> Path:
    """A checkpoint of raw bytes; ``pad`` spaces shift the data, so that it is unaligned."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode() + b" " * pad
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def random_bytes(count: int) -> bytes:
    return np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("dtype_name", STORED)
def test_every_type_is_read_in_its_own_numpy_type_with_the_bits_of_the_file(tmp_path, dtype_name):
    dtype = np.dtype(STORED[dtype_name])
    raw = random_bytes(6 * dtype.itemsize)
    if dtype == np.bool_:
        raw = bytes(byte & 1 for byte in raw)
    tensor = open_checkpoint(write_raw(tmp_path, {"w": (dtype_name, [2, 3], raw)})).read("w")
    assert tensor.dtype == dtype
    assert tensor.shape == (2, 3)
    assert tensor.tobytes() == raw


@pytest.mark.parametrize("dtype_name", ["BF16", "F32", "F64", "F8_E4M3"])
@pytest.mark.parametrize("pad", [0, 1, 3])
def test_data_at_odd_addresses_is_read_alike(tmp_path, dtype_name, pad):
    itemsize = np.dtype(STORED[dtype_name]).itemsize
    raw = random_bytes(12 * itemsize)
    folder = write_raw(tmp_path, {"w": (dtype_name, [3, 4], raw)}, pad)
    part = open_checkpoint(folder).read("w", (slice(None), slice(1, 3)))
    rows = np.frombuffer(raw, np.uint8).reshape(3, 4, itemsize)
    assert part.tobytes() == rows[:, 1:3].tobytes()
    assert part.flags.aligned


def test_files_of_the_safetensors_library_are_read_as_it_wrote_them(tmp_path):
    rng = np.random.default_rng(0)
    written = {
        f"layer.{np.dtype(dtype).name}": rng.normal(size=(3, 5)).astype(dtype)
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
    }
    written["scalar"] = np.array(7, np.int32)
    written["empty"] = np.zeros((0, 4), np.float32)
    (tmp_path / "config.json").write_text("{}")
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "np"})
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(written)
    for name, value in written.items():
        read = checkpoint.read(name)
        assert read.dtype == value.dtype
        assert read.shape == value.shape
        assert read.tobytes() == value.tobytes()


def test_our_reading_of_raw_bytes_agrees_with_the_library_for_types_that_numpy_lacks(tmp_path):
    raw = random_bytes(32)
    tensors = {"scale": ("F8_E8M0", [4, 8], raw), "packed": ("F4", [4, 16], raw)}
    folder = write_raw(tmp_path, tensors, pad=-len(json.dumps({})) % 8)
    checkpoint = open_checkpoint(folder)
    library = dict(deserialize((folder / "model.safetensors").read_bytes()))
    assert checkpoint.read("scale").tobytes() == bytes(library["scale"]["data"])
    assert checkpoint.info("packed").bytes == len(library["packed"]["data"])


FLOAT4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_four_bit_floats_are_unpacked_low_bits_first(tmp_path):
    raw = bytes([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    checkpoint = open_checkpoint(write_raw(tmp_path, {"w": ("F4", [2, 8], raw)}))
    info = checkpoint.info("w")
    assert (info.shape, info.dtype, info.bytes) == ((2, 8), ml_dtypes.float4_e2m1fn, 8)
    values = checkpoint.read("w").astype(np.float32)
    np.testing.assert_array_equal(values, [FLOAT4_VALUES, [-value for value in FLOAT4_VALUES]])


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("step", [1, 2, 3])
def test_slices_of_four_bit_floats_count_elements_not_bytes(tmp_path, start, step):
    raw = random_bytes(3 * 5)
    checkpoint = open_checkpoint(write_raw(tmp_path, {"w": ("F4", [3, 10], raw)}))
    whole = checkpoint.read("w").view(np.uint8)
    for stop in range(start, 11):
        part = checkpoint.read("w", (slice(0, 3, 2), slice(start, stop, step)))
        np.testing.assert_array_equal(part.view(np.uint8), whole[0:3:2, start:stop:step])


def test_every_slice_equals_the_slice_of_the_whole_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 64)  # so that small tensors take every path
    rng = np.random.default_rng(1)
    whole = rng.normal(size=(7, 6, 5)).astype(np.float32)
    checkpoint = open_checkpoint(write_raw(tmp_path, {"w": ("F32", [7, 6, 5], whole.tobytes())}))
    for _ in range(300):
        depth = int(rng.integers(0, 4))
        index = tuple(
            slice(*map(int, sorted(rng.integers(0, extent + 1, 2))), int(rng.integers(1, 4)))
            if rng.random() < 0.7
            else slice(None)
            for extent in whole.shape[:depth]
        )
        part = checkpoint.read("w", index)
        np.testing.assert_array_equal(part, whole[index], err_msg=str(index))
        assert part.flags.c_contiguous
        assert part.flags.owndata or part.base.flags.owndata


def test_one_slice_and_negative_bounds_select_as_in_numpy(tmp_path):
    whole = np.arange(20, dtype=np.int16).reshape(5, 4)
    checkpoint = open_checkpoint(write_raw(tmp_path, {"w": ("I16", [5, 4], whole.tobytes())}))
    np.testing.assert_array_equal(checkpoint.read("w", slice(1, 3)), whole[1:3])
    np.testing.assert_array_equal(checkpoint.read("w", slice(-2, None)), whole[-2:])
    np.testing.assert_array_equal(checkpoint.read("w", (slice(4, 1),)), whole[4:1])


def test_the_result_is_a_copy_that_outlives_the_file(tmp_path):
    raw = np.arange(8, dtype=np.float32)
    checkpoint = open_checkpoint(write_raw(tmp_path, {"w": ("F32", [2, 4], raw.tobytes())}))
    part = checkpoint.read("w", (slice(None), slice(0, 2)))
    (tmp_path / "model.safetensors").unlink()
    part += 1
    np.testing.assert_array_equal(part, [[1, 2], [5, 6]])


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ((slice(0, 3),), IndexError, r"slice 0:3 exceeds axis 0 of tensor 'w', which has 2"),
        ((slice(None), slice(-5, 2)), IndexError, r"slice -5:2 exceeds axis 1"),
        ((slice(None),) * 3, IndexError, r"3 slices for tensor 'w' of shape \[2, 4\]"),
        ((slice(None, None, -1),), IndexError, r"step -1 on axis 0 .* must be at least 1"),
        ((slice(None, None, 0),), IndexError, r"step 0 on axis 0"),
        ((slice(None), 1), TypeError, r"axis 1 of tensor 'w' needs a slice, not 1"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, index, error, message):
    checkpoint = open_checkpoint(write_raw(tmp_path, {"w": ("U8", [2, 4], bytes(8))}))
    with pytest.raises(error, match=message):
        checkpoint.read("w", index)


@pytest.mark.parametrize("index", [None, (slice(None), slice(0, 2))])
def test_a_file_that_shrinks_or_goes_after_opening_is_an_error_and_no_crash(tmp_path, index):
    checkpoint = open_checkpoint(write_raw(tmp_path, {"w": ("U8", [2, 4], bytes(8))}))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="truncated after it was opened"):
        checkpoint.read("w", index)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read from .*No such file"):
        checkpoint.read("w", index)


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files and VmHWM")
def test_slices_of_a_file_larger_than_memory_take_little_memory(tmp_path):
    rows, columns = 1 << 22, 1 << 14  # 128 GiB of bf16
    header = {
        "huge": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, 2 * rows * columns]}
    }
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * rows * columns)
    script = """
        import re, sys
        from kda_mla_kernels.checkpoint import open_checkpoint

        def peak():  # KiB
            return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

        checkpoint = open_checkpoint(sys.argv[1])
        before = peak()
        end = checkpoint.info("huge").shape[0]
        checkpoint.read("huge", (slice(end - 64, end),))                      # 2 MiB, one run
        checkpoint.read("huge", (slice(end // 2, end // 2 + 12288), slice(0, 8)))  # 384 MiB apart
        checkpoint.read("huge", (slice(0, end, end // 8), slice(5, 7)))       # far apart
        print(peak() - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 100 << 10
