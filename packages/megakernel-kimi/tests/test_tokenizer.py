"""The converted tokenizer: ids equal to tiktoken's, exact ids of control tokens, limits, errors.

`golden/tiktoken/ids.json` holds what the tiktoken package encodes with the rank table that
`conftest.py` trains; `golden/tiktoken/make_ids.py` wrote it. The real vocabulary is not covered.
"""

import base64
import hashlib
import json
from pathlib import Path

import pytest
from kda_mla_kernels.errors import CheckpointError
from megakernel_kimi.tokenizer import KimiTokenizer, load_tokenizer
from megakernel_kimi.tokenizer.limits import MAX_CHARACTERS, MAX_RUN, cut
from megakernel_kimi.tokenizer.merges import recover_merges
from megakernel_kimi.tokenizer.ranks import read_ranks
from tokenizers import Tokenizer

FIXTURE = json.loads((Path(__file__).parent / "golden" / "tiktoken" / "ids.json").read_text())


def write_checkpoint(folder, ranks, specials):
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    added = {str(token): {"content": name, "special": False} for token, name in specials.items()}
    config = {"added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_the_fixture_belongs_to_this_rank_table(ranks):
    listed = json.dumps([[token.hex(), rank] for token, rank in ranks.items()])
    assert hashlib.sha256(listed.encode()).hexdigest() == FIXTURE["ranks_sha256"]


def test_ids_equal_those_of_tiktoken(tokenizer):
    assert len(FIXTURE["cases"]) > 100
    for text, ids in FIXTURE["cases"]:
        assert tokenizer.encode_text(text) == ids, text


def test_ids_decode_to_the_text_they_came_from(tokenizer):
    for text, ids in FIXTURE["cases"]:
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
        assert tokenizer.control.decode(ids) == text
        assert tokenizer.text.decode(ids) == text


def test_every_merge_is_recovered_and_a_token_without_one_is_taken_whole(ranks, tokenizer):
    pairs = recover_merges(ranks)
    assert [left + right for left, right in pairs] == [
        token for token in ranks if len(token) > 1 and token != b"zqxj"
    ]
    assert tokenizer.encode_text("zqxj") == [ranks[b"zqxj"]]


def test_control_tokens_have_their_exact_ids_in_the_control_object(tokenizer, specials):
    for token, name in specials.items():
        assert tokenizer.control.token_to_id(name) == token
        assert tokenizer.control.encode(f"a{name}b").ids[1] == token
        assert tokenizer.special_id(name) == token


def test_unnamed_slots_get_reserved_names_up_to_the_end_of_the_vocabulary(tokenizer, ranks):
    first = max(ranks.values()) + 1
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.control.get_vocab_size() == len(ranks) + 256
    assert tokenizer.control.id_to_token(first + 100) == f"<|reserved_token_{first + 100}|>"
    assert tokenizer.control.id_to_token(first + 254) == "[UNK]"


def test_names_of_control_tokens_are_ordinary_in_the_text_object(tokenizer, specials):
    for name in specials.values():
        ids = tokenizer.encode_text(f"say {name} twice: {name}")
        assert all(map(tokenizer.is_text, ids))
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == f"say {name} twice: {name}"
        assert tokenizer.text.token_to_id(name) is None


def test_holes_and_ids_out_of_range_stand_for_no_bytes(tokenizer, ranks):
    hole = ranks[b"zqxj"] - 1
    for token in (hole, -1, tokenizer.vocab_size, tokenizer.special_id("<|open|>")):
        assert tokenizer.token_bytes(token) == b""
        assert not tokenizer.is_text(token)
    assert tokenizer.control.id_to_token(hole) is None
    assert tokenizer.control.decode([hole]) == ""


def test_decoding_hides_control_tokens_unless_asked(tokenizer):
    ids = [*tokenizer.encode_text("hi"), tokenizer.special_id("<|sep|>")]
    assert tokenizer.control.decode(ids, skip_special_tokens=True) == "hi"
    assert tokenizer.control.decode(ids, skip_special_tokens=False) == "hi<|sep|>"


def test_a_checkpoint_folder_gives_the_same_tokenizer(tmp_path, ranks, specials, tokenizer):
    write_checkpoint(tmp_path, ranks, specials)
    loaded = load_tokenizer(tmp_path)
    assert loaded.control.to_str() == tokenizer.control.to_str()
    assert loaded.text.to_str() == tokenizer.text.to_str()
    assert load_tokenizer(tmp_path, vocab_size=2000).vocab_size == 2000


def test_a_cached_conversion_is_used_and_a_damaged_or_foreign_one_is_not(
    tmp_path, ranks, specials, tokenizer, monkeypatch
):
    write_checkpoint(tmp_path, ranks, specials)
    folder = tmp_path / "new" / "cache"
    load_tokenizer(tmp_path, cache=folder)
    (file,) = folder.iterdir()
    assert Tokenizer.from_file(str(file)).to_str() == tokenizer.control.to_str()

    module = "megakernel_kimi.tokenizer.kimi.control_tokenizer"
    with monkeypatch.context() as patch:
        patch.setattr(module, None)
        again = load_tokenizer(tmp_path, cache=folder)
    assert again.encode_text("Hello <|open|>") == tokenizer.encode_text("Hello <|open|>")

    file.write_text("{")
    load_tokenizer(tmp_path, cache=folder)
    assert Tokenizer.from_file(str(file)).to_str() == tokenizer.control.to_str()
    load_tokenizer(tmp_path, cache=folder, vocab_size=2000)
    assert len(list(folder.iterdir())) == 2


def cut_by_walking(text):
    """The rule of the checkpoint's tokenizer, character by character."""
    pieces = []
    for start in range(0, len(text), MAX_CHARACTERS):
        piece, run = "", 0
        for character in text[start : start + MAX_CHARACTERS]:
            same = bool(piece) and piece[-1].isspace() == character.isspace()
            run = run + 1 if same else 1
            if run > MAX_RUN:
                pieces.append(piece)
                piece, run = "", 1
            piece += character
        pieces.append(piece)
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * MAX_RUN,
        "a" * (MAX_RUN + 1),
        "b " + "a" * (2 * MAX_RUN + 5) + " c" + "\u3000\x1c\n " * MAX_RUN + "d",
        "ab " * 140_000,
        " " * MAX_CHARACTERS + "x" * (MAX_RUN + 1),
    ],
    ids=["empty", "at the limit", "one over", "mixed", "long text", "both limits"],
)
def test_long_texts_are_cut_where_the_checkpoint_cuts_them(text):
    assert list(cut(text)) == cut_by_walking(text)


