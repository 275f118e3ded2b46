"""Characters in regular expressions: classes, and the escapes that mean the same inside and outside of them."""
from __future__ import annotations

import re
import unicodedata

from jradix.grammar import unicode_classes as unicode
from jradix.grammar.pattern_reader import PatternReader
from jradix.grammar.unicode_classes import PointRanges

CONTROL_ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
ASCII_DIGITS: PointRanges = ((0x30, 0x39),)
ASCII_WORD: PointRanges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
ASCII_SPACE: PointRanges = ((9, 13), (32, 32))
ECMA_SPACE = unicode.merged_ranges((*ASCII_SPACE, (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                                    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)))
LINE_ENDS: PointRanges = ((10, 10),)
ECMA_LINE_ENDS: PointRanges = ((10, 10), (13, 13), (0x2028, 0x2029))
OCTAL_ESCAPE = re.compile(r"0[0-7]{0,2}|[1-7][0-7]{2}")     # outside a class, where \1 is a back-reference
OCTAL_IN_CLASS = re.compile(r"[0-7]{1,3}")
LOW_SURROGATE = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")


def folded(ranges: PointRanges, flags: int) -> PointRanges:
    """The ranges, with the other cases of their characters where the flags ignore case."""
    return unicode.case_folded(ranges, ascii_only=bool(flags & re.ASCII)) if flags & re.IGNORECASE else ranges


def any_but_line_ends(reader: PatternReader, flags: int) -> PointRanges:
    """What `.` matches."""
    if flags & re.DOTALL:
        return unicode.ALL
    return unicode.complement(ECMA_LINE_ENDS if reader.is_ecma else LINE_ENDS)


def read_class(reader: PatternReader, start: int, flags: int) -> PointRanges:
    """The class whose `[` stands at `start` and is already read."""
    is_negated = reader.take("^")
    found: list[tuple[int, int]] = []
    first = reader.at
    while reader.at == first and not reader.is_ecma or not reader.take("]"):
        low = _member(reader, start, flags)
        dash = reader.at
        if reader.peek() == "-" and reader.peek(2) != "-]":
            reader.at += 1
            high = _member(reader, start, flags)
            if not (isinstance(low, int) and isinstance(high, int)):
                reader.fail("a range in a class needs a character at both ends: write `\\-` for the sign", dash)
            if high < low:
                reader.fail(f"range {chr(low)!r} to {chr(high)!r} in a class: the smaller end stands first", dash)
            found += folded(((low, high),), flags)
        else:
            found += folded(((low, low),), flags) if isinstance(low, int) else low
    ranges = unicode.merged_ranges(found)
    return unicode.complement(ranges) if is_negated else ranges


def _member(reader: PatternReader, class_start: int, flags: int) -> int | PointRanges:
    if reader.is_at_end:
        reader.fail("the class that begins here is not closed: add `]`", class_start)
    start = reader.at
    reader.at += 1
    if reader.pattern[start] != "\\":
        return ord(reader.pattern[start])
    if reader.escaped(start) == "b":
        reader.at += 1
        return 8
    if not reader.is_ecma and (octal := OCTAL_IN_CLASS.match(reader.pattern, start + 1)):
        return _octal(reader, start, octal.group())
    return read_escape(reader, start, flags)


def read_escape(reader: PatternReader, start: int, flags: int) -> int | PointRanges:
    """The escape whose `\\` stands at `start` and is already read: a code point, or the ranges of a class."""
    char = reader.escaped(start)
    reader.at += 1
    if char in "dDwWsS":
        ranges = _shorthand(char.lower(), flags, reader.is_ecma)
        return ranges if char.islower() else unicode.complement(ranges)
    if char in "pP":
        ranges = _property(reader, start)
        return ranges if char == "p" else unicode.complement(ranges)
    if char in CONTROL_ESCAPES:
        return CONTROL_ESCAPES[char]
    if char in HEX_ESCAPES and not (char == "U" and reader.is_ecma):
        return _hexadecimal(reader, start, HEX_ESCAPES[char])
    if reader.is_ecma:
        if char == "c":
            letter = reader.peek()
            if not (letter.isascii() and letter.isalpha()):
                reader.fail("\\c: expected a letter after it", start)
            reader.at += 1
            return ord(letter) % 32
        if char == "0" and not reader.peek().isdecimal():
            return 0
    elif char == "a":
        return 7
    elif char == "N":
        return _named(reader, start)
    elif octal := OCTAL_ESCAPE.match(reader.pattern, start + 1):
        return _octal(reader, start, octal.group())
    if char.isascii() and char.isalnum():
        reader.refuse(f"the escape \\{char}", start)
    return ord(char)


def _shorthand(letter: str, flags: int, is_ecma: bool) -> PointRanges:
    is_ascii = is_ecma or bool(flags & re.ASCII)
    if letter == "d":
        return ASCII_DIGITS if is_ascii else unicode.category_ranges("Nd")
    if letter == "w":
        return ASCII_WORD if is_ascii else unicode.word_ranges()
    return ECMA_SPACE if is_ecma else ASCII_SPACE if is_ascii else unicode.space_ranges()


def _octal(reader: PatternReader, start: int, digits: str) -> int:
    reader.at = start + 1 + len(digits)
    if int(digits, 8) > 0o377:
        reader.fail(f"octal escape \\{digits}: expected at most \\377", start)
    return int(digits, 8)


def _hexadecimal(reader: PatternReader, start: int, num_digits: int) -> int:
    name = reader.pattern[start:reader.at]
    if reader.is_ecma and name == "\\u" and reader.take("{"):
        digits = reader.take_until("}", start, "escape \\u{")
    else:
        digits = reader.peek(num_digits)
        reader.at += len(digits)
        if len(digits) < num_digits:
            reader.fail(f"escape {name}: expected {num_digits} hexadecimal digits", start)
    if not re.fullmatch("[0-9A-Fa-f]{1,8}", digits) or int(digits, 16) > unicode.MAX_CODE_POINT:
        reader.fail(f"escape {name}: expected a code point in hexadecimal digits, not {digits!r}", start)
    point = int(digits, 16)
    if reader.is_ecma and 0xD800 <= point < 0xDC00 and (low := LOW_SURROGATE.match(reader.pattern, reader.at)):
        reader.at = low.end()
        return 0x10000 + (point - 0xD800 << 10) + int(low[1], 16) - 0xDC00
    return point


def _property(reader: PatternReader, start: int) -> PointRanges:
    if not reader.take("{"):
        reader.fail(f"{reader.pattern[start:start + 2]}: expected the name in braces, as in \\p{{L}}", start)
    name = reader.take_until("}", start, "property")
    ranges = unicode.property_ranges(name)
    if ranges is None:
        reader.refuse(f"the property \\p{{{name}}} (known: general categories, Any, ASCII, Assigned)", start)
    return ranges


def _named(reader: PatternReader, start: int) -> int:
    if not reader.take("{"):
        reader.fail("\\N: expected a name in braces", start)
    name = reader.take_until("}", start, "character name")
    try:
        return ord(unicodedata.lookup(name))
    except (KeyError, TypeError):       # TypeError: a named sequence of several characters
        reader.fail(f"\\N{{{name}}}: no character has this name", start)
