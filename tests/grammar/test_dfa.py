"""Automata: products against sets, arrays and their promises, limits, and what the user is told."""
from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.dfa import Dfa, compile_language
from jradix.grammar.language import (Lang, alt, any_char, both, but_not, byte_set, chars, epsilon, mark, nothing,
                                     optional,
                                     repeat, seq, text, unmarked, utf8_strings)
from jradix.grammar.limits import GrammarLimits

MAX_LENGTH = 5
UNIVERSE = [bytes(found) for length in range(MAX_LENGTH + 1) for found in itertools.product(b"ab", repeat=length)]


def check_promises(dfa: Dfa) -> None:
    """Shapes and types; every state reachable from the start and able to reach acceptance; classes all different."""
    num_states, num_classes = dfa.next_state.shape
    assert (dfa.byte_class.dtype, dfa.next_state.dtype, dfa.accepting.dtype) == (np.uint8, np.int32, bool)
    assert dfa.byte_class.shape == (256,) and dfa.accepting.shape == (num_states,)
    assert set(dfa.byte_class.tolist()) == set(range(num_classes))
    assert dfa.next_state.min(initial=-1) >= -1 and dfa.next_state.max(initial=-1) < num_states
    edges = [(state, int(target)) for state in range(num_states) for target in dfa.next_state[state] if target >= 0]
    for seeds, pairs in (({0}, edges), (set(np.flatnonzero(dfa.accepting)), [(b, a) for a, b in edges])):
        found = set()
        while seeds - found:
            found |= seeds
            seeds = {target for state, target in pairs if state in found}
        assert num_states == 0 or found == set(range(num_states))


# -- random expressions, with the set of short strings each denotes


def expressions() -> st.SearchStrategy[tuple[Lang, frozenset[bytes]]]:
    def short(strings: object) -> frozenset[bytes]:
        return frozenset(string for string in strings if len(string) <= MAX_LENGTH)

    def joined(left: frozenset, right: frozenset) -> frozenset[bytes]:
        return short(a + b for a in left for b in right)

    def repeated(pair: tuple, low: int, more: int | None) -> tuple[Lang, frozenset[bytes]]:
        part, strings = pair
        high = None if more is None else low + more
        found, now = set(), frozenset((b"",))
        for count in range((MAX_LENGTH + low if high is None else high) + 1):
            if count >= low:
                found |= now
            now = joined(now, strings)
        return repeat(part, low, high), frozenset(found)

    leaves = st.sampled_from([(text("a"), {b"a"}), (text("ab"), {b"ab"}), (byte_set(b"ab"), {b"a", b"b"}), (epsilon(),
                             {b""}),
                              (nothing(), set()), (text("bab"), {b"bab"}), (byte_set(b"b"), {b"b"}),
                              (alt(*map(text, ("a", "ab", "bba", "b"))), {b"a", b"ab", b"bba", b"b"}),
                              (repeat(byte_set(b"ab"), 0), set(UNIVERSE))]).map(lambda p: (p[0], frozenset(p[1])))

    def extend(inner: st.SearchStrategy) -> st.SearchStrategy:
        return st.one_of(
            st.builds(lambda a, b: (seq(a[0], b[0]), joined(a[1], b[1])), inner, inner),
            st.builds(lambda a, b: (alt(a[0], b[0]), a[1] | b[1]), inner, inner),
            st.builds(lambda a, b, c: (both(a[0], b[0], c[0]), a[1] & b[1] & c[1]), inner, inner, inner),
            st.builds(lambda a, b: (but_not(a[0], b[0]), a[1] - b[1]), inner, inner),
            st.builds(repeated, inner, st.integers(0, 3), st.none() | st.integers(0, 2)))
    return st.recursive(leaves, extend, max_leaves=10)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(expressions())
def test_random_expression_accepts_exactly_its_strings(pair: tuple[Lang, frozenset[bytes]]) -> None:
    lang, strings = pair
    dfa = compile_language(lang, allow_empty=True)
    check_promises(dfa)
    assert {string for string in UNIVERSE if dfa.accepts(string)} == strings
    assert lang.nullable == (b"" in strings) and all(len(string) >= lang.shortest for string in strings)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(expressions())
def test_many_random_expressions_accept_exactly_their_strings(pair: tuple[Lang, frozenset[bytes]]) -> None:
    dfa = compile_language(pair[0], allow_empty=True)
    assert {string for string in UNIVERSE if dfa.accepts(string)} == pair[1]