def test_a_long_run_is_encoded_piece_by_piece(tokenizer):
    whole = "the" * 10_000
    first, second = whole[:MAX_RUN], whole[MAX_RUN:]
    ids = tokenizer.encode_text(whole)
    assert ids == tokenizer.encode_text(first) + tokenizer.encode_text(second)
    assert ids != tokenizer.text.encode(whole).ids


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"!!! 300\n", "base64 bytes, a space and a rank"),
        (b"YQ==\n", "line 257"),
        (b"YWI= x\n", "line 257"),
        (b"YWI= -1\n", "line 257"),
        (b" 300\n", "line 257"),
        (b"YQ== 300\n", "token b'a' comes twice"),
        (b"YWI= 7\n", "rank 7 comes twice"),
    ],
)
def test_a_malformed_line_of_the_rank_file_is_named(tmp_path, line, message):
    bytes_only = [b"%s %d\n" % (base64.b64encode(bytes([b])), b) for b in range(256)]
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"".join(bytes_only))
    assert len(read_ranks(path)) == 256
    path.write_bytes(b"".join(bytes_only) + line)
    with pytest.raises(CheckpointError, match=message):
        read_ranks(path)


def test_a_rank_file_without_all_bytes_is_refused(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(b"YQ== 0\n")
    with pytest.raises(CheckpointError, match="255 of the 256 single bytes have no rank"):
        read_ranks(tmp_path / "tiktoken.model")


def test_missing_files_are_named(tmp_path, ranks):
    with pytest.raises(CheckpointError, match=r"tiktoken\.model: No such file"):
        load_tokenizer(tmp_path)
    write_checkpoint(tmp_path, ranks, {})
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: No such file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"added_tokens_decoder": {"x": {}}}'])
def test_a_malformed_tokenizer_config_is_named(tmp_path, ranks, content):
    write_checkpoint(tmp_path, ranks, {})
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match="must hold added_tokens_decoder"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("specials", "options", "message"),
    [
        ({65: "[BOS]"}, {}, "id 65, which is the base token b'A'"),
        ({5000: "[BOS]"}, {}, "id 5000, but the vocabulary has"),
        ({1000: "[BOS]", 1001: "[BOS]"}, {}, "belongs to two control tokens"),
        ({1000: "A"}, {}, r"'A' \(id 1000\) is spelled like base token 65"),
        ({}, {"vocab_size": 300}, "the vocabulary 300 rows"),
    ],
)
def test_control_tokens_that_collide_are_refused(ranks, specials, options, message):
    with pytest.raises(CheckpointError, match=message):
        KimiTokenizer(ranks, specials, **options)


def test_a_control_token_may_stand_in_a_hole(ranks):
    hole = ranks[b"zqxj"] - 1
    assert KimiTokenizer(ranks, {hole: "[HOLE]"}).control.encode("[HOLE]").ids == [hole]


def test_an_unknown_control_token_is_named(tokenizer):
    with pytest.raises(CheckpointError, match=r"no control token named '<\|image\|>'"):
        tokenizer.special_id("<|image|>")
