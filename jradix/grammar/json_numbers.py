"""Sets of JSON numbers, exact in decimal, and the texts that denote them.

A number is written without exponent and without leading zeros; only an unconstrained one may carry an exponent of at
most two digits. Of an integer type the text has no fraction, so `1.0` is no integer token.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from decimal import Decimal
from functools import reduce
from typing import Any

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.language import Lang, alt, both, byte_set, epsilon, nothing, optional, repeat, residues, seq, text

MAX_LISTED = 4096
MAX_RESIDUES = 4096
MAX_BOUND_DIGITS = 400


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers within an interval that also obey the other fields.

    Attributes:
      low, high: bounds, None for none; `low_open`, `high_open` leave the bound itself out.
      integer: True: integers only, False: only numbers with a fraction, None: both.
      multiples, not_multiples: the value is (is not) an integer multiple of each.
      only: the values it may have, None for no such list; excluded: values it may not have.
    """
    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    integer: bool | None = None
    multiples: frozenset[Fraction] = frozenset()
    not_multiples: frozenset[Fraction] = frozenset()
    only: frozenset[Fraction] | None = None
    excluded: frozenset[Fraction] = frozenset()

    def meet(self, other: Numbers) -> Numbers:
        """The numbers in both."""
        low, low_open = _tighter((self.low, self.low_open), (other.low, other.low_open), 1)
        high, high_open = _tighter((self.high, self.high_open), (other.high, other.high_open), -1)
        integer = self.integer if other.integer is None else other.integer
        only = self.only if other.only is None else other.only if self.only is None else self.only & other.only
        if None not in (self.integer, other.integer) and self.integer != other.integer:
            only = frozenset()
        return Numbers(low, low_open, high, high_open, integer, self.multiples | other.multiples,
                       self.not_multiples | other.not_multiples, only, self.excluded | other.excluded)

    def holds(self, value: Fraction) -> bool:
        """Is `value` one of them?"""
        return not ((self.low is not None and (value < self.low or (self.low_open and value == self.low)))
                    or (self.high is not None and (value > self.high or (self.high_open and value == self.high)))
                    or (self.integer is not None and self.integer != (value.denominator == 1))
                    or any((value / step).denominator != 1 for step in self.multiples)
                    or any((value / step).denominator == 1 for step in self.not_multiples)
                    or (self.only is not None and value not in self.only) or value in self.excluded)

    @property
    def step(self) -> Fraction | None:
        """All of them are multiples of this, the least common multiple of `multiples`; None when there are none."""
        return reduce(_common_multiple, self.multiples) if self.multiples else None

    @property
    def listed(self) -> list[Fraction] | None:
        """All of them in order where they are few, else None."""
        if self.only is not None:
            return sorted(value for value in self.only if self.holds(value))
        step = self.step
        if step is not None and (any((step / other).denominator == 1 for other in self.not_multiples)
                                 or (self.integer is False and step.denominator == 1)):
            return []
        if self.low is None or self.high is None:
            return None
        if self.low == self.high:
            return [self.low] if self.holds(self.low) else []
        if self.low > self.high:
            return []
        if self.integer:
            step = Fraction(1) if step is None else _common_multiple(step, Fraction(1))
        if step is None:
            return None
        first, last = -(-self.low // step), self.high // step
        if last - first >= MAX_LISTED:
            return None
        return [step * i for i in range(first, last + 1) if self.holds(step * i)]

    @property
    def is_empty(self) -> bool:
        return self.listed == []


ANY_NUMBER = Numbers()


def _common_multiple(first: Fraction, second: Fraction) -> Fraction:
    """The smallest number that is an integer multiple of both."""
    return Fraction(math.lcm(first.numerator, second.numerator), math.gcd(first.denominator, second.denominator))


def exact(value: Any, place: str) -> Fraction:
    """The number of a schema as a fraction, a float by its shortest decimal. Raises GrammarError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == float("inf"):
        raise GrammarError(f"{place}: {value!r} given, expected a number")
    if isinstance(value, int):
        return Fraction(value)
    return Fraction(Decimal(repr(value)))


def number_language(numbers: Numbers, place: str) -> Lang:
    """The texts of `numbers`.

    Raises:
      GrammarTooLarge: a multiple that needs more states than an automaton should spend on one number.
    """
    if numbers == ANY_NUMBER:
        return _FREE
    listed = numbers.listed
    if listed is not None:
        # A number that may have a fraction may be written with one: 1 is 1.0, and so is it in many documents.
        zero = epsilon() if numbers.integer else optional(text(".0"))
        return alt(*(text(decimal(value)) for value in listed if value.denominator > 1),
                   *(seq(text(decimal(value)), zero) for value in listed if value.denominator == 1))
    _check_digits(numbers, place)
    parts = [_INTEGER if numbers.integer or (numbers.integer is None and _whole(numbers)) else _DECIMAL]
    if numbers.integer is False:
        parts.append(seq(_SIGN, _WHOLE, text("."), repeat(_DIGIT, 0), byte_set(b"123456789"), repeat(_DIGIT, 0)))
    if numbers.low is not None:
        parts.append(_at_least(numbers.low, numbers.low_open))
    if numbers.high is not None:
        parts.append(_at_most(numbers.high, numbers.high_open))
    whole = parts[0] is _INTEGER
    step = numbers.step
    if step is not None and not (whole and step.numerator == 1):
        parts.append(_multiples(step, True, whole, place))
    parts += [_multiples(other, False, whole, place) for other in sorted(numbers.not_multiples)]
    parts += [alt(_at_least(value, True), _at_most(value, True)) for value in sorted(numbers.excluded)]
    return both(*parts)


def _whole(numbers: Numbers) -> bool:
    """Does a multiple already make every value an integer?"""
    return numbers.step is not None and numbers.step.denominator == 1


def _tighter(first: tuple[Fraction | None, bool], second: tuple[Fraction | None, bool], sign: int
             ) -> tuple[Fraction | None, bool]:
    if first[0] is None or second[0] is None:
        return second if first[0] is None else first
    return max(first, second, key=lambda bound: (sign * bound[0], bound[1]))


def _check_digits(numbers: Numbers, place: str) -> None:
    for bound in (numbers.low, numbers.high, *numbers.excluded):
        if bound is not None and len(decimal(bound)) > MAX_BOUND_DIGITS:
            raise GrammarTooLarge(f"{place}: a bound of more than {MAX_BOUND_DIGITS} digits")


def decimal(value: Fraction) -> str:
    """Plain decimal text; every value of a schema has one."""
    scale = _scale(value)
    digits = str(abs(value.numerator) * 10**scale // value.denominator).rjust(scale + 1, "0")
    whole, fraction = (digits[:-scale], digits[-scale:].rstrip("0")) if scale else (digits, "")
    return ("-" if value < 0 else "") + whole + ("." + fraction if fraction else "")


def _scale(value: Fraction) -> int:
    """Decimal places of `value`."""
    scale, denominator = 0, value.denominator
    while denominator % 10 == 0:
        scale, denominator = scale + 1, denominator // 10
    for prime in (2, 5):
        while denominator % prime == 0:
            scale, denominator = scale + 1, denominator // prime
    return scale


_DIGIT = byte_set(b"0123456789")
_LEADING = byte_set(b"123456789")
_WHOLE = alt(text("0"), seq(_LEADING, repeat(_DIGIT, 0)))
_SIGN = optional(text("-"))
_FRACTION = seq(text("."), repeat(_DIGIT, 1))
_ZEROS = repeat(text("0"), 0)
_INTEGER = alt(text("0"), seq(_SIGN, _LEADING, repeat(_DIGIT, 0)))
_DECIMAL = seq(_SIGN, _WHOLE, optional(_FRACTION))
_FREE = seq(_DECIMAL, optional(seq(byte_set(b"eE"), optional(byte_set(b"+-")), repeat(_DIGIT, 1, 2))))


def _digits(low: int, high: int) -> Lang:
    return byte_set(range(48 + low, 48 + high + 1)) if low <= high else nothing()


def _at_least(bound: Fraction, is_open: bool) -> Lang:
    """Texts of signed decimals above `bound`."""
    if bound > 0:
        return _magnitude_above(decimal(bound), is_open)
    if bound == 0 and is_open:
        return _magnitude_above("0", True)
    return alt(seq(_WHOLE, optional(_FRACTION)), seq(text("-"), _magnitude_below(decimal(-bound), is_open)))


def _at_most(bound: Fraction, is_open: bool) -> Lang:
    """Texts of signed decimals below `bound`."""
    negative = seq(text("-"), _magnitude_above(decimal(-bound) if bound < 0 else "0", is_open and bound <= 0))
    return negative if bound < 0 or (bound == 0 and is_open) else \
        alt(negative, _magnitude_below(decimal(bound), is_open))


def _magnitude_above(bound: str, is_open: bool) -> Lang:
    whole, _, fraction = bound.partition(".")
    any_fraction = optional(_FRACTION)
    options = [seq(_LEADING, repeat(_DIGIT, len(whole)), any_fraction)]
    for i, digit in enumerate(whole):
        left = len(whole) - i - 1
        greater = _digits(max(int(digit) + 1, 1), 9)
        options.append(seq(text(whole[:i]), greater, repeat(_DIGIT, left, left), any_fraction))
    options.append(seq(text(whole), _fraction_above(fraction, is_open)))
    return alt(*options)


def _fraction_above(fraction: str, is_open: bool) -> Lang:
    if not fraction:
        return seq(text("."), _ZEROS, _LEADING, repeat(_DIGIT, 0)) if is_open else optional(_FRACTION)
    options = [seq(text(fraction[:i]), _digits(int(digit) + 1, 9), repeat(_DIGIT, 0))
               for i, digit in enumerate(fraction)]
    options.append(seq(text(fraction), _ZEROS, _LEADING, repeat(_DIGIT, 0)) if is_open
                   else seq(text(fraction), repeat(_DIGIT, 0)))
    return seq(text("."), alt(*options))


def _magnitude_below(bound: str, is_open: bool) -> Lang:
    whole, _, fraction = bound.partition(".")
    any_fraction = optional(_FRACTION)
    options = [seq(_LEADING, repeat(_DIGIT, 0, len(whole) - 2), any_fraction), seq(text("0"), any_fraction)] \
        if len(whole) > 1 else []
    for i, digit in enumerate(whole):
        least, left = (1 if i == 0 and len(whole) > 1 else 0), len(whole) - i - 1
        options.append(seq(text(whole[:i]), _digits(least, int(digit) - 1), repeat(_DIGIT, left, left), any_fraction))
    options.append(seq(text(whole), _fraction_below(fraction, is_open)))
    return alt(*options)


def _fraction_below(fraction: str, is_open: bool) -> Lang:
    zero = optional(seq(text("."), text("0"), _ZEROS))
    if not fraction:
        return nothing() if is_open else zero
    options = [seq(text(fraction[:i]), _digits(0, int(digit) - 1), repeat(_DIGIT, 0))
               for i, digit in enumerate(fraction)]
    options += [text(fraction[:i]) for i in range(1, len(fraction))]
    if not is_open:
        options.append(seq(text(fraction), _ZEROS))
    return alt(epsilon(), seq(text("."), alt(*options)))


def _multiples(step: Fraction, wanted: bool, whole: bool, place: str) -> Lang:
    """Decimals that are (are not) integer multiples of `step`; integers only when `whole`.

    A remainder that the last digits decide needs no following; else there is a state for each.
    """
    places = 0 if whole and step.denominator == 1 else _scale(step)
    modulus = int(step * 10**places)
    if modulus > MAX_RESIDUES:
        raise GrammarTooLarge(f"{place.rstrip('/')}/multipleOf: {decimal(step)} has more than {MAX_RESIDUES} "
                              "remainders to follow; give bounds that leave few values, or use the matcher")
    after = [_after_digits(r, places, modulus, wanted, whole) for r in range(modulus)]
    power = next((i for i in range(4) if 10**i % modulus == 0), None)
    if power is not None:
        endings = [seq(text(str(n).rjust(power, "0") if power else ""), after[n % modulus]) for n in range(10**power)]
        short = [seq(text(str(n)), after[n % modulus]) for n in range(10**power)] if power else []
        magnitude = alt(seq(_LEADING, repeat(_DIGIT, 0), alt(*endings)), *short) if power else seq(_WHOLE, after[0])
        return seq(_SIGN, magnitude)
    return seq(_SIGN, alt(seq(text("0"), after[0]),
                          *(seq(_digits(d, d), residues(after, d % modulus)) for d in range(1, 10))))


def _after_digits(remainder: int, places: int, modulus: int, wanted: bool, whole: bool) -> Lang:
    """What may follow digits that leave `remainder`, counted in units of the last decimal place of the step."""
    def divides(value: int, place: int) -> bool:
        return value * 10**(places - place) % modulus == 0

    ends = epsilon() if divides(remainder, 0) == wanted else nothing()
    if whole:
        return ends

    def fraction(value: int, place: int) -> Lang:
        if place == places:
            if divides(value, place):
                return _ZEROS if wanted else seq(_ZEROS, _LEADING, repeat(_DIGIT, 0))
            return nothing() if wanted else repeat(_DIGIT, 0)
        key = value, place
        if key not in known:
            stop = epsilon() if place and divides(value, place) == wanted else nothing()
            known[key] = alt(stop, *(seq(_digits(d, d), fraction((value * 10 + d) % modulus, place + 1))
                                     for d in range(10)))
        return known[key]

    known: dict[tuple[int, int], Lang] = {}
    return alt(ends, seq(text("."), both(fraction(remainder, 0), repeat(_DIGIT, 1))))