# -- products


def test_difference_with_utf8_keeps_whole_characters() -> None:
    dfa = compile_language(but_not(utf8_strings(), alt(text("né"), text("name"))))
    assert not dfa.accepts("né") and not dfa.accepts("name") and not dfa.accepts("né".encode()[:2])
    assert all(map(dfa.accepts, ("", "n", "nè", "names", "né1", "nam")))
    check_promises(dfa)


def test_intersection_with_a_large_count_is_built_only_where_reached() -> None:
    """Pattern and maxLength together: the counter alone would have 800,000 states."""
    dfa = compile_language(both(repeat(byte_set(b"abc"), 3, 3), repeat(any_char(), 0, 100_000)))
    assert dfa.num_states == 4 and dfa.longest() == 3


def test_empty_language_is_unsatisfiable_unless_allowed() -> None:
    impossible = both(repeat(byte_set(b"ab"), 3, 3), repeat(any_char(), 0, 2))
    with pytest.raises(GrammarError, match="unsatisfiable"):
        compile_language(impossible)
    dfa = compile_language(impossible, allow_empty=True)
    assert dfa.num_states == 0 and not dfa.accepts("") and not dfa.accepts("ab") and dfa.walk(0, "a") == -1
    assert "no text" in str(dfa.explain("ab"))
    with pytest.raises(GrammarError, match="unsatisfiable"):
        dfa.shortest_example()


def test_dead_ways_are_trimmed_inside_a_sequence() -> None:
    """A key that must not be one of the declared names, with a way into a declared one that can never be finished."""
    key = but_not(repeat(byte_set(b"abc"), 1, 2), alt(text("ab"), text("aa"), text("ac"), text("a")))
    dfa = compile_language(seq(text('"'), key, text('":1')))
    assert dfa.allowed_bytes(dfa.walk(0, '"')) == b"bc", "after a no key can be completed"
    check_promises(dfa)


def test_marks_are_taken_out() -> None:
    wanted = seq(mark(0), text("a"), optional(mark(1)), text("b"))
    dfa = compile_language(unmarked(wanted, nullable=False))
    assert dfa.accepts("ab") and not dfa.accepts("a") and dfa.num_states == 3


def test_nested_products_have_a_limit_and_not_a_crash() -> None:
    lang = utf8_strings()
    for _ in range(40):
        lang = but_not(utf8_strings(), seq(text("a"), lang))
    assert compile_language(lang).accepts("")
    for _ in range(1000):
        lang = but_not(utf8_strings(), seq(text("a"), lang))
    with pytest.raises(GrammarTooLarge, match="nested"):
        compile_language(lang)


# -- the automaton


def test_equal_endings_are_one_state() -> None:
    dfa = compile_language(alt(*(text(f"{word}ing done") for word in ("walk", "talk", "jump", "sing"))))
    assert dfa.num_states == len(["", "w|t", "wa", "wal", "j", "ju", "jum", "s", "si", "sin"]) + len("ing done") + 1
    assert dfa.accepts("talking done") and not dfa.accepts("taing done")


def test_walk_goes_on_from_any_state() -> None:
    dfa = compile_language(repeat(text("ab"), 1))
    middle = dfa.walk(0, "a")
    assert dfa.walk(middle, b"ba") == middle and dfa.walk(middle, "a") == -1 and dfa.walk(0, "") == 0


@pytest.mark.parametrize(("lang", "longest", "example"), [
    (text("word"), 4, b"word"), (repeat(text("ab"), 2, 5), 10, b"abab"), (repeat(text("ab"), 2), None, b"abab"),
    (epsilon(), 0, b""),
    (seq(repeat(byte_set(b"x"), 0), optional(text("y"))), None, b""), (alt(text("abc"), text("de")), 3, b"de"),
    (repeat(any_char(), 2, 3), 12, b"aa"), (seq(repeat(text("a"), 0), text("b")), None, b"b")])
def test_longest_and_shortest_text(lang: Lang, longest: int | None, example: bytes) -> None:
    dfa = compile_language(lang)
    assert dfa.longest() == longest and dfa.shortest_example() == example and dfa.accepts(example)


