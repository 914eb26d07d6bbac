"""Detokenizer, stop strings, and both kinds of answers."""

from __future__ import annotations

import pytest
from bigram import BigramChat, build_tokenizer
from kda_mla_kernels.chat import CallStart, ChatOptions, ContentText, ReasoningText
from megakernel_serve.text import ChatAnswer, Detokenizer, LengthBound, StopScanner, TextAnswer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def byte_id(tokenizer, byte):
    """The id of one byte: a byte-level tokenizer has one for each."""
    from tokenizers import pre_tokenizers

    alphabet = {}
    extra = 0
    for value in range(256):
        printable = 33 <= value <= 126 or 161 <= value <= 172 or 174 <= value <= 255
        alphabet[value] = chr(value) if printable else chr(256 + extra)
        extra += not printable
    assert set(alphabet.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return tokenizer.token_to_id(alphabet[byte])


def test_text_of_any_script_is_the_same_token_by_token(tokenizer):
    text = "hello world, größer 日本語 \u05e9 🙂👩‍💻 e\u0301\n  end"
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + detokenizer.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_code_point_waits_for_its_last_token(tokenizer):
    ids = tokenizer.encode("🙂").ids
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert detokenizer.finish() == ""


def test_an_incomplete_end_becomes_a_replacement_character(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokenizer.encode("a🙂").ids[:-1]]
    assert "".join(pieces) == "a"
    assert set(detokenizer.finish()) == {"\ufffd"}


def test_bytes_that_are_never_valid_do_not_hold_back_what_follows(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    ids = [byte_id(tokenizer, byte) for byte in (0x61, 0xFF, 0x80, 0x80, 0x62, 0x63)]
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.finish()
    assert text.startswith("a")
    assert text.endswith("bc")
    assert "\ufffd" in text


def test_unknown_and_special_ids_give_no_text_and_do_no_harm(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    end = tokenizer.token_to_id("<end>")
    he, llo = tokenizer.encode("he").ids, tokenizer.encode("llo").ids
    ids = [*he, 10**6, end, tokenizer.get_vocab_size(), *llo]
    assert "".join(detokenizer.push(token) for token in ids) == "hello"


def test_a_kept_special_token_gives_its_text(tokenizer):
    detokenizer = Detokenizer(tokenizer, keep=("<end>",))
    assert detokenizer.push(tokenizer.token_to_id("<end>")) == "<end>"
    assert detokenizer.push(tokenizer.token_to_id("<user>")) == ""


def scan(stops, pieces, include=False):
    scanner = StopScanner(stops, include)
    shown = [scanner.push(piece) for piece in pieces]
    return shown, scanner.matched, scanner.flush()


def test_without_stops_everything_passes_at_once():
    assert scan([], ["ab", "c"]) == (["ab", "c"], None, "")


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["a STOP b"], ["a "]),
        (["a S", "TO", "P b"], ["a ", "", ""]),
        (["aS", "TOSTO", "P"], ["a", "STO", ""]),
        (["STOP", "more"], ["", ""]),
    ],
)
def test_a_stop_is_found_inside_and_across_pieces(pieces, shown):
    assert scan(["STOP"], pieces) == (shown, "STOP", "")


def test_only_what_could_become_a_stop_is_held_back():
    scanner = StopScanner(["\n\nUser:"])
    assert scanner.push("line\n") == "line"
    assert scanner.push("next\n\nUs") == "\nnext"
    assert scanner.push("eless") == "\n\nUseless"
    assert scanner.push(" \n") == " "
    assert scanner.flush() == "\n"


def test_the_stop_that_ends_first_wins_and_the_list_decides_between_equals():
    assert scan(["abcdef", "cd"], ["xabcdefx"])[:2] == (["xab"], "cd")
    assert scan(["bcd", "cd"], ["abcd"])[:2] == (["a"], "bcd")
    assert scan(["cd", "bcd"], ["abcd"])[:2] == (["ab"], "cd")


