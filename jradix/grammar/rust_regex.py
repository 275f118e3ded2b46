"""Regular expressions rewritten for engines that read Rust's syntax: the same language, spelled without class names.

What `\\d`, `.`, case folding and the flags stand for is decided here, by the rules of `regex.py`; the result holds only
characters, explicit ranges, groups and counts, whose meaning is the same everywhere.
"""
from __future__ import annotations

import re

from jradix.errors import GrammarUnsupported
from jradix.grammar.language import Lang, cut_ranges, merged_ranges
from jradix.grammar.pattern_reader import PatternReader
from jradix.grammar.regex import COUNT, FLAG_LETTERS, Dialect, parse_regex
from jradix.grammar.regex_classes import any_but_line_ends, folded, read_class, read_escape
from jradix.grammar.unicode_classes import PointRanges

ANY_TEXT = r"[\x{0}-\x{10FFFF}]*"
GROUP = "(?:"
START, END = "^", "$"               # anchors among the parts of an alternative; no other part is spelled so
SURROGATES: PointRanges = ((0xD800, 0xDFFF),)


def rust_regex(pattern: str, *, dialect: Dialect = "python", is_search: bool = False,
               excluded: PointRanges = ()) -> str:
    """An expression in Rust's syntax for the same texts, without anchors: it matches whole texts.

    Args:
      pattern, dialect: as for `parse_regex`.
      is_search: the texts that contain a match, instead of those that are one.
      excluded: code points that no part of the pattern may match.

    Raises:
      GrammarError: whatever `parse_regex` refuses.
      GrammarUnsupported: an anchor that is not the first or last part of a top-level alternative.
    """
    parse_regex(pattern, anchored=not is_search, dialect=dialect)
    unwritten = merged_ranges((*excluded, *SURROGATES))
    branches = _Writer(PatternReader(pattern, is_ecma=dialect == "ecma"), unwritten).branches()
    return "|".join(_anchored(branch, pattern, is_search) for branch in branches)


def rust_text(value: str) -> str:
    """An expression that matches exactly `value`."""
    return "".join(_ranges(((ord(char), ord(char)),)) for char in value)


def rust_ascii(language: Lang) -> str | None:
    """An expression for a language of ASCII texts; None where it has others, or parts without a spelling."""
    if language.kind == "bytes":
        if language.value >> 128:
            return None
        return _ranges(merged_ranges([(byte, byte) for byte in range(128) if language.value >> byte & 1]))
    if language.kind == "text":
        return rust_text(language.value.decode("ascii")) if language.value.isascii() else None
    if language.kind == "words":
        if not all(word.isascii() for word in language.value):
            return None
        return f"(?:{'|'.join(rust_text(word.decode('ascii')) for word in language.value)})"
    if language.kind not in ("seq", "alt", "repeat"):
        return None
    parts = [rust_ascii(part) for part in language.parts]
    if None in parts:
        return None
    if language.kind == "repeat":
        low, high = language.value
        return f"(?:{parts[0]}){{{low},{'' if high is None else high}}}"
    return "".join(parts) if language.kind == "seq" else f"(?:{'|'.join(parts)})"


def _anchored(parts: list[str], pattern: str, is_search: bool) -> str:
    first, end = 0, len(parts)
    while first < end and parts[first] == START:
        first += 1
    while end > first and parts[end - 1] == END:
        end -= 1
    if START in parts[first:end] or END in parts[first:end]:
        raise GrammarUnsupported(f"regex {pattern[:80]!r}: an anchor inside the expression; the matcher follows "
                                 "anchors only at its start and end")
    before = ANY_TEXT if is_search and not first else ""
    after = ANY_TEXT if is_search and end == len(parts) else ""
    return before + "".join(_rotated(parts[first:end])) + after


def _rotated(parts: list[str]) -> list[str]:
    """`(?:AB){l,h}A` as `A(?:BA){l,h}`, where A is one character class, counted or not.

    The texts are the same. In the first form llguidance 1.9 loses texts of more than two rounds once the number of
    characters is bounded as well, as in a description of at most 50 words and 500 characters.
    """
    for start, part in enumerate(parts):
        if part != GROUP:
            continue
        depth, end = 1, start + 1
        while depth:
            depth += {GROUP: 1, ")": -1}.get(parts[end], 0)
            end += 1
        inner = parts[start + 1:end - 1]
        head = 1 + _is_count("".join(inner[1:2]))
        after = end + (end < len(parts) and _is_count(parts[end]))
        item = inner[:head]
        is_single = not {GROUP, ")", "|"} & set(item) and "|" not in inner and len(inner) > head
        follows = parts[after:after + head] == item and not _is_count("".join(parts[after + head:after + head + 1]))
        if is_single and follows and after > end:
            return parts[:start] + item + [GROUP] + inner[head:] + item + parts[end - 1:after] + _rotated(
                parts[after + head:])
    return parts


