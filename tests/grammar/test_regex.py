"""Regexes against `re` itself, on texts that are accepted and texts that are refused, and what is refused by name."""
from __future__ import annotations

import random
import re
import resource
import time
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar import unicode_classes
from jradix.grammar.dfa import Dfa, compile_language
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.regex import parse_regex

ALPHABET = "ab1_ \nAZsSkK-é中😀ſ\u212a"
TEXTS_PER_PATTERN = 20


def dfa_of(pattern: str, **options: object) -> Dfa:
    return compile_language(parse_regex(pattern, **options), allow_empty=True)


def accepted(pattern: str, texts: list[str], **options: object) -> list[str]:
    dfa = dfa_of(pattern, **options)
    return [text for text in texts if dfa.accepts(text)]


def random_walk(dfa: Dfa, source: random.Random, max_bytes: int = 24) -> bytes | None:
    """A string that the automaton accepts; None where the walk finds none soon enough."""
    state, found, last = 0, bytearray(), None
    for _ in range(max_bytes):
        if not dfa.num_states:
            return None
        if dfa.accepting[state]:
            last = bytes(found)
            if source.random() < 0.2:
                return last
        allowed = dfa.allowed_bytes(state)
        if not allowed:
            break
        byte = source.choice(allowed)
        found.append(byte)
        state = dfa.walk(state, bytes((byte,)))
    return last


# -- random patterns

LITERALS = st.sampled_from(["a", "b", "1", " ", "A", "s", "K", "é", "中", "😀", "_", "-", r"\n", r"\.", r"\-", r"\x61",
                            r"\u00e9", r"\t"])
CLASSES = st.sampled_from([".", "[ab]", "[^ab]", "[a-z]", "[^a-zé]", r"[\d_]", r"[^\d]", r"[\w-]", "[]a]", "[^]a]",
                          "[A-Z1]",
                           "[é-中]", r"\d", r"\D", r"\s", r"\S", r"[\s\S]", r"[\n-a]", "[a-]"])
WORDS = st.sampled_from([r"\w", r"\W", r"[^\W_]"])
ANCHORS = st.sampled_from(["^", "$", r"\A", r"\Z"])
QUANTIFIERS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "{0,3}", "*?", "+?", "??", "{1,2}?"])


def patterns(anchors: bool = True) -> st.SearchStrategy[str]:
    atoms = st.one_of(LITERALS, LITERALS, CLASSES, WORDS)

    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        group = st.builds("{}{})".format, st.sampled_from(["(", "(?:", "(?i:", "(?s:", "(?P<n>"]), inner)
        quantified = st.builds("{}{}".format, st.one_of(atoms, group), QUANTIFIERS)
        pieces = [atoms, quantified, quantified, group, *([ANCHORS] if anchors else [])]
        sequence = st.lists(st.one_of(*pieces), min_size=1, max_size=4).map("".join)
        return st.one_of(sequence, st.lists(sequence, min_size=1, max_size=3).map("|".join))
    found = st.recursive(atoms, extend, max_leaves=8)
    return found.map(lambda text: text.replace("(?P<n>", "(", text.count("(?P<n>") - 1))     # a name is given once


TEXTS = st.lists(st.text(ALPHABET, max_size=8), min_size=TEXTS_PER_PATTERN, max_size=TEXTS_PER_PATTERN)
FLAGS = st.sampled_from([0, 0, 0, re.I, re.S, re.M, re.A, re.I | re.M])