def test_the_matched_stop_can_be_included():
    assert scan(["cd"], ["abc", "de"], include=True) == (["ab", "cd"], "cd", "")


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopScanner(["a", ""])


def test_tokens_behind_the_one_that_completes_a_stop_are_neither_shown_nor_counted(tokenizer):
    ids = tokenizer.encode("hello world and more").ids
    answer = TextAnswer(tokenizer, ["wor"])
    assert "".join(answer.push(ids)) == "hello "
    assert answer.matched == "wor"
    assert answer.tokens == len(tokenizer.encode("hello wor").ids)
    assert answer.finish("stop") == []


def test_text_held_for_a_stop_is_flushed_at_the_end(tokenizer):
    answer = TextAnswer(tokenizer, ["world!"])
    shown = "".join(answer.push(tokenizer.encode("hello world").ids))
    assert shown == "hello "
    assert answer.finish("length") == ["world"]
    assert answer.matched is None


def test_stops_do_not_count_before_min_tokens(tokenizer):
    ids = tokenizer.encode("hello hello hello").ids
    answer = TextAnswer(tokenizer, ["hello"], min_tokens=1)
    first = answer.push(ids)
    assert "".join(first) == "hello "
    assert 1 < answer.tokens < len(ids)


def chat_answer(tokenizer, text, stops, thinking=False):
    chat = BigramChat(tokenizer)
    options = ChatOptions(thinking=thinking)
    rendered = chat.render([{"role": "user", "content": "x"}], options)
    answer = ChatAnswer(chat.parser(rendered), stops)
    return answer.push(tokenizer.encode(text).ids) + answer.finish("stop"), answer


def test_stop_strings_apply_to_content_and_not_to_reasoning(tokenizer):
    events, answer = chat_answer(tokenizer, "a. b</think>c. d", ["."], thinking=True)
    assert "".join(e.text for e in events if isinstance(e, ReasoningText)) == "a. b"
    assert "".join(e.text for e in events if isinstance(e, ContentText)) == "c"
    assert answer.matched == "."
    assert answer.reasoning_tokens == 4


def test_content_held_for_a_stop_comes_before_the_call_that_follows(tokenizer):
    events, _ = chat_answer(tokenizer, 'abS<call>f{"x":"STOP"}</call>', ["STOP"])
    texts = "".join(e.text for e in events if isinstance(e, ContentText))
    assert texts == "abS"
    kinds = [type(event) for event in events]
    assert max(i for i, k in enumerate(kinds) if k is ContentText) < kinds.index(CallStart)


def test_a_text_that_fits_never_exceeds_the_bound(tokenizer):
    bound = LengthBound.of(tokenizer)
    for text in ("<think>" * 9, "hello" * 9, "🙂é ß", ""):
        assert not bound.exceeded(text, len(tokenizer.encode(text).ids))
    assert bound.longest == len("</think>")
    assert bound.exceeded("é" * 5, 1)
    assert not bound.exceeded("é" * 4, 1)


def test_composed_text_counts_as_the_tokenizer_sees_it():
    from tokenizers import normalizers

    tokenizer = build_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    bound = LengthBound.of(tokenizer)
    apart = "e\u0301" * 4  # 12 bytes, 8 once composed
    assert not bound.exceeded(apart, 1)
    assert bound.exceeded(apart + "e", 1)


def test_tokenizers_that_may_drop_text_have_no_bound():
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    changes = [
        lambda one: setattr(one, "normalizer", normalizers.Strip()),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda one: one.add_tokens([AddedToken("<mask>", lstrip=True)]),
        lambda one: one.enable_truncation(5),
    ]
    for change in changes:
        tokenizer = build_tokenizer()
        change(tokenizer)
        assert LengthBound.of(tokenizer).longest is None
        assert not LengthBound.of(tokenizer).exceeded("x" * 10**6, 1)
