"""The tokenizer: text and control tokens apart, bytes of ids, incremental decoding, errors."""

import json
import random

import pytest
from kda_mla_kernels.errors import CheckpointError
from megakernel_qwen.embedded import folder
from megakernel_qwen.tokenizer import QwenTokenizer, TextStream, load_tokenizer

TEXTS = [
    "Hello, world! It's 12345 o'clock.",
    "def f(x):\n    return x ** 2\n\n\n",
    "  leading, trailing  \t\n",
    "naïve café, Ελληνικά, 中文字, हिन्दी",
    "👩‍🚀🏳️‍🌈 emoji with joiners 👍🏽",
    "\ufeff byte-order mark and \x00 NUL",
    "",
]
LOOK_ALIKES = ["<think>", "</think>", "<|im_end|>", "<tool_call>", "<tool_response>", "<|fim_pad|>"]


@pytest.fixture(scope="module")
def tokenizer() -> QwenTokenizer:
    return load_tokenizer(folder())


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_ids(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_text_is_normalised_to_composed_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode_text("e\u0301")) == "\u00e9"


def test_digits_are_split_one_by_one(tokenizer):
    assert len(tokenizer.encode_text("2026")) == 4


@pytest.mark.parametrize("text", LOOK_ALIKES)
def test_text_that_looks_like_a_control_token_stays_text(tokenizer, text):
    token_ids = tokenizer.encode_text(f"a{text}b")
    assert not tokenizer.control_ids & set(token_ids)
    assert tokenizer.decode(token_ids) == f"a{text}b"
    assert tokenizer.control_id(text) in tokenizer.tokenizer.encode(text).ids


def test_decoding_agrees_with_the_library(tokenizer):
    draw = random.Random(0)
    for _ in range(200):
        token_ids = [draw.randrange(2000) for _ in range(20)]
        assert tokenizer.decode(token_ids) == tokenizer.tokenizer.decode(token_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_whole_code_points(tokenizer, text):
    stream = TextStream(tokenizer)
    pieces = [stream.push(token_id) for token_id in tokenizer.encode_text(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert stream.flush() == ""


def test_a_stream_that_ends_inside_a_code_point_flushes_a_replacement(tokenizer):
    stream = TextStream(tokenizer)
    *first, _ = tokenizer.encode_text("\U0001f680")
    assert [stream.push(token_id) for token_id in first] == [""] * len(first)
    assert stream.flush() == "\ufffd"
    assert stream.push(tokenizer.encode_text("a")[0]) == "a"


def test_a_stream_ignores_ids_outside_the_tokenizer(tokenizer):
    stream = TextStream(tokenizer)
    first, *rest = tokenizer.encode_text("\U0001f680")
    assert stream.push(first) + stream.push(2047) + stream.push(10**9) == ""
    assert "".join(map(stream.push, rest)) == "\U0001f680"


def test_a_lone_surrogate_is_refused_with_its_own_error(tokenizer):
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode_text("\ud800")


def test_a_missing_control_token_is_named(tokenizer):
    with pytest.raises(CheckpointError, match="no control token '<missing>'"):
        tokenizer.control_id("<missing>")


def test_an_ordinary_token_is_no_control_token(tokenizer):
    with pytest.raises(CheckpointError, match="no control token 'a'"):
        tokenizer.control_id("a")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "cannot be read as text"),
        (b"[]", "does not describe a BPE tokenizer"),
        (b'{"model": {"type": "Unigram"}}', "does not describe a BPE tokenizer"),
        (b'{"model": {"type": "BPE"}}', "decoder must be ByteLevel"),
        (b'{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}', "not a valid tokenizer"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, contents, message):
    (tmp_path / "tokenizer.json").write_bytes(contents)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


def test_a_post_processor_that_adds_tokens_does_not_touch_text(tokenizer):
    description = json.loads((folder() / "tokenizer.json").read_text(encoding="utf-8"))
    start = {"id": "<|im_start|>", "type_id": 0}
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": start}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [2001], "tokens": ["<|im_start|>"]}
        },
    }
    changed = QwenTokenizer(json.dumps(description))
    assert changed.tokenizer.encode("hi").ids[0] == changed.control_id("<|im_start|>")
    assert changed.encode_text("hi") == tokenizer.encode_text("hi")
