"""Languages: immutable expressions that denote sets of byte strings. Building one is cheap and decides nothing.

Only the functions of this module make them, and they simplify as they go: nothing and the empty string vanish, adjacent
texts join, nested repeats collapse. What no local rule can see (whether an intersection is empty, say) is found when
`jradix.grammar.dfa.compile_language` turns the expression into an automaton. Equal parts need not be one object.

Characters are UTF-8, exactly: `chars` and `any_char` never accept a surrogate, an overlong form or half a character.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from jradix.errors import GrammarError

MAX_CODE_POINT = 0x10FFFF
NUM_BYTES = 256
FLAT_PARTS = 32     # longer sequences and alternatives are kept nested: copying them at each call would be quadratic

Kind = Literal["bytes", "text", "words", "seq", "alt", "repeat", "both", "but_not", "unmarked", "residues"]
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Lang:
    """A set of byte strings. Compared by identity; made by the functions below, never directly.

    Attributes:
      kind: how `value` and `parts` are read:
        bytes: one symbol; `value` is an int whose bit i is set when byte i belongs (bits from 256: marks, see `mark`);
        text: exactly the bytes `value`; words: one of the sorted byte strings `value`;
        seq, alt, both: all `parts` after one another, any of them, all at once;
        repeat: `parts[0]`, `value` = (low, high) times, high None for no bound;
        but_not: `parts[0]` without `parts[1]`; unmarked: `parts[0]` with the marks taken out;
        residues: decimal digits, then `parts[r]`; r starts as `value`, each digit d makes it (10 r + d) % len(parts).
      nullable: exactly whether the empty string belongs.
      shortest: a lower bound on the number of bytes of every string that belongs.
    """
    kind: Kind
    value: int | bytes | tuple
    parts: tuple[Lang, ...]
    nullable: bool
    shortest: int

    @property
    def is_nothing(self) -> bool:
        """True for the expression `nothing()`. Other expressions can denote the empty set too; compiling tells."""
        return self.kind == "bytes" and self.value == 0

    @property
    def is_epsilon(self) -> bool:
        """True for the expression `epsilon()`, the set of the empty string alone."""
        return self.kind == "text" and not self.value

    def __repr__(self) -> str:
        if self.kind == "bytes":
            return f"<bytes {[i for i in range(self.value.bit_length()) if self.value >> i & 1]}>"
        if self.parts:
            return f"<{self.kind} of {len(self.parts)}{f' {self.value}' if self.value else ''}>"
        return f"<{self.kind} {self.value!r}>"


def nothing() -> Lang:
    """The empty set."""
    return Lang("bytes", 0, (), False, 0)


def epsilon() -> Lang:
    """The set of the empty string."""
    return Lang("text", b"", (), True, 0)


def byte_set(values: Iterable[int]) -> Lang:
    """One byte out of `values` (0 to 255)."""
    mask = 0
    for value in values:
        if not 0 <= value < NUM_BYTES:
            raise ValueError(f"byte {value!r}: expected 0 to 255")
        mask |= 1 << value
    return _symbols(mask)


def text(value: str | bytes) -> Lang:
    """Exactly `value`; a str as UTF-8. Raises GrammarError for a lone surrogate, which UTF-8 cannot express."""
    if isinstance(value, str):
        try:
            value = value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise GrammarError(f"text {value!r}: a lone surrogate at position {error.start} has no UTF-8 form; "
                               "write the whole character") from None
    return Lang("text", bytes(value), (), not value, len(value))


def chars(ranges: Ranges) -> Lang:
    """One character whose code point lies in one of the inclusive `ranges`; surrogates in them are left out."""
    points = merged_ranges(ranges)
    if points and not 0 <= points[0][0] <= points[-1][1] <= MAX_CODE_POINT:
        raise ValueError(f"code points {points[0][0]:#x} to {points[-1][1]:#x}: expected 0 to 0x10FFFF")
    points = cut_ranges(points, ((0xD800, 0xDFFF),))
    seen: dict[tuple, Lang] = {}
    parts = []
    for first, last, lead, num_tails in ((0, 0x7F, 0, 0), (0x80, 0x7FF, 0xC0, 1), (0x800, 0xFFFF, 0xE0, 2),
                                         (0x10000, MAX_CODE_POINT, 0xF0, 3)):
        inside = tuple((max(low, first), min(high, last)) for low, high in points if low <= last and high >= first)
        parts.append(_encoded(inside, lead, num_tails, seen))
    return alt(*parts)


@functools.cache
def any_char() -> Lang:
    """One character, whichever."""
    return chars(((0, MAX_CODE_POINT),))


@functools.cache
def utf8_strings() -> Lang:
    """All strings of whole characters, the empty one included."""
    return repeat(any_char(), 0, None)


def seq(*parts: Lang) -> Lang:
    """A string of each part, one after another."""
    flat: list[Lang] = []
    for part in parts:
        if part.is_nothing:
            return part
        for piece in part.parts if part.kind == "seq" and len(part.parts) <= FLAT_PARTS else (part,):
            if not piece.is_epsilon:
                flat.append(piece)
    joined: list[Lang] = []
    i = 0
    while i < len(flat):
        end = i + 1
        if flat[i].kind == "text":
            while end < len(flat) and flat[end].kind == "text":
                end += 1
        joined.append(flat[i] if end == i + 1 else text(b"".join(piece.value for piece in flat[i:end])))
        i = end
    if len(joined) < 2:
        return joined[0] if joined else epsilon()
    return Lang("seq", (), tuple(joined), all(part.nullable for part in joined), sum(part.shortest for part in joined))


def alt(*parts: Lang) -> Lang:
    """A string of any of the parts. Texts among them become one sorted list of words, however many they are."""
    mask, words, others = 0, set(), {}
    for part in parts:
        for piece in part.parts if part.kind == "alt" and len(part.parts) <= FLAT_PARTS else (part,):
            if piece.kind == "bytes":
                mask |= piece.value
            elif piece.kind == "text":
                words.add(piece.value)
            elif piece.kind == "words":
                words.update(piece.value)
            else:
                others[id(piece)] = piece
    short = {word for word in words if len(word) == 1}
    if mask or len(short) > 1:
        words -= short
        for word in short:
            mask |= 1 << word[0]
    found = list(others.values())
    if mask:
        found.append(_symbols(mask))
    if len(words) == 1:
        found.append(text(words.pop()))
    elif words:
        found.append(Lang("words", tuple(sorted(words)), (), b"" in words, min(map(len, words))))
    if len(found) < 2:
        return found[0] if found else nothing()
    return Lang("alt", (), tuple(found), any(part.nullable for part in found), min(part.shortest for part in found))


def repeat(part: Lang, low: int, high: int | None = None) -> Lang:
    """`part` at least `low` and at most `high` times; no bound for None. Counts cost nothing until it is compiled."""
    if low < 0 or (high is not None and high < low):
        raise ValueError(f"repeat from {low} to {high} times: expected 0 <= low <= high")
    if high == 0 or part.is_epsilon:
        return epsilon()
    if part.is_nothing:
        return part if low else epsilon()
    if low == high == 1:
        return part
    if part.nullable:
        low = 0
    if part.kind == "repeat":
        inner_low, inner_high = part.value
        if inner_high is None and (low or inner_low < 2):
            low, high, part = low * inner_low, None, part.parts[0]
        elif inner_low == 0 and inner_high is not None:
            low, high, part = 0, None if high is None else high * inner_high, part.parts[0]
        elif inner_low == inner_high and low == high:
            low, high, part = low * inner_low, high * inner_high, part.parts[0]
    return Lang("repeat", (low, high), (part,), low == 0, low * part.shortest)


def optional(part: Lang) -> Lang:
    """`part` or the empty string."""
    return part if part.nullable else repeat(part, 0, 1)


def both(*parts: Lang) -> Lang:
    """The strings that belong to every part (intersection). At least one part."""
    if not parts:
        raise ValueError("both() of no parts: expected at least one language")
    flat: dict[int, Lang] = {}
    for part in parts:
        for piece in part.parts if part.kind == "both" else (part,):
            if piece.is_nothing:
                return piece
            flat[id(piece)] = piece
    found = list(flat.values())
    literals = [part for part in found if part.kind in ("text", "words")]
    if len(literals) > 1:
        common = set.intersection(*({part.value} if part.kind == "text" else set(part.value) for part in literals))
        if not common:
            return nothing()
        found = [part for part in found if part.kind not in ("text", "words")] + [alt(*map(text, common))]
    sets = [part for part in found if part.kind == "bytes"]
    if len(sets) > 1:
        mask = functools.reduce(lambda a, b: a & b, (part.value for part in sets))
        if not mask:
            return nothing()
        found = [part for part in found if part.kind != "bytes"] + [_symbols(mask)]
    if len(found) == 1:
        return found[0]
    return Lang("both", (), tuple(found), all(part.nullable for part in found), max(part.shortest for part in found))


def but_not(part: Lang, excluded: Lang) -> Lang:
    """The strings of `part` that are not in `excluded`; the complement of x within a universe u is `but_not(u, x)`."""
    if part.is_nothing or excluded.is_nothing:
        return part
    if part is excluded:
        return nothing()
    if part.kind == excluded.kind == "bytes":
        return _symbols(part.value & ~excluded.value)
    return Lang("but_not", (), (part, excluded), part.nullable and not excluded.nullable, part.shortest)


def mark(number: int) -> Lang:
    """A symbol that is no byte: number 0, 1, ... `unmarked` takes marks out again; anchors of regexes are built so."""
    return Lang("bytes", 1 << NUM_BYTES + number, (), False, 0)


def unmarked(part: Lang, *, nullable: bool) -> Lang:
    """The strings of `part` with all marks taken out. The caller knows whether the empty string is then among them."""
    return Lang("unmarked", (), (part,), nullable, part.shortest)


def residues(after: Sequence[Lang], start: int = 0) -> Lang:
    """Decimal digits, also none, that go on the number `start`, then `after[r]`: the number modulo len(after) is r."""
    if not 0 <= start < len(after):
        raise ValueError(f"start={start}: expected 0 <= start < {len(after)}, the modulus")
    return Lang("residues", start, tuple(after), after[start].nullable, min(part.shortest for part in after))


def merged_ranges(ranges: Ranges) -> tuple[tuple[int, int], ...]:
    """The same integers as sorted ranges that neither overlap nor touch; both ends belong to a range."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if low > high:
            raise ValueError(f"range {low} to {high}: expected the smaller end first")
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def cut_ranges(ranges: Ranges, excluded: Ranges) -> tuple[tuple[int, int], ...]:
    """The integers of `ranges` that are not in `excluded`, both as `merged_ranges` returns them."""
    found = []
    cuts = list(excluded)
    first = 0
    for low, high in ranges:
        while first < len(cuts) and cuts[first][1] < low:
            first += 1
        i = first
        while i < len(cuts) and cuts[i][0] <= high:
            if cuts[i][0] > low:
                found.append((low, cuts[i][0] - 1))
            low = cuts[i][1] + 1
            i += 1
        if low <= high:
            found.append((low, high))
    return tuple(found)