def test_compilation_is_deterministic() -> None:
    def build() -> Dfa:
        words = [f"w{i * 7919 % 300}" for i in range(300)]
        return compile_language(seq(alt(*map(text, words)), but_not(utf8_strings(), text("x")), repeat(chars([(0x3b1,
                                0x3c9)]), 0, 4)))
    first, second = build(), build()
    for name in ("byte_class", "next_state", "accepting"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


# -- explanations


@pytest.mark.parametrize(("lang", "given_text", "byte", "char", "parts"), [
    (text("abc"), "abx", 2, 2, ["character 2 (byte 2)", "found 'x'", "'c'"]),
    (text("abc"), "ab", 2, 2, ["ends too early", "'c'"]),
    (text("abc"), "abcd", 3, 3, ["found 'd'", "the end of the text"]),
    (seq(text("é"), text('{"name":')), "é[", 2, 1, ["character 1 (byte 2)", "found '['", "the text '{\"name\":'"]),
    (chars([(0x3b1, 0x3c9)]), "€", 0, 0, ["found '€'", "beyond ASCII"]),
    (chars([(0x3b1, 0x3c0)]), "ω", 1, 0, ["character 0", "found 'ω'"]),
    (repeat(byte_set(b"0123456789"), 1), "", 0, 0, ["ends too early", "'0' to '9'"]),
    (any_char(), b"\x80", 0, 0, ["found byte 0x80"])])
def test_explanation_says_where_and_what_was_expected(lang: Lang, given_text: str | bytes, byte: int, char: int,
                                                      parts: list[str]) -> None:
    refusal = compile_language(lang).explain(given_text)
    assert (refusal.byte, refusal.char) == (byte, char)
    assert all(part in str(refusal) for part in parts), refusal


def test_explanation_agrees_with_acceptance() -> None:
    dfa = compile_language(seq(optional(text("é")), repeat(alt(text("ab"), text("中")), 0, 3)))
    source = random.Random(0)
    for _ in range(300):
        data = "".join(source.choice("abé中") for _ in range(source.randrange(6)))
        assert (dfa.explain(data) is None) == dfa.accepts(data)


# -- limits and speed


def test_limits_are_named_with_their_numbers() -> None:
    with pytest.raises(GrammarTooLarge, match="max_states=100 "):
        compile_language(repeat(byte_set(b"ab"), 0, 200), GrammarLimits(max_states=100))
    with pytest.raises(GrammarTooLarge, match="max_states=100 "):
        compile_language(repeat(byte_set(b"ab"), 200), GrammarLimits(max_states=100))
    with pytest.raises(GrammarTooLarge, match="max_work=500 "):
        compile_language(repeat(any_char(), 0, 200), GrammarLimits(max_work=500))
    with pytest.raises(GrammarTooLarge, match="max_table_bytes=50"):
        compile_language(repeat(any_char(), 0, 20), GrammarLimits(max_table_bytes=50))
    for wrong in ({"max_states": 0}, {"max_states": 70_000}, {"max_work": True}, {"max_depth": 1.5}):
        with pytest.raises(ValueError, match="expected"):
            GrammarLimits(**wrong)


def strict_object(num_properties: int) -> Lang:
    string = seq(text('"'), repeat(chars([(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)]), 0), text('"'))
    number = seq(optional(text("-")), alt(text("0"), seq(byte_set(b"123456789"), repeat(byte_set(b"0123456789"), 0))))
    values = [string, number, alt(text("true"), text("false"))]
    parts = [part for i in range(num_properties) for part in (text(f'{"," if i else ""}"property_{i}":'),
             values[i % 3])]
    return seq(text("{"), *parts, text("}"))


def test_strict_object_of_a_thousand_states_compiles_fast() -> None:
    """Tens of milliseconds on a quiet machine; the bound is generous for a loaded one."""
    lang = strict_object(60)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        dfa = compile_language(lang)
        best = min(best, time.perf_counter() - began)
    assert 1000 < dfa.num_states < 1500 and best < 0.5
    check_promises(dfa)


def test_large_enum_compiles_as_a_trie() -> None:
    began = time.perf_counter()
    dfa = compile_language(alt(*(text(f"value number {i}") for i in range(4000))))
    assert dfa.num_states < 100 and time.perf_counter() - began < 5
    dfa = compile_language(alt(*(text("a" * i) for i in range(4000))))
    assert dfa.num_states == 4000 and dfa.longest() == 3999


def test_counter_beyond_the_limit_is_refused_in_bounded_time() -> None:
    began = time.perf_counter()
    with pytest.raises(GrammarTooLarge, match="max_states"):
        compile_language(repeat(any_char(), 0, 100_000))
    assert time.perf_counter() - began < 20