def check_against_re(pattern: str, flags: int, texts: list[str], seed: int) -> int:
    """Compares on the texts given, on texts the automaton accepts and on these with one character changed."""
    source = random.Random(seed)
    compiled = re.compile(pattern, flags)
    num_cases = 0
    for anchored in (True, False):
        dfa = dfa_of(pattern, flags=flags, anchored=anchored)
        tried = list(texts)
        for _ in range(TEXTS_PER_PATTERN // 2):
            walked = random_walk(dfa, source)
            if walked is not None:
                text = walked.decode("utf-8")
                at = source.randrange(len(text) + 1)
                tried += [text, text[:at] + source.choice(ALPHABET) + text[at + source.randrange(2):]]
        for text in tried:
            expected = (compiled.fullmatch if anchored else compiled.search)(text) is not None
            assert dfa.accepts(text) == expected, f"{pattern!r} flags={flags} anchored={anchored}: {text!r}"
            num_cases += 1
    return num_cases


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(patterns(), FLAGS, TEXTS, st.integers(0, 2**32))
def test_random_pattern_agrees_with_re(pattern: str, flags: int, texts: list[str], seed: int) -> None:
    """At least 40 cases each, 2,000 in all."""
    assert check_against_re(pattern, flags, texts, seed) >= 2 * TEXTS_PER_PATTERN


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(patterns(), FLAGS, TEXTS, st.integers(0, 2**32))
def test_many_random_patterns_agree_with_re(pattern: str, flags: int, texts: list[str], seed: int) -> None:
    """At least 40 cases each, 40,000 in all."""
    assert check_against_re(pattern, flags, texts, seed) >= 2 * TEXTS_PER_PATTERN


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(patterns(anchors=False), TEXTS)
def test_random_pattern_agrees_with_interegular(pattern: str, texts: list[str]) -> None:
    interegular = pytest.importorskip("interegular")
    try:
        other = interegular.parse_pattern(pattern).to_fsm()
    except (interegular.InvalidSyntax, interegular.Unsupported):
        return
    dfa = dfa_of(pattern)
    for text in texts:
        if text.isascii():
            assert dfa.accepts(text) == other.accepts(text), f"{pattern!r}: {text!r}"


# -- what others get wrong


def test_loop_out_of_an_accepting_state_goes_on() -> None:
    assert accepted("(ab)+", ["", "ab", "aba", "abab", "ababab"]) == ["ab", "abab", "ababab"]
    assert accepted(r"[0-9]+(\.[0-9]+)?", ["1", "1.", "1.5", "15", ".5"]) == ["1", "1.5", "15"]


def test_alternative_that_begins_another_keeps_both() -> None:
    assert accepted("a|ab", ["a", "ab", "b", "abb"]) == ["a", "ab"]


def test_dot_refuses_newline_unless_dotall() -> None:
    assert accepted("a.b", ["a\nb", "a\rb", "axb"]) == ["a\rb", "axb"]
    assert accepted("a.b", ["a\nb", "axb"], flags=re.DOTALL) == ["a\nb", "axb"]
    assert accepted("(?s:.).", ["\n\n", "\nx"]) == ["\nx"]


@pytest.mark.parametrize("pattern", [r"\d{5}", r"^\d{5}$", r"\A\d{5}\Z", r"^(?:\d{5})$"])
def test_anchored_pattern_with_anchors_gives_exactly_five_digits(pattern: str) -> None:
    """X05: anchors in a whole-text constraint are understood and change nothing."""
    texts = ["1234", "12345", "123456", "x12345", "12345\n"]
    assert accepted(pattern, texts) == ["12345"]


def test_unanchored_pattern_means_contains() -> None:
    """X05: the keyword `pattern` of JSON schema."""
    assert accepted(r"\S", ["", " ", " x ", "x"], anchored=False, dialect="ecma") == [" x ", "x"]
    assert accepted(r"^\d{5}$", ["12345", "12345\n", "a12345"], anchored=False, dialect="ecma") == ["12345"]
    assert accepted(r"^a|b$", ["ax", "xb", "xa", "bx", "b\n"], anchored=False, dialect="ecma") == ["ax", "xb"]
    assert accepted(r"^a|b$", ["ax", "xb", "xa", "bx", "b\n"], anchored=False) == ["ax", "xb", "b\n"]


@pytest.mark.parametrize(("pattern", "construct", "position"), [
    (r"(?=a)b", "look-ahead (?=...)", 0), (r"x(?!a)b", "negative look-ahead (?!...)", 1),
    (r"(?<=a)b", "look-behind (?<=...)", 0), (r"(?<!a)b", "negative look-behind", 0), (r"(a)\1", r"back-reference \1",
    3),
    (r"(?P<x>a)(?P=x)", "back-reference (?P=...)", 8), (r"a\b", r"word boundary \b", 1), (r"a\B", r"word boundary \B",
    1),
    (r"a*+", "possessive quantifier", 1), (r"(?>a)", "atomic group", 0), (r"(a)?(?(1)b|c)", "conditional group", 4),
    (r"\p{Greek}", r"property \p{Greek}", 0), (r"\q", r"escape \q", 0)])
def test_unsupported_construct_is_named_with_its_position(pattern: str, construct: str, position: int) -> None:
    """X05: look-around is refused at submission."""
    with pytest.raises(GrammarError, match=re.escape(f"position {position}: ")) as caught:
        parse_regex(pattern)
    assert construct in str(caught.value) and "not supported" in str(caught.value)


@pytest.mark.parametrize(("pattern", "message"), [
    ("(a", "not closed"), ("a)", "closes no group"), ("[a", "not closed"), ("[]", "not closed"), ("a**",
    "nothing to repeat"),
    ("*a", "nothing to repeat"), ("^*", "nothing to repeat"), ("(|*)", "nothing to repeat"), ("a{3,2}",
    "smaller number"),
    ("[b-a]", "smaller end"), (r"[a-\d]", "character at both ends"), ("a\\", "end of the pattern"), (r"\x1",
    "2 hexadecimal"),
    (r"\N{NO SUCH THING}", "no character has this name"), ("a(?i)b", "at the start"), ("(?P<1>a)",
    "expected an identifier"),
    ("a{9999999999}", "less than 10^9"), (r"\777", "at most"), ("(?i-i:a)", "contradict"), ("\ud800", "")])
def test_syntax_error_says_what_is_wrong(pattern: str, message: str) -> None:
    if pattern == "\ud800":         # half a pair is no text: nothing can match it
        assert dfa_of(pattern).num_states == 0
        return
    with pytest.raises((re.error, OverflowError)):
        re.compile(pattern)
    with pytest.raises(GrammarError, match=re.escape(message)):
        parse_regex(pattern)


def test_wrong_type_or_dialect_is_refused() -> None:
    with pytest.raises(GrammarError, match="expected a str"):
        parse_regex(b"a")
    with pytest.raises(ValueError, match="dialect"):
        parse_regex("a", dialect="perl")
    with pytest.raises(GrammarError, match="MULTILINE"):
        parse_regex("a", flags=re.M, dialect="ecma")


# -- UTF-8


@pytest.mark.parametrize(("pattern", "example"), [
    ("[😀😁]{2}", "😀😁"), (".", "中"), ('[^"]+', "中"), (r"\w", "é"), (r"\P{L}", "😀")])
def test_text_never_ends_inside_a_character(pattern: str, example: str) -> None:
    """X06: after the first bytes only valid continuations, and no end before the last."""
    dfa = dfa_of(pattern)
    data = example.encode()
    assert dfa.accepts(data)
    state = 0
    for i, byte in enumerate(data):
        if 0 < i and byte & 0xC0 == 0x80:
            assert not dfa.accepting[state]
            assert all(allowed & 0xC0 == 0x80 for allowed in dfa.allowed_bytes(state))
        state = dfa.walk(state, bytes((byte,)))
    assert not any(0x80 <= byte < 0xC2 for byte in dfa.allowed_bytes(0)), "no character begins with a continuation byte"


def test_two_faces_give_exactly_two_characters() -> None:
    """X06."""
    dfa = dfa_of("[😀😁]{2}")
    after_half = dfa.walk(0, b"\xf0\x9f")
    assert dfa.allowed_bytes(after_half) == b"\x98" and dfa.allowed_bytes(dfa.walk(after_half, b"\x98")) == b"\x80\x81"
    assert dfa.longest() == 8 and not dfa.accepts("😀") and dfa.accepts("😁😀")


@pytest.mark.parametrize("data", [b"\x80", b"\xc0\xaf", b"\xc1\xbf", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xed\xbf\xbf",
                                  b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xff", b"\xe4\xbd",
                                  b"a\xe4"])
def test_broken_utf8_is_refused_by_every_class(data: bytes) -> None:
    for pattern in (r"[\s\S]*", r"[^a]*a?[^a]*", r"(?s:.*)", r"\W*\w*\W*", "[\u0000-\U0010ffff]*"):
        assert not dfa_of(pattern).accepts(data), pattern


@settings(max_examples=20, deadline=None, derandomize=True)
@given(patterns(), st.integers(0, 2**32))
def test_every_accepted_string_decodes(pattern: str, seed: int) -> None:
    dfa, source = dfa_of(pattern, anchored=False), random.Random(seed)
    for _ in range(10):
        found = random_walk(dfa, source)
        assert found is None or found.decode("utf-8") is not None


# -- character classes and case


@pytest.mark.parametrize("pattern", [r"\w", r"\W", r"\d", r"\s", r"\S", ".", "[^a]", "[а-я]"])
def test_class_agrees_with_re_on_every_plane(pattern: str) -> None:
    compiled, dfa = re.compile(pattern), dfa_of(pattern)
    chars = [chr(i) for i in [*range(0x0, 0x3000, 3), *range(0x3000, 0x110000, 997)] if not 0xD800 <= i < 0xE000]
    assert [c for c in chars if dfa.accepts(c)] == [c for c in chars if compiled.fullmatch(c)]


@pytest.mark.parametrize(("name", "inside", "outside"), [
    ("L", "aé中", "1_ "), ("Lu", "AÉ", "aé1"), ("Letter", "aé中", "1"), ("N", "1²Ⅷ", "a"), ("Nd", "1٣", "²"),
    ("digit", "1٣", "²"),
    ("P", "!_-", "a+"), ("gc=Zs", " \u00a0", "\n"), ("General_Category=Sc", "$€", "a"), ("ASCII", "a\x7f", "é"),
    ("LC", "aAǅ", "中"),
    ("Assigned", "a中", "\u0378"), ("Any", "a中\u0378", "")])
def test_unicode_property_holds_its_characters(name: str, inside: str, outside: str) -> None:
    for dialect in ("python", "ecma"):
        assert accepted(rf"\p{{{name}}}", list(inside + outside), dialect=dialect) == list(inside)
        assert accepted(rf"\P{{{name}}}", list(inside + outside), dialect=dialect) == list(outside)
        assert accepted(rf"[\p{{{name}}}]", list(inside + outside), dialect=dialect) == list(inside)


def test_case_folding_agrees_with_re_on_all_cased_characters() -> None:
    cased = "".join(chr(i) for i in range(0x20000) if chr(i).lower() != chr(i) or chr(i).upper() != chr(i))
    for char in [*"\u212akKsSiIıİſßẞµμσςΣǅǆΩωÅå", *cased[::29]]:
        folded = unicode_classes.case_folded(((ord(char), ord(char)),))
        found = {chr(i) for low, high in folded for i in range(low, high + 1)}
        assert found == set(re.findall(re.escape(char), cased + char, re.IGNORECASE)), char


def test_ascii_flag_limits_classes_and_case() -> None:
    assert accepted("k", ["k", "K", "\u212a"], flags=re.I) == ["k", "K", "\u212a"]
    assert accepted("k", ["k", "K", "\u212a"], flags=re.I | re.A) == ["k", "K"]
    assert accepted(r"(?a:\w)\w", ["éé", "aé", "ab"]) == ["aé", "ab"]


def test_unicode_classes_are_computed_fast() -> None:
    """All of them once per process; generous, for a loaded machine."""
    for function in (unicode_classes.word_ranges, unicode_classes.space_ranges, unicode_classes.category_ranges,
                     unicode_classes._categories, unicode_classes._cases):
        function.cache_clear()
    began = time.perf_counter()
    unicode_classes.word_ranges(), unicode_classes.space_ranges(), unicode_classes.category_ranges("L")
    assert time.perf_counter() - began < 5
    assert unicode_classes.category_ranges("L") is unicode_classes.category_ranges("L")
    assert np.array(unicode_classes.category_ranges("L")).shape[1] == 2


# -- the two dialects


def test_ecma_classes_are_those_of_the_standard() -> None:
    assert accepted(r"\d", ["1", "٣"], dialect="ecma") == ["1"] and accepted(r"\d", ["1", "٣"]) == ["1", "٣"]
    assert accepted(r"\w", ["a", "_", "é"], dialect="ecma") == ["a", "_"]
    spaces = [" ", "\u00a0", "\ufeff", "\u2003"]
    assert accepted(r"\s", [*spaces, "\x1c"], dialect="ecma") == spaces
    assert accepted(".", ["a", "\n", "\r", "\u2028"], dialect="ecma") == ["a"]


def test_ecma_escapes_are_understood() -> None:
    assert dfa_of(r"\cA\/\-\u0041\u{1F600}\uD83D\uDE00\0\v", dialect="ecma").accepts("\x01/-A😀😀\0\v")
    assert accepted(r"[\b]", ["\b", "b"], dialect="ecma") == ["\b"]
    assert accepted(r"[^]", ["\n", "a"], dialect="ecma") == ["\n", "a"]
    assert dfa_of("a[]", dialect="ecma").num_states == 0
    assert accepted(r"(?<year>\d{2})", ["12"], dialect="ecma") == ["12"]


@pytest.mark.parametrize("pattern", [r"\a", r"\Z", r"\A", r"\k<x>", r"\1", r"\U00000041", "(?P<x>a)", "(?i:a)",
                         "a{,2}", r"\u{110000}",
                                     r"\c1", r"\N{DIGIT ONE}", r"\01"])
def test_python_only_syntax_is_refused_by_ecma(pattern: str) -> None:
    with pytest.raises(GrammarError, match="position 0|position 1"):
        parse_regex(pattern, dialect="ecma")


def test_verbose_and_inline_flags_agree_with_re() -> None:
    pattern = "(?xi) a  +  # letters\n (?-i: b ) [ ] \\ "
    for text in ["aab  ", "AB  ", "aB  ", "ab "]:
        assert dfa_of(pattern).accepts(text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize("pattern", ["a{", "a{x}", "a{1", "{", "a{,}", "a{1,2", "}", "]", "a{ 1}", r"\012", r"\101",
                         r"[\1]", r"\0", r"[\8x]",
                                     r"\N{DIGIT ONE}", "(?#note)a", "(?:)", "a||b", "(a|)(|b)", "[[]", "[a-c-e]",
                                     "[--a]", r"[\]-a]"])
def test_corner_of_the_syntax_agrees_with_re(pattern: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            compiled = re.compile(pattern)
    except re.error:
        with pytest.raises(GrammarError):
            parse_regex(pattern)
        return
    dfa = dfa_of(pattern)
    texts = ["", "a", "b", "ab", "aa", "aaa", "{", "}", "]", "[", "a{", "a{x}", "a{1", "a{1,2", "a{ 1}", "\n", "A",
             "\x01", "\0", "1", "x", "8",
             "-", ".", "d", "e", "^", "_"]
    assert [text for text in texts if dfa.accepts(text)] == [text for text in texts if compiled.fullmatch(text)]


# -- hostile input


@pytest.mark.parametrize(("pattern", "limit"), [
    ("(a|b)*a(a|b){18}", "max_states"), ("(a|b)*a(a|b){20}", "max_states"), ("(a{1000}){1000}", "max_states"),
    (".*x.{0,500}", "max_states"), ("(((a{0,900}){0,900}){0,900}){0,900}", "max_states"),
    ("(a{1,200}b?){1,200}(a{1,200}c?){1,200}", "max_work")])
def test_explosive_pattern_is_refused_with_the_limit_named(pattern: str, limit: str) -> None:
    """X13: bounded by counts of states and work, not by time; the bound here is generous for a loaded machine."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = GrammarLimits(max_work=2_000_000) if limit == "max_work" else GrammarLimits()
    with pytest.raises(GrammarTooLarge, match=limit):
        compile_language(parse_regex(pattern), limits)
    assert time.perf_counter() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024, "KiB"


def test_deep_nesting_is_no_matter() -> None:
    depth = 20_000
    assert dfa_of("(" * depth + "a" + ")*" * depth).num_states == 1
    assert accepted("(" * 200 + "a" + "|b)c?" * 200, ["a", "bc", "ac", "c"]) == ["a", "bc", "ac"]


def test_bounded_count_of_characters_compiles_to_its_states() -> None:
    dfa = dfa_of(".{0,500}")
    assert dfa.num_states <= 8 * 500 + 1 and dfa.longest() == 2000
    assert dfa.accepts("中" * 500) and not dfa.accepts("中" * 501)


def test_many_alternatives_in_a_search_share_what_is_around_them() -> None:
    dfa = dfa_of("|".join(f"word{i}" for i in range(5000)), anchored=False)
    assert dfa.num_states < 40 and dfa.accepts("a word4999é") and not dfa.accepts("word")


def test_long_chain_of_optional_parts_is_refused_in_bounded_memory() -> None:
    """X13: every part can be left out, so every state holds all that follow."""
    with pytest.raises(GrammarTooLarge, match="max_work"):
        compile_language(parse_regex("a?" * 5000), GrammarLimits(max_work=2_000_000))
    assert accepted("(?:a?b?c?){40}" * 3, ["abc" * 40, "", "d"]) == ["abc" * 40, ""]
