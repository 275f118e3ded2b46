"""Sets of characters by name and by case, from Python's Unicode tables; computed on first use, then kept."""
from __future__ import annotations

import functools
import re
import unicodedata
from bisect import bisect_left

import numpy as np

from jradix.grammar.language import MAX_CODE_POINT, Ranges, cut_ranges, merged_ranges

PointRanges = tuple[tuple[int, int], ...]

ALL: PointRanges = ((0, MAX_CODE_POINT),)
LAST_CASED = 0x1FFFF        # no character above has another case
EMPTY_PLANES = 0x40000, 0xE0000     # no characters from here up to there
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
    return _matching(r"\w+")


@functools.cache
def space_ranges() -> PointRanges:
    """What `\\s` matches in Python."""
    return _matching(r"\s+")


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
    points = np.append(np.arange(EMPTY_PLANES[0]), np.arange(EMPTY_PLANES[1], MAX_CODE_POINT + 1))
    found = np.frombuffer("".join(map(unicodedata.category, _text_of(points))).encode(), "S2")
    names, numbers = np.unique(found, return_inverse=True)
    names = [name.decode() for name in names.tolist()]
    every = np.full(MAX_CODE_POINT + 1, names.index("Cn"), np.uint8)
    every[points] = numbers
    return names, every


def _matching(pattern: str) -> PointRanges:
    """The runs of characters that Python's `re` finds for `pattern` among all of them, in order."""
    return tuple((found.start(), found.end() - 1)
                 for found in re.finditer(pattern, _text_of(np.arange(MAX_CODE_POINT + 1))))


def _text_of(points: np.ndarray) -> str:
    return points.astype("<u4").tobytes().decode("utf-32-le", errors="surrogatepass")


def _runs(member: np.ndarray) -> PointRanges:
    """The ranges where a bool array is True."""
    borders = np.flatnonzero(np.diff(member.astype(np.int8), prepend=0, append=0)).tolist()
    return tuple((low, end - 1) for low, end in zip(borders[::2], borders[1::2], strict=True))
