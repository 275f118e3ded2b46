"""Expressions: what the constructors simplify, and that a character is exactly its UTF-8 form."""
from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jradix.errors import GrammarError
from jradix.grammar import language as lang
from jradix.grammar.dfa import compile_language

A, B = lang.text("a"), lang.text("b")


def test_neutral_parts_vanish() -> None:
    assert lang.seq().is_epsilon and lang.alt().is_nothing
    assert lang.seq(A, lang.epsilon()) is A and lang.alt(A, lang.nothing()).value == b"a"
    assert lang.seq(A, lang.nothing()).is_nothing and lang.both(A, lang.nothing()).is_nothing
    assert lang.but_not(A, lang.nothing()) is A and lang.but_not(A, A).is_nothing
    assert lang.repeat(lang.nothing(), 0).is_epsilon and lang.repeat(lang.nothing(), 1).is_nothing
    assert lang.repeat(A, 0, 0).is_epsilon and lang.repeat(lang.epsilon(), 3).is_epsilon


def test_adjacent_texts_join_and_sequences_flatten() -> None:
    joined = lang.seq(A, lang.seq(B, lang.any_char()), lang.text("é"))
    assert [part.kind for part in joined.parts] == ["text", "alt", "text"] and joined.parts[0].value == b"ab"


def test_alternative_texts_become_sorted_words() -> None:
    words = lang.alt(lang.text("three"), lang.alt(lang.text("one"), lang.epsilon()), lang.text("one"))
    assert words.kind == "words" and words.value == (b"", b"one", b"three") and words.nullable
    assert lang.alt(A, B).kind == "bytes"
    assert lang.both(words, lang.alt(lang.text("one"), lang.text("two"))).value == b"one"


@pytest.mark.parametrize(("inner", "outer", "expected"), [
    ((0, None), (0, None), (0, None)), ((1, None), (0, None), (0, None)), ((2, None), (3, 5), (6, None)), ((0, 3), (2,
    4), (0, 12)),
    ((0, 3), (2, None), (0, None)), ((5, 5), (4, 4), (20, 20)), ((0, None), (1, 1), (0, None))])
def test_nested_repeats_collapse_to_one(inner: tuple, outer: tuple, expected: tuple) -> None:
    assert lang.repeat(lang.repeat(A, *inner), *outer).value == expected


@settings(max_examples=150, deadline=None, derandomize=True)
@given(*(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3)) for _ in range(2)))
def test_repeat_of_repeat_counts_exactly(inner: tuple, outer: tuple) -> None:
    if any(high is not None and high < low for low, high in (inner, outer)):
        return
    dfa = compile_language(lang.repeat(lang.repeat(A, *inner), *outer))
    top = 12
    inner_counts = range(inner[0], (top if inner[1] is None else inner[1]) + 1)
    reached, now = set(), {0}
    for turn in range((top if outer[1] is None else outer[1]) + 1):
        if turn >= outer[0]:
            reached |= now
        now = {count + more for count in now for more in inner_counts if count + more <= top}
    assert [dfa.accepts("a" * count) for count in range(top)] == [count in reached for count in range(top)]


def test_shortest_is_a_lower_bound_and_nullable_exact() -> None:
    assert lang.repeat(lang.text("abc"), 1000, 2000).shortest == 3000
    assert lang.both(lang.utf8_strings(), lang.repeat(A, 7)).shortest == 7
    assert lang.optional(A).nullable and not lang.but_not(lang.utf8_strings(), lang.optional(A)).nullable
    assert lang.optional(lang.optional(A)).value == (0, 1)


def test_wrong_argument_is_refused() -> None:
    for call in (lambda: lang.byte_set([256]), lambda: lang.repeat(A, 2, 1), lambda: lang.repeat(A, -1), lang.both,
                 lambda: lang.chars([(5, 4)]), lambda: lang.chars([(0, 0x110000)])):
        with pytest.raises(ValueError, match="expected"):
            call()
    with pytest.raises(GrammarError, match="lone surrogate at position 1"):
        lang.text("a\ud800")


# -- characters


def random_ranges(source: random.Random) -> list[tuple[int, int]]:
    borders = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x10FFFF]
    found = []
    for _ in range(source.randrange(1, 6)):
        low = max(0, min(0x10FFFF, source.choice(borders) + source.randrange(-70, 70)))
        found.append((low, min(0x10FFFF, low + source.choice([0, 1, 63, 64, 4096, 300_000]))))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_chars_accepts_exactly_the_utf8_of_its_code_points(seed: int) -> None:
    """X06: never a lone continuation byte, a surrogate or an overlong form."""
    source = random.Random(seed)
    ranges = random_ranges(source)
    dfa = compile_language(lang.chars(ranges), allow_empty=True)
    near = {end + delta for low, high in ranges for end in (low, high, (low + high) // 2) for delta in (-65, -64, -1,
                                                            0, 1, 63, 64)}
    for point in near | {source.randrange(0x110000) for _ in range(200)}:
        if 0 <= point < 0x110000:
            is_inside = any(low <= point <= high for low, high in ranges) and not 0xD800 <= point < 0xE000
            assert dfa.accepts(chr(point).encode("utf-8", "surrogatepass")) == is_inside, hex(point)
    for _ in range(400):
        data = bytes(source.choice([0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0,
                     0xED, 0xEF, 0xF0, 0xF4,
                                    0xF5, 0xFF]) for _ in range(source.randrange(1, 5)))
        if dfa.accepts(data):
            assert len(data.decode("utf-8")) == 1


def test_any_char_has_one_path_per_code_point() -> None:
    """The number of accepted strings of each length is that of the code points with such a form."""
    dfa = compile_language(lang.any_char())
    counts = {0: 1}
    lengths = []
    for _ in range(4):
        following: dict[int, int] = {}
        for state, count in counts.items():
            for byte in dfa.allowed_bytes(state):
                target = dfa.walk(state, bytes((byte,)))
                following[target] = following.get(target, 0) + count
        counts = following
        lengths.append(sum(count for state, count in counts.items() if dfa.accepting[state]))
    assert lengths == [128, 0x780, 0x10000 - 0x800 - 2048, 0x100000]


def test_ranges_merge_and_cut() -> None:
    assert lang.merged_ranges([(5, 9), (1, 2), (3, 3), (8, 12)]) == ((1, 3), (5, 12))
    source = random.Random(1)
    for _ in range(200):
        left, right = (lang.merged_ranges([(low, low + source.randrange(4)) for low in source.sample(range(30),
                       5)]) for _ in range(2))
        expected = {i for low, high in left for i in range(low, high + 1)} - {i for low,
                                                           high in right for i in range(low, high + 1)}
        assert {i for low, high in lang.cut_ranges(left, right) for i in range(low, high + 1)} == expected


def test_building_long_expressions_is_linear_enough() -> None:
    began = time.perf_counter()
    nested = lang.epsilon()
    for i in range(3000):
        nested = lang.seq(lang.text(f"property {i}"), lang.alt(nested, lang.any_char()))
    words = lang.alt(*(lang.text(f"word {i}") for i in range(20_000)))
    assert time.perf_counter() - began < 10 and len(words.value) == 20_000 and nested.kind == "seq"
