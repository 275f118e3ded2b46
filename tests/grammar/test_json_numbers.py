"""Number languages against exact arithmetic on every short decimal text."""
from __future__ import annotations

from fractions import Fraction

import pytest

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.dfa import compile_language
from jradix.grammar.json_numbers import Numbers, decimal, exact, number_language

WHOLE = [str(n) for n in (*range(0, 130), 999, 1000, 1001)]
TEXTS = [sign + whole + fraction for sign in ("", "-") for whole in WHOLE
         for fraction in ("", ".0", ".5", ".25", ".05", ".10", ".125", ".999")]


@pytest.mark.parametrize("numbers", [
    Numbers(low=Fraction(1), high=Fraction(5)), Numbers(low=Fraction(-5, 4), low_open=True),
    Numbers(high=Fraction(99)), Numbers(low=Fraction(0), low_open=True), Numbers(high=Fraction(0), high_open=True),
    Numbers(low=Fraction(105, 100), high=Fraction(1005, 10), high_open=True), Numbers(high=Fraction(-1, 20)),
    Numbers(multiples=frozenset((Fraction(1, 4),))), Numbers(not_multiples=frozenset((Fraction(1, 4),))),
    Numbers(not_multiples=frozenset((Fraction(3),))), Numbers(excluded=frozenset((Fraction(1), Fraction(5, 2)))),
    Numbers(integer=False, low=Fraction(2)), Numbers(multiples=frozenset((Fraction(5),)), low=Fraction(7)),
    Numbers(multiples=frozenset((Fraction(27, 2),))), Numbers(integer=True, low=Fraction(3), high=Fraction(1000)),
    Numbers(integer=True, multiples=frozenset((Fraction(12),))), Numbers(integer=True, high=Fraction(-12)),
    Numbers(integer=True, not_multiples=frozenset((Fraction(2),))),
    Numbers(integer=True, multiples=frozenset((Fraction(27, 2),)), low=Fraction(0)),
    Numbers(multiples=frozenset((Fraction(3), Fraction(7, 2)))), Numbers(multiples=frozenset(map(Fraction, (4, 6)))),
    Numbers(integer=True, multiples=frozenset((Fraction(2),)), not_multiples=frozenset((Fraction(3),))),
], ids=str)
def test_language_of_numbers_agrees_with_exact_arithmetic(numbers: Numbers) -> None:
    dfa = compile_language(number_language(numbers, "/"))
    whole = numbers.integer or any(step.denominator == 1 for step in numbers.multiples)
    for text in TEXTS:
        if whole and ("." in text or text == "-0"):
            assert not dfa.accepts(text), text
        elif not text.startswith("-0") or Fraction(text):
            assert dfa.accepts(text) == numbers.holds(Fraction(text)), text


def test_large_multiples_are_exact_for_numbers_of_any_length() -> None:
    step, other = Fraction(1001), Fraction(77)
    dfa = compile_language(number_language(Numbers(integer=True, multiples=frozenset((step,))), "/"))
    value = 1001 * 10**40 + 1001
    assert dfa.accepts(str(value)) and dfa.accepts(str(-value)) and not dfa.accepts(str(value + 1))
    assert Numbers(multiples=frozenset((step,)), not_multiples=frozenset((other,))).is_empty
    with pytest.raises(GrammarTooLarge, match="remainders"):
        number_language(Numbers(integer=True, multiples=frozenset((Fraction(10_007),))), "/")


def test_listed_number_may_be_written_with_a_fraction_unless_integers_are_asked_for() -> None:
    listed = Numbers(only=frozenset((Fraction(1), Fraction(5, 2))))
    dfa = compile_language(number_language(listed, "/"))
    assert [dfa.accepts(text) for text in ("1", "1.0", "2.5", "1.00", "2.50")] == [True, True, True, False, False]
    whole = compile_language(number_language(listed.meet(Numbers(integer=True)), "/"))
    assert whole.accepts("1") and not whole.accepts("1.0")


def test_meet_keeps_what_both_hold() -> None:
    first = Numbers(low=Fraction(1), high=Fraction(9), integer=True)
    second = Numbers(low=Fraction(1), low_open=True, multiples=frozenset((Fraction(3),)))
    assert first.meet(second).listed == [3, 6, 9]
    assert first.meet(Numbers(integer=False)).is_empty


def test_exact_reads_floats_by_their_shortest_decimal() -> None:
    assert exact(0.1, "/") == Fraction(1, 10)
    assert decimal(exact(1e-7, "/")) == "0.0000001" and decimal(exact(2.50, "/")) == "2.5"
    for wrong in (True, "1", float("nan"), None):
        with pytest.raises(GrammarError, match="/here"):
            exact(wrong, "/here")
