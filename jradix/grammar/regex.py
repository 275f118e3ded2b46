r"""Regular expressions to languages: Python's `re` syntax, and ECMAScript's as JSON schema uses it.

Supported: literals and escapes, `.`, classes, `\d \w \s` and their complements, `\p{..}` with general categories,
groups (names are ignored), alternatives, greedy and lazy quantifiers (the same language), `^ $ \A \Z` anywhere, the
flags I M S X A. Refused by name, with the position: look-around, back-references, word boundaries, possessive
quantifiers, atomic and conditional groups, which are not regular or would silently change what is matched.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from jradix.errors import GrammarError
from jradix.grammar.anchors import LINE_END, LINE_START, TEXT_END, TEXT_END_OR_NEWLINE, TEXT_START, anchored_language
from jradix.grammar.language import Lang, alt, chars, mark, repeat, seq, text
from jradix.grammar.pattern_reader import PatternReader
from jradix.grammar.regex_classes import any_but_line_ends, folded, read_class, read_escape
from jradix.grammar.unicode_classes import PointRanges

Dialect = Literal["python", "ecma"]

FLAGS = {"python": re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.ASCII | re.UNICODE,
         "ecma": re.IGNORECASE | re.DOTALL | re.UNICODE}
FLAG_LETTERS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE, "a": re.ASCII,
                "u": re.UNICODE}
PLAIN_TEXT = re.compile(r"[^\\^$.|?*+(){}\[\]]{2,}(?![?*+{])")
COUNT = re.compile(r"\{([0-9]+(,[0-9]*)?|,[0-9]*)\}")       # any other `{` is a character
OCTAL_NUMBER = re.compile(r"[1-7][0-7]{2}")                 # any other number after `\` is a back-reference
MAX_COUNT_DIGITS = 9
REFUSED_GROUPS = {"=": "look-ahead (?=...)", "!": "negative look-ahead (?!...)", "<=": "look-behind (?<=...)",
                  "<!": "negative look-behind (?<!...)", ">": "an atomic group (?>...)",
                  "(": "a conditional group (?(...)...)", "P=": "a back-reference (?P=...)"}


def parse_regex(pattern: str, *, flags: int = 0, anchored: bool = True, dialect: Dialect = "python") -> Lang:
    r"""The language of a regular expression.

    Args:
      pattern: the expression.
      flags: of `re`: I, M, S, X, A, U. With the "ecma" dialect only I and S.
      anchored: True: the whole text matches, as `re.fullmatch`; False: some part of it does, as `re.search` and the
        keyword `pattern` of JSON schema.
      dialect: "python", or "ecma": `\d \w` are ASCII, `$` is the very end, `[]` and `[^]` stand for nothing and
        anything, `\cX`, `\/`, `\u{...}` and pairs of `\u` surrogates are understood.

    Raises:
      GrammarError: syntax, or an unsupported construct; it is named, with its position in the pattern.
    """
    if not isinstance(pattern, str):
        raise GrammarError(f"regex {pattern!r}: expected a str")
    if dialect not in FLAGS:
        raise ValueError(f"dialect={dialect!r}: expected \"python\" or \"ecma\"")
    unknown = flags & ~FLAGS[dialect]
    if unknown:
        raise GrammarError(f"regex {pattern!r}: flags {re.RegexFlag(unknown)!r} are not supported with {dialect=}")
    branches = _Parser(PatternReader(pattern, is_ecma=dialect == "ecma"), flags).parse()
    return anchored_language(branches, is_search=not anchored)


@dataclass(slots=True)
class _Group:
    """An open group: where it began, the flags outside, finished alternatives and the parts of the current one."""
    start: int
    outer_flags: int
    branches: list[list[Lang]] = field(default_factory=list)
    items: list[Lang] = field(default_factory=list)


class _Parser:
    """One pass over a pattern. Open groups are on a stack of our own, so that deep nesting takes memory only."""

    def __init__(self, reader: PatternReader, flags: int) -> None:
        self._reader = reader
        self._flags = flags
        self._groups = [_Group(0, flags)]
        self._is_repeatable = False         # the last item: no anchor, not repeated already
        self._made: dict[PointRanges, Lang] = {}

    def parse(self) -> list[list[Lang]]:
        """The alternatives of the whole pattern, each as its parts in order."""
        while not self._reader.is_at_end:
            self._parse_item()
        group = self._groups[-1]
        if len(self._groups) > 1:
            self._reader.fail("the group that begins here is not closed: add `)`", group.start)
        return [*group.branches, group.items]

    def _parse_item(self) -> None:
        reader, flags = self._reader, self._flags
        start = reader.at
        char = reader.pattern[start]
        reader.at += 1
        if flags & re.VERBOSE and char in " \t\n\r\f\v#":
            if char == "#":
                end = reader.pattern.find("\n", start)
                reader.at = len(reader.pattern) if end < 0 else end + 1
        elif char == "|":
            group = self._groups[-1]
            group.branches.append(group.items)
            group.items = []
            self._is_repeatable = False
        elif char == "(":
            self._open_group(start)
        elif char == ")":
            self._close_group(start)
        elif char in "*+?" or (char == "{" and COUNT.match(reader.pattern, start)):
            self._repeat(start)
        elif char == "^":
            self._add_anchor(LINE_START if flags & re.MULTILINE else TEXT_START)
        elif char == "$":
            self._add_anchor(LINE_END if flags & re.MULTILINE else TEXT_END if reader.is_ecma else TEXT_END_OR_NEWLINE)
        elif char == ".":
            self._add(any_but_line_ends(reader, flags))
        elif char == "[":
            self._add(read_class(reader, start, flags))
        elif char == "\\":
            self._escape(start)
        else:
            plain = PLAIN_TEXT.match(reader.pattern, start)
            if plain and not flags & (re.IGNORECASE | re.VERBOSE):
                reader.at = plain.end()
                self._groups[-1].items.append(text(plain.group()))
                self._is_repeatable = True
            else:
                self._add(ord(char))

    def _add(self, found: int | PointRanges) -> None:
        """One character: this code point, in whatever case the flags allow, or one of these ranges."""
        ranges = folded(((found, found),), self._flags) if isinstance(found, int) else found
        if ranges not in self._made:
            self._made[ranges] = chars(ranges)
        self._groups[-1].items.append(self._made[ranges])
        self._is_repeatable = True

    def _add_anchor(self, number: int) -> None:
        self._groups[-1].items.append(mark(number))
        self._is_repeatable = False

    def _escape(self, start: int) -> None:
        reader = self._reader
        char = reader.escaped(start)
        if char in "bB":
            reader.refuse(f"the word boundary \\{char}", start)
        if char in "123456789" and (reader.is_ecma or not OCTAL_NUMBER.match(reader.pattern, reader.at)):
            reader.refuse(f"the back-reference \\{char}", start)
        if char == "k" and reader.is_ecma:
            reader.refuse("the back-reference \\k", start)
        if char in "AZ" and not reader.is_ecma:
            reader.at += 1
            self._add_anchor(TEXT_START if char == "A" else TEXT_END)
        else:
            self._add(read_escape(reader, start, self._flags))

    # -- groups

    def _open_group(self, start: int) -> None:
        reader, outer_flags = self._reader, self._flags
        if reader.take("?"):
            for sign in (reader.peek(2), reader.peek()):
                if sign in REFUSED_GROUPS:
                    reader.refuse(REFUSED_GROUPS[sign], start)
            if not reader.is_ecma and reader.take("#"):
                reader.take_until(")", start, "comment")
                return
            if reader.take("<" if reader.is_ecma else "P<"):
                name = reader.take_until(">", start, "group name")
                if not (name.replace("$", "_") if reader.is_ecma else name).isidentifier():
                    reader.fail(f"group name {name!r}: expected an identifier", start)
            elif not reader.take(":") and self._inline_flags(start):
                return
        self._groups.append(_Group(start, outer_flags))
        self._is_repeatable = False

    def _inline_flags(self, start: int) -> bool:
        """Reads the rest of `(?flags)`, True, or of `(?flags-flags:`, False."""
        reader = self._reader
        begin = reader.at
        while reader.peek().isalpha() or reader.peek() == "-":
            reader.at += 1
        given, closing = reader.pattern[begin:reader.at], reader.peek()
        reader.at += 1
        on, minus, off = given.partition("-")
        letters = set(on + off)
        if reader.is_ecma or not letters or not letters <= FLAG_LETTERS.keys() or closing not in (":", ")"):
            reader.refuse(f"the group (?{given}{closing}", start)
        if set(on) & set(off) or letters >= {"a", "u"} or set(off) & {"a", "u"} or (minus and not off):
            reader.fail(f"inline flags {given!r} contradict each other", start)
        if closing == ")" and (start or minus):
            reader.fail("global flags (?...) must stand at the start of the pattern", start)
        if letters & {"a", "u"}:
            self._flags &= ~(re.ASCII | re.UNICODE)
        for letter in on:
            self._flags |= FLAG_LETTERS[letter]
        for letter in off:
            self._flags &= ~FLAG_LETTERS[letter]
        return closing == ")"

    def _close_group(self, start: int) -> None:
        if len(self._groups) == 1:
            self._reader.fail("`)` closes no group: write `\\)` for the character", start)
        group = self._groups.pop()
        self._flags = group.outer_flags
        self._groups[-1].items.append(alt(*(seq(*items) for items in (*group.branches, group.items))))
        self._is_repeatable = True

    # -- quantifiers

    def _repeat(self, start: int) -> None:
        reader = self._reader
        char = reader.pattern[start]
        low, high = self._counts(start) if char == "{" else {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if not self._is_repeatable:
            reader.fail(f"nothing to repeat before `{char}`: an item is expected, and repeated once only", start)
        if not reader.take("?") and reader.peek() == "+":
            reader.refuse("a possessive quantifier", start)
        items = self._groups[-1].items
        items[-1] = repeat(items[-1], low, high)
        self._is_repeatable = False

    def _counts(self, start: int) -> tuple[int, int | None]:
        reader = self._reader
        given = reader.take_until("}", start, "count")
        first, last = given.split(",")[0], given.split(",")[-1]
        if reader.is_ecma and not first:
            reader.fail("a count without its lower end means different things in different engines: "
                        f"write {{0,{last}}}", start)
        if max(len(first), len(last)) > MAX_COUNT_DIGITS:
            reader.fail(f"count {{{given[:20]}...}}: expected less than 10^{MAX_COUNT_DIGITS}", start)
        low, high = int(first or 0), int(last) if last else None
        if high is not None and high < low:
            reader.fail(f"count {{{given}}}: the smaller number stands first", start)
        return low, high
