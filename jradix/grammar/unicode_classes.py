"""Sets of characters by name and by case, from Python's Unicode tables; computed on first use, then kept."""
from __future__ import annotations

import functools
import unicodedata
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from jradix.grammar.language import MAX_CODE_POINT, Ranges, cut_ranges, merged_ranges

PointRanges = tuple[tuple[int, int], ...]

ALL: PointRanges = ((0, MAX_CODE_POINT),)
LAST_CASED = 0x1FFFF        # no character above has another case
LONG_NAMES = {
    "Letter": "L", "Cased_Letter": "LC", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Combining_Mark": "M", "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc", "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd",
    "Letter_Number": "Nl", "Other_Number": "No", "Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc",
    "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps", "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi",
    "Final_Punctuation": "Pf", "Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc",
    "Modifier_Symbol": "Sk", "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp", "Other": "C", "Control": "Cc", "cntrl": "Cc", "Format": "Cf", "Surrogate": "Cs",
    "Private_Use": "Co", "Unassigned": "Cn",
}
GROUPS = ("L", "LC", "M", "N", "P", "S", "Z", "C")


def property_ranges(name: str) -> PointRanges | None:
    """The characters of `\\p{name}`: a general category, short or long, or Any, ASCII, Assigned; None when unknown."""
    for prefix in ("General_Category=", "gc="):
        name = name.removeprefix(prefix)
    if name == "Any":
        return ALL
    if name == "ASCII":
        return ((0, 0x7F),)
    if name == "Assigned":
        return complement(category_ranges("Cn"))
    name = LONG_NAMES.get(name, name)
    return category_ranges(name) if name in GROUPS or name in _categories()[0] else None


@functools.cache
def category_ranges(name: str) -> PointRanges:
    """The characters of a general category ("Lu") or of a group of them ("L", "LC")."""
    names, numbers = _categories()
    wanted = ("Lu", "Ll", "Lt") if name == "LC" else [each for each in names if each.startswith(name)]
    return _runs(np.isin(numbers, [names.index(each) for each in wanted if each in names]))


@functools.cache
def word_ranges() -> PointRanges:
    """What `\\w` matches in Python: letters, numbers of every kind and the underscore."""
    return merged_ranges((*_matching(str.isalnum), (0x5F, 0x5F)))


@functools.cache
def space_ranges() -> PointRanges:
    """What `\\s` matches in Python."""
    return _matching(str.isspace)


def complement(ranges: Ranges) -> PointRanges:
    """All other code points."""
    return cut_ranges(ALL, ranges)


def case_folded(ranges: Ranges, *, ascii_only: bool = False) -> PointRanges:
    """`ranges` and every character that `re.IGNORECASE` takes for one of them."""
    cased, others = _cases(ascii_only)
    found = list(ranges)
    for low, high in ranges:
        for point in cased[bisect_left(cased, low):]:
            if point > high:
                break
            found += [(other, other) for other in others[point]]
    return merged_ranges(found)


@functools.cache
def _cases(ascii_only: bool) -> tuple[list[int], dict[int, list[int]]]:
    """Characters that have another case, in order, and for each all that match it.

    Characters match when their simple lower-case forms do, or when these forms have the same upper-case form: k and the
    Kelvin sign, s and the long s, the three sigmas.
    """
    groups: dict[str, list[int]] = {}
    for point in range(0x80 if ascii_only else LAST_CASED + 1):
        char = chr(point)
        lower = char.lower()[0]
        if lower != char or char.upper() != char:
            upper = lower.upper()
            groups.setdefault(upper, []).append(point)
    others = {point: group for group in groups.values() if len(group) > 1 for point in group}
    return sorted(others), others


@functools.cache
def _categories() -> tuple[list[str], np.ndarray]:
    """Names of the general categories, and uint8[0x110000]: the number of each code point's."""
    found = list(map(unicodedata.category, map(chr, range(MAX_CODE_POINT + 1))))
    names = sorted(set(found))
    number = {name: i for i, name in enumerate(names)}
    return names, np.fromiter(map(number.__getitem__, found), np.uint8, len(found))


def _matching(test: Callable[[str], bool]) -> PointRanges:
    return _runs(np.fromiter(map(test, map(chr, range(MAX_CODE_POINT + 1))), bool, MAX_CODE_POINT + 1))


def _runs(member: np.ndarray) -> PointRanges:
    """The ranges where a bool array is True."""
    borders = np.flatnonzero(np.diff(member.astype(np.int8), prepend=0, append=0)).tolist()
    return tuple((low, end - 1) for low, end in zip(borders[::2], borders[1::2], strict=True))
