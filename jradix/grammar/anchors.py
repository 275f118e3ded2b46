"""Anchors inside regular expressions, exactly: an anchor is a mark that is only valid at certain places of the text.

The expression with its marks is intersected with the strings in which every mark stands where it may; then the marks
are taken out. Where anchors are only the first and last parts of an alternative, as in most patterns, they just go.
"""
from __future__ import annotations

import functools

from jradix.grammar.language import (NUM_BYTES, Lang, alt, both, byte_set, epsilon, mark, optional, repeat, seq, text,
                                     unmarked, utf8_strings)

TEXT_START, LINE_START, TEXT_END, TEXT_END_OR_NEWLINE, LINE_END = range(5)
STARTS, ENDS = (TEXT_START, LINE_START), (TEXT_END, TEXT_END_OR_NEWLINE, LINE_END)
NEWLINE = 0x0A


def anchored_language(branches: list[list[Lang]], *, is_search: bool) -> Lang:
    """The texts that match one of the alternatives, given as the parts of each; `mark(TEXT_START)` and so on anchor.

    is_search: some part of the text matches, else all of it.
    """
    by_anchors: dict[tuple[bool, int | None], list[Lang]] = {}
    marked = []
    for items in branches:
        first, end = 0, len(items)
        while first < end and _mark_of(items[first]) == TEXT_START:
            first += 1
        last_mark = None
        while end > first and _mark_of(items[end - 1]) in (TEXT_END, TEXT_END_OR_NEWLINE):
            end -= 1
            last_mark = TEXT_END if TEXT_END in (_mark_of(items[end]), last_mark) else TEXT_END_OR_NEWLINE
        if any(map(_has_marks, items[first:end])):
            marked.append(seq(*items))
        else:
            by_anchors.setdefault((first > 0, last_mark) if is_search else (True, TEXT_END), []).append(
                seq(*items[first:end]))
    found = []
    for (is_at_start, last_mark), bodies in by_anchors.items():
        before = epsilon() if is_at_start else utf8_strings()
        after = {None: utf8_strings(), TEXT_END: epsilon(), TEXT_END_OR_NEWLINE: optional(text(b"\n"))}[last_mark]
        found.append(seq(before, alt(*bodies), after))
    if marked:
        around = utf8_strings() if is_search else epsilon()
        found.append(_resolved(seq(around, alt(*marked), around)))
    return alt(*found)


def _resolved(marked: Lang) -> Lang:
    """The strings of `marked` that respect its marks, without them. In the empty text every anchor holds."""
    return unmarked(both(marked, _valid_starts(), _valid_ends()), nullable=_is_nullable_without_marks(marked))


def _marks(*numbers: int) -> Lang:
    return repeat(alt(*map(mark, numbers)), 0, None)


@functools.cache
def _valid_starts() -> Lang:
    """Strings whose marks of STARTS are at the start of the text, or for LINE_START after a newline."""
    other = byte_set(byte for byte in range(NUM_BYTES) if byte != NEWLINE)
    after = alt(seq(other, _marks(*ENDS)), seq(byte_set((NEWLINE,)), _marks(LINE_START, *ENDS)))
    return seq(_marks(*STARTS, *ENDS), repeat(after, 0, None))


@functools.cache
def _valid_ends() -> Lang:
    """Strings whose marks of ENDS are at the end of the text, before a last newline, or for LINE_END before any."""
    newline = byte_set((NEWLINE,))
    before = alt(seq(_marks(*STARTS), byte_set(range(NUM_BYTES))), seq(_marks(*STARTS, LINE_END), newline))
    last_line = seq(_marks(*STARTS, LINE_END, TEXT_END_OR_NEWLINE), newline)
    return seq(repeat(before, 0, None), optional(last_line), _marks(*STARTS, *ENDS))


def _mark_of(part: Lang) -> int | None:
    """The number of the mark, when the part is one mark and nothing else."""
    is_mark = part.kind == "bytes" and part.value >> NUM_BYTES and not part.value & part.value - 1
    return part.value.bit_length() - 1 - NUM_BYTES if is_mark else None


def _in_order(lang: Lang) -> list[Lang]:
    """All nodes of an expression, each once, parts first."""
    order: dict[int, Lang] = {}
    stack = [(lang, False)]
    while stack:
        node, is_ready = stack.pop()
        if is_ready:
            order.setdefault(id(node), node)
        elif id(node) not in order:
            stack.append((node, True))
            stack.extend((part, False) for part in node.parts)
    return list(order.values())


def _has_marks(lang: Lang) -> bool:
    return any(node.kind == "bytes" and node.value >> NUM_BYTES for node in _in_order(lang))


def _is_nullable_without_marks(lang: Lang) -> bool:
    """Whether the empty text belongs, with every mark taken as empty."""
    nullable: dict[int, bool] = {}
    for node in _in_order(lang):
        parts = [nullable[id(part)] for part in node.parts]
        if node.kind == "bytes":
            nullable[id(node)] = bool(node.value >> NUM_BYTES)
        elif node.kind == "seq":
            nullable[id(node)] = all(parts)
        elif node.kind == "alt":
            nullable[id(node)] = any(parts)
        else:
            nullable[id(node)] = node.nullable or any(parts)
    return nullable[id(lang)]
