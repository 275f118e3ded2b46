"""What a drawing of an automaton shows: its states with text without a choice and the bytes of characters joined.

It places nothing; `drawing.py` does.
"""
from __future__ import annotations

import itertools
import math
import unicodedata
from typing import NamedTuple

import numpy as np

from jradix.grammar.dfa import Dfa

LISTED_CHARACTERS = 512       # characters of more bytes than one that are told apart in a label

_ASCII, _BEYOND_ASCII = 0x80, 0x110000 - 0x800 - 0x80

Way = tuple[bytes, ...]
"""What leads from one state to another: for each byte of the text, the values it may have."""
Spans = list[tuple[str, bool]]
"""Pieces of a label, and whether nothing else could stand there."""


class DrawnEdge(NamedTuple):
    """All ways between two drawn states. `is_forced`: the only one there is, with one text, and no end beside it."""
    source: int
    target: int
    ways: list[Way]
    is_forced: bool


class DrawnGraph(NamedTuple):
    """What is drawn.

    Attributes:
      layer: distance from the start in edges of each drawn state, in the order in which they were found.
      edges: between drawn states.
      num_beyond: of drawn states, how many states that are not drawn they lead to.
      num_joined: states there would be if all were drawn.
    """
    layer: dict[int, int]
    edges: list[DrawnEdge]
    num_beyond: dict[int, int]
    num_joined: int


def drawn_graph(dfa: Dfa, max_states: int) -> DrawnGraph:
    """The states nearest to the start, at most so many, and the edges between them. Raises ValueError below 1."""
    if max_states < 1:
        raise ValueError(f"max_states={max_states!r}: expected 1 or more")
    if not dfa.num_states:
        return DrawnGraph({}, [], {}, 0)
    is_hidden = _hidden_states(dfa)
    layer, edges, num_beyond = {0: 0}, [], {}
    order = [0]
    for state in order:                                 # grows while it is read
        found = _ways(dfa, state, is_hidden)
        every_way = [way for ways in found.values() for way in ways]
        is_forced = (not dfa.accepting[state] and len(every_way) == 1
                     and all(len(values) == 1 for values in every_way[0]))
        for target, ways in found.items():
            if target not in layer and len(order) < max_states:
                layer[target] = layer[state] + 1
                order.append(target)
            if target in layer:
                edges.append(DrawnEdge(state, target, ways, is_forced))
            else:
                num_beyond[state] = num_beyond.get(state, 0) + 1
    return DrawnGraph(layer, edges, num_beyond, int((~is_hidden).sum()))


def _hidden_states(dfa: Dfa) -> np.ndarray:
    """bool[Q]: inside a character, or in the midst of text without a choice."""
    class_sizes = np.bincount(dfa.byte_class, minlength=dfa.num_classes)
    leads = dfa.next_state >= 0
    num_out = leads @ class_sizes
    _, classes = np.nonzero(leads)
    num_in = np.bincount(dfa.next_state[leads], class_sizes[classes], dfa.num_states)
    is_rest = np.zeros(dfa.num_classes, bool)           # classes of bytes that continue a character, and no others
    is_rest[dfa.byte_class[_ASCII:0xC0]] = True
    is_rest[dfa.byte_class[:_ASCII]] = is_rest[dfa.byte_class[0xC0:]] = False
    is_inside = ~(leads & ~is_rest).any(axis=1)
    is_hidden = ~dfa.accepting & (is_inside | ((num_in == 1) & (num_out == 1)))
    is_hidden[0] = False
    return is_hidden


def _ways(dfa: Dfa, state: int, is_hidden: np.ndarray) -> dict[int, list[Way]]:
    """The states to be drawn that follow `state`, each with the ways to it; the lowest bytes first."""
    found: dict[int, list[Way]] = {}
    todo: list[tuple[int, list[bytes]]] = [(state, [])]
    while todo:
        at, way = todo.pop()
        row = dfa.next_state[at][dfa.byte_class]
        targets, first = np.unique(row, return_index=True)
        steps = [(int(target), bytes(np.flatnonzero(row == target).astype(np.uint8)))
                 for target in targets[np.argsort(first)] if target >= 0]
        for i, (target, values) in reversed(list(enumerate(steps))):
            longer = [*way, values] if i else way       # a long text without a choice is not copied at each byte
            if not i:
                longer.append(values)
            if is_hidden[target]:
                todo.append((target, longer))
            else:
                found.setdefault(target, []).append(tuple(longer))
    return dict(sorted(found.items(), key=lambda pair: min(way[0][0] for way in pair[1])))


