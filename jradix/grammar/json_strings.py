"""Texts of JSON strings: the one canonical escaping of a language of decoded texts, and membership of a text in it.

Constraints are kept over decoded text and written out last. The writing is a code (each text has one form, byte by
byte), so intersections and complements of decoded texts stay exact. It is raw UTF-8 except `\\"`, `\\\\`,
`\\b \\f \\n \\r \\t` and `\\u00xx` in lower case for the other control characters; `\\/` and `\\u` forms of
printable characters are not written.
"""
from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.dfa import Dfa, compile_language, is_empty_language
from jradix.grammar.language import Lang, alt, both, but_not, repeat, seq, text, unmarked, utf8_strings
from jradix.grammar.limits import GrammarLimits

_SHORT = {8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}
_ESCAPES = {byte: _SHORT.get(byte, b"\\u%04x" % byte) for byte in (*range(32), 34, 92)}
_SPECIAL = sum(1 << byte for byte in _ESCAPES)
_QUOTE = text('"')


class StringWriter:
    """Writes languages of decoded text as JSON strings and answers questions about them, each once.

    Args:
      limits: of the small automata that the questions need; all of them together may do half of `max_work`.
    """

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits, self._work_left = limits, limits.max_work // 2
        self._written: dict[int, Lang] = {}
        self._automata: dict[int, Dfa] = {}
        self._empty: dict[int, bool] = {}
        self._keep: list[Lang] = []

    def quoted(self, content: Lang | None) -> Lang:
        """The JSON strings whose decoded text is in `content`; None: any text."""
        return seq(_QUOTE, self._escaped(utf8_strings() if content is None else content), _QUOTE)

    def accepts(self, content: Lang, value: str) -> bool:
        """Is the decoded text `value` in `content`?"""
        listed = listed_texts(content)
        if listed is not None:
            return value in listed
        if id(content) not in self._automata:
            self._keep.append(content)
            self._automata[id(content)] = compile_language(content, self._limits, allow_empty=True)
        return self._automata[id(content)].accepts(value.encode("utf-8", "surrogatepass"))

    def is_empty(self, content: Lang) -> bool:
        """Does `content` hold no text at all?"""
        if content.nullable or content.kind not in ("both", "but_not", "seq", "alt", "unmarked"):
            return content.is_nothing
        if id(content) not in self._empty:
            self._keep.append(content)
            limits = replace(self._limits, max_work=max(self._work_left, 1))
            try:
                self._empty[id(content)], work = is_empty_language(content, limits)
            except GrammarTooLarge:
                raise GrammarTooLarge("finding out which patterns of texts and keys overlap takes more than half of "
                                      f"max_work={self._limits.max_work:,} steps; use fewer or simpler ones") from None
            self._work_left -= work
        return self._empty[id(content)]

    def _escaped(self, part: Lang) -> Lang:
        done = self._written.get(id(part))
        if done is not None:
            return done
        kind, value = part.kind, part.value
        if kind == "bytes":
            specials = [text(escape) for byte, escape in _ESCAPES.items() if value >> byte & 1]
            plain = Lang("bytes", value & ~_SPECIAL, (), False, part.shortest) if value & ~_SPECIAL else None
            written = part if not specials else alt(*specials, *((plain,) if plain else ()))
        elif kind == "text":
            written = text(escape_bytes(value))
        elif kind == "words":
            written = alt(*(text(escape_bytes(word)) for word in value))
        else:
            parts = [self._escaped(child) for child in part.parts]
            written = {"seq": seq, "alt": alt, "both": both, "but_not": but_not,
                       "repeat": lambda one: repeat(one, *value),
                       "unmarked": lambda one: unmarked(one, nullable=part.nullable)}[kind](*parts)
        self._keep.append(part)
        self._written[id(part)] = written
        return written


def listed_texts(content: Lang) -> list[str] | None:
    """The texts of a language that is written as a list of them, else None."""
    if content.kind == "text":
        return [content.value.decode("utf-8")]
    if content.kind == "words":
        return [word.decode("utf-8") for word in content.value]
    if content.kind == "bytes" and content.value < 1 << 128:
        return [chr(byte) for byte in range(128) if content.value >> byte & 1]
    if content.kind == "alt":
        parts = [listed_texts(part) for part in content.parts]
        return None if None in parts else [one for part in parts for one in part or ()]
    return None


def escape_bytes(value: bytes) -> bytes:
    """`value` with the bytes that JSON cannot hold raw replaced by their escapes."""
    if not any(byte in _ESCAPES for byte in value):
        return value
    return b"".join(_ESCAPES.get(byte) or bytes((byte,)) for byte in value)


def string_text(value: str, place: str) -> str:
    """The JSON string of `value`. Raises GrammarError for a lone surrogate."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise GrammarError(f"{place}: {value!r} holds half a surrogate pair, which is no text; remove it") from None
    return json.dumps(value, ensure_ascii=False)


def texts(values: list[str], place: str) -> Lang:
    """Exactly these decoded texts."""
    for value in values:
        string_text(value, place)
    return alt(*(text(value) for value in values))


def is_count(value: Any) -> bool:
    """Is `value` a count in a schema: an integer >= 0, or a float that is one?"""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and value >= 0 and value == int(value)