def _symbols(mask: int) -> Lang:
    """One of the symbols in `mask`; a single byte is a text, so that it joins its neighbours."""
    if mask and not mask & mask - 1 and mask < 1 << NUM_BYTES:
        return text(bytes((mask.bit_length() - 1,)))
    return Lang("bytes", mask, (), False, 1 if 0 < mask < 1 << NUM_BYTES else 0)


def _encoded(ranges: tuple[tuple[int, int], ...], lead: int, num_tails: int, seen: dict[tuple, Lang]) -> Lang:
    """`lead` plus the bits above 6 * num_tails of each number in `ranges`, then num_tails bytes with 6 bits each."""
    key = ranges, lead, num_tails
    if key not in seen:
        size = 64**num_tails
        below: dict[int, list[tuple[int, int]]] = {}
        for low, high in ranges:
            for top in range(low // size, high // size + 1):
                base = top * size
                below.setdefault(top, []).append((max(low - base, 0), min(high - base, size - 1)))
        bytes_by_rest: dict[tuple, int] = {}
        for top, rest in below.items():
            bytes_by_rest[tuple(rest)] = bytes_by_rest.get(tuple(rest), 0) | 1 << lead + top
        seen[key] = alt(*(seq(_symbols(mask), _encoded(rest, 0x80, num_tails - 1, seen) if num_tails else epsilon())
                          for rest, mask in bytes_by_rest.items()))
    return seen[key]