def _is_count(part: str) -> bool:
    return part[:1] in ("*", "+", "?", "{")


class _Writer:
    """One pass over a pattern that `parse_regex` has accepted, so that nothing is checked again."""

    def __init__(self, reader: PatternReader, unwritten: PointRanges) -> None:
        self._reader = reader
        self._unwritten = unwritten
        self._flags = 0
        self._outer_flags: list[int] = []       # of the open groups
        self._branches: list[list[str]] = [[]]

    def branches(self) -> list[list[str]]:
        """The top-level alternatives, each as its parts."""
        while not self._reader.is_at_end:
            self._write_item()
        return self._branches

    def _write_item(self) -> None:
        reader, start = self._reader, self._reader.at
        char = reader.pattern[start]
        reader.at += 1
        if self._flags & re.VERBOSE and char in " \t\n\r\f\v#":
            if char == "#":
                end = reader.pattern.find("\n", start)
                reader.at = len(reader.pattern) if end < 0 else end + 1
        elif char == "|" and not self._outer_flags:
            self._branches.append([])
        elif char == "|":
            self._put("|")
        elif char == "(":
            self._open_group()
        elif char == ")":
            self._flags = self._outer_flags.pop()
            self._put(")")
        elif char in "*+?" or (char == "{" and COUNT.match(reader.pattern, start)):
            self._repeat(start, char)
        elif char in "^$":
            self._anchor(START if char == "^" else END, start)
        elif char == ".":
            self._put_ranges(any_but_line_ends(reader, self._flags))
        elif char == "[":
            self._put_ranges(read_class(reader, start, self._flags))
        elif char == "\\":
            self._escape(start)
        else:
            self._put_char(ord(char))

    def _put(self, part: str) -> None:
        self._branches[-1].append(part)

    def _put_char(self, point: int) -> None:
        self._put_ranges(folded(((point, point),), self._flags))

    def _put_ranges(self, ranges: PointRanges) -> None:
        self._put(_ranges(cut_ranges(ranges, self._unwritten)))

    def _anchor(self, sign: str, start: int) -> None:
        if self._outer_flags:
            raise GrammarUnsupported(f"regex {self._reader.pattern[:80]!r}, position {start}: an anchor in a group; "
                                     "the matcher follows anchors only at the start and end of an expression")
        self._put(sign)

    def _escape(self, start: int) -> None:
        reader = self._reader
        if reader.escaped(start) in "AZ" and not reader.is_ecma:
            self._anchor(START if reader.escaped(start) == "A" else END, start)
            reader.at += 1
            return
        found = read_escape(reader, start, self._flags)
        if isinstance(found, int):
            self._put_char(found)
        else:
            self._put_ranges(found)

    def _open_group(self) -> None:
        reader, outer = self._reader, self._flags
        if reader.take("?"):
            if not reader.is_ecma and reader.take("#"):
                reader.at = reader.pattern.index(")", reader.at) + 1
                return
            if reader.peek() in "P<":
                reader.at = reader.pattern.index(">", reader.at) + 1
            elif not reader.take(":") and self._inline_flags():
                return
        self._outer_flags.append(outer)
        self._put(GROUP)

    def _inline_flags(self) -> bool:
        """Reads the rest of `(?flags)`, True, or of `(?flags-flags:`, False."""
        reader, is_on = self._reader, True
        while (char := reader.peek()) not in ":)":
            reader.at += 1
            if char == "-":
                is_on = False
            elif is_on:
                self._flags = self._flags & ~(re.ASCII | re.UNICODE if char in "au" else 0) | FLAG_LETTERS[char]
            else:
                self._flags &= ~FLAG_LETTERS[char]
        reader.at += 1
        return char == ")"

    def _repeat(self, start: int, char: str) -> None:
        reader = self._reader
        if char == "{":
            found = COUNT.match(reader.pattern, start)
            reader.at = found.end()
            low, comma, high = found.group(1).partition(",")
            self._put(f"{{{int(low or 0)}{comma}{int(high) if high else ''}}}")
        else:
            self._put(char)
        reader.take("?")                        # lazy: the same texts


def _ranges(ranges: PointRanges) -> str:
    if not ranges:
        return r"[^\x{0}-\x{10FFFF}]"
    (low, high), *others = ranges
    if low == high and not others and chr(low).isascii() and chr(low).isalnum():
        return chr(low)
    return "[" + "".join(rf"\x{{{low:X}}}" if low == high else rf"\x{{{low:X}}}-\x{{{high:X}}}"
                         for low, high in ranges) + "]"
