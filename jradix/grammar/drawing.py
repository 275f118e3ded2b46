"""An automaton drawn: SVG for a notebook, DOT for Graphviz. Lays out what `drawn_graph.py` joins; reads only.

States are circles, double where the text may end, in breadth-first layers from left to right. Text without a choice is
coloured. A large automaton is shown in part, the states nearest to its start, and the picture says so.
"""
from __future__ import annotations

import itertools
from html import escape
from typing import NamedTuple

import numpy as np

from jradix.grammar.dfa import Dfa
from jradix.grammar.drawn_graph import DrawnEdge, DrawnGraph, drawn_graph, edge_label, num_cells

MAX_LABEL_CELLS, MAX_TITLE_CELLS = 30, 300
_FORCED_COLOR = "#0072b2"
# Sizes of the SVG in its own units. A cell of an 11-unit monospace font is 6.6 wide; a little more is kept for others.
_MARGIN, _ROW, _RADIUS, _CELL, _LANE, _MIN_GAP = 14, 58, 12, 6.8, 20, 44
# An image has no page whose colour it could take. Within a page the SVG is not the root, so this matches nothing there.
_STYLE = "svg:root{color:#1f2328}@media (prefers-color-scheme:dark){svg:root{color:#e6edf3}}"

class _Point(NamedTuple):
    x: float
    y: float


def automaton_svg(dfa: Dfa, *, max_states: int = 60) -> str:
    """The automaton as SVG, best put into a notebook's HTML output.

    Inside a page it takes the text colour around it; shown as an image of its own it follows the reader's light or dark
    setting. It loads nothing.

    Args:
      max_states: circles at most.

    Raises:
      ValueError: max_states below 1.
    """
    graph = drawn_graph(dfa, max_states)
    summary = f"automaton of {dfa.num_states:,} states, {int(dfa.accepting.sum()):,} of them may end the text"
    if not dfa.num_states:
        return note_svg([summary, "no text at all belongs to this grammar"])
    lines = [summary]
    if graph.num_joined < dfa.num_states:
        lines.append(f"{graph.num_joined:,} when text without a choice and the bytes of a character are joined")
    if len(graph.layer) < graph.num_joined:
        lines.append(f"{len(graph.layer):,} of {graph.num_joined:,} are drawn, the nearest to the start; "
                     f"{graph.num_joined - len(graph.layer):,} are left out, draw(max_states=...) shows more")
    return _Picture(dfa, graph, lines).svg()


def note_svg(lines: list[str]) -> str:
    """Lines of text in the place of a drawing; the first is its title."""
    parts = [_text(_MARGIN, _MARGIN + 8 + 18 * i, line, "" if i else 'font-weight="bold"')
             for i, line in enumerate(lines)]
    width = 2 * _MARGIN + _CELL * max(map(num_cells, lines))
    return _document(width, 2 * _MARGIN + 18 * len(lines), lines[0], parts)


def to_dot(dfa: Dfa, *, max_states: int = 60) -> str:
    """The same picture in the language of Graphviz.

    Raises:
      ValueError: max_states below 1.
    """
    graph = drawn_graph(dfa, max_states)
    lines = ["digraph automaton {", "  rankdir=LR;", '  start [shape=point, label=""];', "  start -> 0;"]
    for state in graph.layer:
        lines.append(f"  {state} [shape={'doublecircle' if dfa.accepting[state] else 'circle'}];")
    for edge in graph.edges:
        label = "".join(piece for piece, _ in edge_label(edge, MAX_LABEL_CELLS))
        label = label.replace("\\", "\\\\").replace('"', '\\"')
        color = f', color="{_FORCED_COLOR}", fontcolor="{_FORCED_COLOR}"' if edge.is_forced else ""
        lines.append(f'  {edge.source} -> {edge.target} [label="{label}"{color}];')
    for state, count in graph.num_beyond.items():
        lines += [f'  beyond_{state} [shape=plaintext, label="{count:,} not drawn"];',
                  f"  {state} -> beyond_{state} [style=dashed];"]
    return "\n".join([*(lines if dfa.num_states else lines[:2]), "}"])