def edge_label(edge: DrawnEdge, max_cells: int) -> Spans:
    """What may be written on the way: characters as `Dfa.expected` shows them, then texts; cut at `max_cells`."""
    ways = [_characters(way) for way in edge.ways]
    spans: Spans = [(name, edge.is_forced) for name in _names([way[0] for way in ways if len(way) == 1])]
    for way in ways:
        if len(way) > 1:
            spans += ([(", ", False)] if spans else []) + _text_spans(way, edge.is_forced)
    return _shortened(spans, max_cells)


def _characters(way: Way) -> list[Way]:
    """The way character by character; for text that is no UTF-8, bytes that continue nothing go with those before."""
    found: list[list[bytes]] = []
    for values in way:
        if found and _ASCII <= values[0] < 0xC0 and found[-1][0][0] >= _ASCII:
            found[-1].append(values)
        else:
            found.append([values])
    return [tuple(character) for character in found]


def _names(characters: list[Way]) -> list[str]:
    """Runs of characters, and in words what would be too many; one text, or none."""
    beyond = sum(math.prod(map(len, character)) for character in characters if character[0][0] >= _ASCII)
    listed: list[int] = []
    others: list[str] = []
    for character in characters:
        if character[0][0] >= _ASCII and beyond > LISTED_CHARACTERS:
            continue
        for values in itertools.product(*character):
            shown = bytes(values).decode("utf-8", errors="backslashreplace")
            if len(shown) == 1:
                listed.append(ord(shown))
            else:
                others.append(f"byte {shown}")
    runs: list[list[int]] = []
    for point in sorted(listed):
        if runs and runs[-1][1] == point - 1:
            runs[-1][1] = point
        else:
            runs.append([point, point])
    names: list[str] = []
    for low, high in runs:
        points = [low, high] if high - low > 1 else range(low, high + 1)
        shown = [f"'{_visible(chr(point))}'" for point in points]
        names += [" to ".join(shown)] if high - low > 1 else shown
    names += others
    if beyond > LISTED_CHARACTERS:
        names.append("a character beyond ASCII" if beyond == _BEYOND_ASCII else f"{beyond:,} characters beyond ASCII")
    return [", ".join(names)] if names else []


def _text_spans(way: list[Way], is_forced: bool) -> Spans:
    """Texts in quotes, the first character apart where there was a choice, and characters that vary in brackets."""
    spans: Spans = []
    is_open = False
    for i, character in enumerate(way):
        is_fixed = all(len(values) == 1 for values in character)
        if is_fixed != is_open:
            spans.append(("'", is_forced or i > 0))
            is_open = is_fixed
        if is_fixed:
            shown = _visible(b"".join(character).decode("utf-8", errors="backslashreplace"))
            spans.append((shown, is_forced or i > 0))
        else:
            spans.append((f"[{_names([character])[0]}]", False))
    return [*spans, ("'", spans[-1][1])] if is_open else spans


def _visible(text: str) -> str:
    """`text` on one line: unprintable characters as escapes, and the backslash doubled."""
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)


def _shortened(spans: Spans, max_cells: int) -> Spans:
    """Neighbours of one kind joined, and cut where they are too wide."""
    joined: Spans = []
    for is_forced, group in itertools.groupby(spans, key=lambda span: span[1]):
        joined.append(("".join(shown for shown, _ in group), is_forced))
    if sum(num_cells(shown) for shown, _ in joined) <= max_cells:
        return joined
    kept, cells = [], 1
    for shown, is_forced in joined:
        fitting = ""
        for c in shown:
            cells += num_cells(c)
            if cells > max_cells:
                return [*kept, (fitting + "…", is_forced)]
            fitting += c
        kept.append((fitting, is_forced))
    return kept


def num_cells(text: str) -> int:
    """Cells of a monospace font, two for wide characters and none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
