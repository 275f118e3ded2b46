"""Incremental decoding and stop texts, on byte tokens and on SentencePiece pieces."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jradix.detokenizer import WINDOW_IDS, IncrementalDetokenizer
from jradix.tokenizer import Tokenizer
from tests.toy_tokenizers import make_byte_tokenizer, make_chat_tokenizer, make_sentencepiece_tokenizer

BYTES = make_chat_tokenizer()
PIECES = make_sentencepiece_tokenizer(["▁hi", "▁there", "lo"])


def deltas(tokenizer: Tokenizer, ids: list[int], **kwargs: object) -> list[str]:
    """One delta per id, and the flushed rest where there is one."""
    detokenizer = IncrementalDetokenizer(tokenizer, **kwargs)
    found = []
    for i in ids:
        stopped = detokenizer.push([i])
        found.append(detokenizer.delta())
        if stopped:
            break
    rest = detokenizer.finish()
    assert detokenizer.text == "".join(found) + rest
    return found + [rest] * bool(rest)


def split_tokenizer(*tokens: bytes) -> Tokenizer:
    return make_byte_tokenizer(list(dict.fromkeys(tokens)))


def test_delta_characters_over_tokens_come_whole() -> None:
    """T01: a token may end one character and begin the next."""
    tokenizer = split_tokenizer(b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd")
    assert deltas(tokenizer, [0, 1, 2]) == ["", "你", "好"]


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (3, 1), (1, 1, 1, 1)])
def test_delta_emoji_in_parts_comes_with_its_last_byte(sizes: tuple[int, ...]) -> None:
    """T01: a four-byte character in every split."""
    data, tokens = "😀".encode(), []
    for size in sizes:
        tokens.append(data[:size])
        data = data[size:]
    assert deltas(split_tokenizer(*tokens), list(range(len(tokens)))) == [""] * (len(tokens) - 1) + ["😀"]


PART = st.one_of(st.binary(min_size=1, max_size=4), st.text(min_size=1, max_size=3).map(lambda t: t.encode("utf-8")),
                 st.sampled_from([b"\xe4", b"\xbd", b"\xa0\xe5", b"\xf0\x9f", b"\x98", b"\xef\xbf\xbd", b"\x80",
                                  b"\xed\xa0"]))


@settings(max_examples=120, deadline=None)
@given(st.lists(PART, min_size=1, max_size=50), st.booleans())
def test_delta_any_bytes_add_up_to_decode_of_all(parts: list[bytes], has_stop: bool) -> None:
    """T01: every split of any byte sequence, invalid UTF-8 too; U+FFFD only where the bytes are invalid."""
    vocabulary = list(dict.fromkeys(parts))
    tokenizer = make_byte_tokenizer(vocabulary)
    found = deltas(tokenizer, [vocabulary.index(part) for part in parts], stop=["no such text"] if has_stop else [])
    assert "".join(found) == b"".join(parts).decode("utf-8", "replace")


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 258 + 98), st.sampled_from([3 + 0xE4, 3 + 0xBD, 3 + 0xA0, 259, 260])),
                max_size=50), st.booleans())
def test_delta_sentencepiece_ids_add_up_to_decode_of_all(ids: list[int], skip: bool) -> None:
    found = deltas(PIECES, ids, skip_special_tokens=skip)
    assert "".join(found) == PIECES.decode(ids, skip_special_tokens=skip)


def test_delta_sentencepiece_keeps_spaces_between_words() -> None:
    ids = [259, 260, 260, 259]
    assert deltas(PIECES, ids) == ["hi", " there", " there", " hi"]


def test_delta_byte_fallback_characters_come_as_they_complete() -> None:
    ids = [3 + b for b in "你好".encode()]
    assert deltas(PIECES, ids) == ["", "", "你", "", "", "好"]


def test_delta_byte_fallback_cut_character_spoils_nothing_before_it() -> None:
    ids = [3 + b for b in "你好".encode()[:-1]]
    assert "".join(deltas(PIECES, ids)) == PIECES.decode(ids) == "你\ufffd"


def test_delta_special_token_inside_character_is_skipped() -> None:
    ids = [0xE4, 256, 0xBD, 257, 0xA0]
    assert deltas(BYTES, ids) == ["", "", "", "", "你"]


@pytest.mark.parametrize("ids", [[ord("a")] * 400, [0x80] * 400, list("é你😀".encode()) * 40],
                         ids=["clean", "invalid", "mixed"])
def test_push_long_output_decodes_a_bounded_window(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, decode = [], Tokenizer.decode

    def counted(self: Tokenizer, ids: list[int], **kwargs: bool) -> str:
        sizes.append(len(ids))
        return decode(self, ids, **kwargs)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    detokenizer = IncrementalDetokenizer(BYTES)
    for i in ids:
        detokenizer.push([i])
        detokenizer.delta()
    assert max(sizes) <= 2 * WINDOW_IDS
    assert len(sizes) <= 1.5 * len(ids)


def test_push_without_stop_decodes_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, decode = [], Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, **kw: calls.append(len(ids)) or decode(self, ids, **kw))
    detokenizer = IncrementalDetokenizer(BYTES)
    for i in b"hello":
        detokenizer.push([i])
    assert calls == [] and detokenizer.num_tokens_used == 5
    assert detokenizer.finish() == "hello" == detokenizer.text
    assert calls == [5]


LETTERS = make_byte_tokenizer([b"AB", b"CD", b"EF", b"GH"])


@pytest.mark.parametrize("include, streamed, text", [(False, ["AB", "C", "", ""], "ABC"),
                                                     (True, ["AB", "C", "", "DEFG"], "ABCDEFG")])
def test_stop_over_several_tokens_is_never_sent_in_part(include: bool, streamed: list[str], text: str) -> None:
    """T03: streamed."""
    assert deltas(LETTERS, [0, 1, 2, 3], stop=["DEFG"], include_stop=include) == streamed
    assert "".join(streamed) == text


def test_stop_in_one_push_says_how_many_ids_were_used() -> None:
    """T03: not streamed; ids after the stop are not used."""
    detokenizer = IncrementalDetokenizer(LETTERS, stop=["DE"])
    assert detokenizer.push([0, 1, 2, 3, 0]) == "DE"
    assert detokenizer.num_tokens_used == 3
    assert detokenizer.text == "ABC"
    assert detokenizer.finish() == "ABC"
    with pytest.raises(ValueError, match="after the end"):
        detokenizer.push([0])


def test_finish_releases_the_beginning_of_a_stop_text() -> None:
    assert deltas(LETTERS, [0, 1, 2], stop=["DEFG"]) == ["AB", "C", "", "DEF"]


def test_stop_list_reports_only_given_texts() -> None:
    """T05: a text that never occurs shifts nothing; an empty one is refused."""
    detokenizer = IncrementalDetokenizer(BYTES, stop=["never", "END"])
    assert detokenizer.push(list(b"the END of it")) == "END"
    assert detokenizer.text == "the "
    for stop in (["", "END"], [""], "", "END"):
        with pytest.raises(ValueError, match="non-empty"):
            IncrementalDetokenizer(BYTES, stop=stop)


@pytest.mark.parametrize("stop, reason, text", [
    (["ABCD", "BC"], "BC", "A"), (["BC", "ABC"], "ABC", ""), (["C", "ABCD"], "C", "AB"),
    (["CD", "BCD", "D"], "BCD", "A")])
def test_stop_several_match_the_first_complete_then_longest_wins(stop: list[str], reason: str, text: str) -> None:
    """The outcome depends on the text alone, not on where its tokens end."""
    for tokens in ([b"ABCD"], [b"AB", b"CD"], [b"A", b"B", b"C", b"D"], [b"A", b"BCD"]):
        detokenizer = IncrementalDetokenizer(make_byte_tokenizer(tokens), stop=stop)
        assert detokenizer.push(range(len(tokens))) == reason
        assert detokenizer.text == text


@settings(max_examples=150, deadline=None)
@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=2, max_size=5), min_size=1, max_size=3),
       st.integers(0, 12), st.booleans())
def test_stop_random_texts_agree_with_reading_character_by_character(text: str, stop: list[str], min_tokens: int,
                                                                      include: bool) -> None:
    expected, reason = text, None
    for end in range(max(1, min_tokens), len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            reason = max(matches, key=len)
            expected = text[:end] if include else text[:end - len(reason)]
            break
    detokenizer = IncrementalDetokenizer(BYTES, stop=stop, min_tokens=min_tokens, include_stop=include)
    streamed = ""
    for i in text.encode():
        stopped = detokenizer.push([i])
        streamed += detokenizer.delta()
        assert expected.startswith(streamed)
        if stopped:
            break
    else:
        stopped = None
    streamed += detokenizer.finish()
    assert (streamed, stopped) == (expected, reason)


def test_stop_before_min_tokens_is_passed_over() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["b"], min_tokens=3)
    assert detokenizer.push(list(b"abcbd")) == "b"
    assert (detokenizer.text, detokenizer.num_tokens_used) == ("abc", 4)


@pytest.mark.parametrize("include", [False, True])
def test_stop_special_token_text_works_while_specials_are_skipped(include: bool) -> None:
    """T11: the stop is found, the text holds no special token."""
    detokenizer = IncrementalDetokenizer(BYTES, stop=["<|im_end|>"], include_stop=include)
    assert detokenizer.push([*b"hi", 257, *b"!", 258, *b"more"]) == "<|im_end|>"
    assert (detokenizer.text, detokenizer.num_tokens_used) == ("hi!", 5)


def test_stop_text_around_special_token_works_while_specials_are_skipped() -> None:
    """T11: text before and after the special token belongs to the stop."""
    detokenizer = IncrementalDetokenizer(BYTES, stop=["!<|im_end|>\n"])
    assert detokenizer.push([*b"a!b!", 258]) is None
    assert detokenizer.delta() == "a!b"
    assert detokenizer.push([10]) == "!<|im_end|>\n"
    assert detokenizer.text == "a!b"


def test_stop_special_token_spelled_by_ordinary_tokens_still_stops() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["<|im_end|>"])
    assert detokenizer.push(list(b"hi<|im_end|>")) == "<|im_end|>"
    assert detokenizer.text == "hi"


def test_stop_inside_special_token_is_not_found_when_skipped_and_found_when_kept() -> None:
    assert IncrementalDetokenizer(BYTES, stop=["im_"]).push([258]) is None
    assert IncrementalDetokenizer(BYTES, stop=["im_"], skip_special_tokens=False).push([258]) == "im_"


def test_finish_with_marks_held_back_leaves_no_mark_in_text() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["<|im_end|>\n"])
    assert detokenizer.push([*b"hi", 258, *b"x", 258]) is None
    assert detokenizer.finish() == "hix" == detokenizer.text