class _Picture:
    """Places of states, edges and labels. Owns the boxes that labels have taken."""

    def __init__(self, dfa: Dfa, graph: DrawnGraph, lines: list[str]) -> None:
        self._dfa, self._graph, self._lines = dfa, graph, lines
        self._labels = [edge_label(edge, MAX_LABEL_CELLS) for edge in graph.edges]
        self._lanes = self._lanes_of_long_edges()
        above = 1 + max((lane for lane in self._lanes.values() if lane > 0), default=0)
        below = 1 + max((-lane for lane in self._lanes.values() if lane < 0), default=0)
        columns: list[list[int]] = [[] for _ in range(1 + max(graph.layer.values()))]
        for state, layer in graph.layer.items():
            columns[layer].append(state)
        self._top = 2 * _MARGIN + 18 * len(lines) + above * _LANE
        self._bottom = self._top + _ROW * (max(map(len, columns)) - 1) + 2 * _RADIUS + 16
        self._places = self._placed(columns)
        self._height = self._bottom + below * _LANE + 30
        widest = max(place.x for place in self._places.values()) + _RADIUS + 90
        self._width = max(widest, 2 * _MARGIN + _CELL * max(map(num_cells, lines)), 420) + _MARGIN
        self._taken: list[tuple[float, float, float]] = []      # left, right and height of labels

    def svg(self) -> str:
        """The whole drawing."""
        parts = [_text(_MARGIN, _MARGIN + 8 + 18 * i, line, "" if i else 'font-weight="bold"')
                 for i, line in enumerate(self._lines)]
        start = self._places[0]
        parts.append(_arrow(f"M{start.x - _RADIUS - 20:.1f} {start.y:.1f}H{start.x - _RADIUS - 5:.1f}",
                            _Point(start.x - _RADIUS, start.y), (1, 0), False))
        for i, edge in enumerate(self._graph.edges):
            parts += self._edge(i, edge)
        for state, place in self._places.items():
            parts += self._state(state, place)
        parts += _legend(self._height - 14)
        return _document(self._width, self._height, self._lines[0], parts)

    def _placed(self, columns: list[list[int]]) -> dict[int, _Point]:
        """Layer by layer; in each, states in the order of those that lead to them."""
        places: dict[int, _Point] = {}
        sources: dict[int, list[int]] = {}
        for edge in self._graph.edges:
            sources.setdefault(edge.target, []).append(edge.source)
        gaps, x = self._gaps(len(columns)), _MARGIN + 20.0 + _RADIUS
        middle = (self._top + self._bottom - 2 * _RADIUS - 16) / 2 + _RADIUS
        for i, column in enumerate(columns):
            x += gaps[i]
            height = {state: float(np.mean([places[s].y for s in sources.get(state, ()) if s in places] or [middle]))
                      for state in column}
            for row, state in enumerate(sorted(column, key=height.__getitem__)):
                places[state] = _Point(x, middle + _ROW * (row - (len(column) - 1) / 2))
            x += 2 * _RADIUS
        return places

    def _gaps(self, num_layers: int) -> list[float]:
        """Room before each layer: for the labels of edges into it, and for half of those over a single state."""
        into, over = [0.0] + [_MIN_GAP] * (num_layers - 1), [0.0] * (num_layers + 1)
        for edge, label in zip(self._graph.edges, self._labels):
            width = sum(num_cells(shown) for shown, _ in label) * _CELL
            first, second = self._graph.layer[edge.source], self._graph.layer[edge.target]
            if second == first + 1:
                into[second] = max(into[second], width + 26)
            elif second == first:
                over[first] = max(over[first], width)
        return [max(into[i], (over[i] / 2 + (over[i - 1] / 2 if i else 0) - _RADIUS) if i else over[0] / 2 - 40)
                for i in range(num_layers)]

    def _lanes_of_long_edges(self) -> dict[int, int]:
        """Of edges to other layers than the next: lanes above (1, 2, ...) for those ahead, else below (-1, ...)."""
        lanes: dict[int, int] = {}
        taken: dict[int, list[tuple[int, int]]] = {}
        spans = [(sorted((self._graph.layer[edge.source], self._graph.layer[edge.target])), i)
                 for i, edge in enumerate(self._graph.edges)]
        for (low, high), i in sorted(spans, key=lambda span: (span[0][1] - span[0][0], span[1])):
            ahead = self._graph.layer[self._graph.edges[i].target] == high
            if low == high or (ahead and high == low + 1):
                continue
            for lane in itertools.count(1):
                others = taken.setdefault(lane if ahead else -lane, [])
                if all(high <= other_low or other_high <= low for other_low, other_high in others):
                    others.append((low, high))
                    lanes[i] = lane if ahead else -lane
                    break
        return lanes

    # The SVG of one state, one edge

    def _state(self, state: int, place: _Point) -> list[str]:
        circle = '<circle cx="{:.1f}" cy="{:.1f}" r="{}" fill="none" stroke="currentColor" stroke-width="1.3"/>'
        radii = [_RADIUS, _RADIUS - 3] if self._dfa.accepting[state] else [_RADIUS]
        parts = [circle.format(place.x, place.y, radius) for radius in radii]
        size = 8 if state < 1000 else 6
        parts.append(_text(place.x, place.y, str(state), f'text-anchor="middle" font-size="{size}"'))
        if state in self._graph.num_beyond:
            parts.append(f'<path d="M{place.x + _RADIUS:.1f} {place.y:.1f}l14 12" fill="none" stroke="currentColor" '
                         'stroke-dasharray="3 2"/>')
            parts.append(_text(place.x + _RADIUS + 16, place.y + 14, f"{self._graph.num_beyond[state]:,} not drawn",
                               'opacity="0.65" font-style="italic"'))
        return parts

    def _edge(self, i: int, edge: DrawnEdge) -> list[str]:
        source, target = self._places[edge.source], self._places[edge.target]
        corners, direction = self._corners(i, edge, source, target)
        a, b, c, d = corners
        path = f"M{a.x:.1f} {a.y:.1f}C{b.x:.1f} {b.y:.1f} {c.x:.1f} {c.y:.1f} {d.x:.1f} {d.y:.1f}"
        label = self._labels[i]
        half = sum(num_cells(shown) for shown, _ in label) * _CELL / 2
        for share in (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74):
            at = _on_curve(corners, share)
            if not any(left < at.x + half and at.x - half < right and abs(y - at.y) < 12
                       for left, right, y in self._taken):
                break
        else:
            at = _on_curve(corners, 0.5)
        self._taken.append((at.x - half, at.x + half, at.y))
        full = "".join(shown for shown, _ in edge_label(edge, MAX_TITLE_CELLS))
        shown = "".join(f'<tspan fill="{_FORCED_COLOR}">{escape(piece)}</tspan>' if is_forced else escape(piece)
                        for piece, is_forced in label)
        return ["<g>", f"<title>{escape(f'{edge.source} to {edge.target}: {full}')}</title>",
                _arrow(path, d, direction, edge.is_forced),
                f'<text x="{at.x:.1f}" y="{at.y - 4:.1f}" text-anchor="middle" style="white-space:pre">{shown}</text>',
                "</g>"]

    def _corners(self, i: int, edge: DrawnEdge, source: _Point, target: _Point
                 ) -> tuple[tuple[_Point, _Point, _Point, _Point], tuple[int, int]]:
        """A Bezier curve, and the direction in which it arrives."""
        if edge.source == edge.target:
            y = source.y - _RADIUS
            return (_Point(source.x - 5, y + 1), _Point(source.x - 16, y - 24), _Point(source.x + 16, y - 24),
                    _Point(source.x + 5, y + 1)), (0, 1)
        lane = self._lanes.get(i, 0)
        if lane:
            side = -1 if lane > 0 else 1
            y = (self._top - _RADIUS if lane > 0 else self._bottom) - lane * _LANE * 4 / 3
            return (_Point(source.x, source.y + side * _RADIUS), _Point(source.x, y), _Point(target.x, y),
                    _Point(target.x, target.y + side * _RADIUS)), (0, -side)
        if self._graph.layer[edge.source] == self._graph.layer[edge.target]:
            x = source.x + _RADIUS
            return (_Point(x, source.y), _Point(x + 26, source.y), _Point(x + 26, target.y),
                    _Point(x, target.y)), (-1, 0)
        left, right = source.x + _RADIUS, target.x - _RADIUS
        middle = (left + right) / 2
        return (_Point(left, source.y), _Point(middle, source.y), _Point(middle, target.y),
                _Point(right, target.y)), (1, 0)


def _on_curve(corners: tuple[_Point, ...], share: float) -> _Point:
    rest = 1 - share
    weights = (rest**3, 3 * rest**2 * share, 3 * rest * share**2, share**3)
    return _Point(sum(w * p.x for w, p in zip(weights, corners)), sum(w * p.y for w, p in zip(weights, corners)))


def _arrow(path: str, tip: _Point, direction: tuple[int, int], is_forced: bool) -> str:
    color = _FORCED_COLOR if is_forced else "currentColor"
    dx, dy = direction
    head = (f"M{tip.x:.1f} {tip.y:.1f}L{tip.x - 7 * dx - 3 * dy:.1f} {tip.y - 7 * dy - 3 * dx:.1f}"
            f"L{tip.x - 7 * dx + 3 * dy:.1f} {tip.y - 7 * dy + 3 * dx:.1f}Z")
    return (f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{1.8 if is_forced else 1}" opacity="0.7"/>'
            f'<path d="{head}" fill="{color}"/>')


def _legend(y: float) -> list[str]:
    ring = f'<circle cx="{{}}" cy="{y:.1f}" r="{{}}" fill="none" stroke="currentColor"/>'
    x, parts = _MARGIN + 6, []
    parts += [ring.format(x, 6), ring.format(x, 3.5), _text(x + 12, y, "the text may end", 'opacity="0.65"')]
    x += 150
    parts.append(_arrow(f"M{x} {y:.1f}h20", _Point(x + 24, y), (1, 0), True))
    parts.append(_text(x + 32, y, "no choice", 'opacity="0.65"'))
    return parts


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" style="white-space:pre" {attributes}>{escape(text)}</text>'


def _document(width: float, height: float, title: str, parts: list[str]) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" fill="currentColor" font-size="11" '
        'font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>", *parts, "</svg>"])
