"""The prefix cache drawn: its tree as text for a terminal and as SVG for a notebook. Reads only.

A large tree is shown in part. Which part is decided from the top: the node with the most pages below it is opened next,
until the limits are reached; what stays hidden is counted in a last line of its parent. Cost: one pass over the nodes
that have KV for the counts, then work for the nodes shown.
"""
from __future__ import annotations

import heapq
import unicodedata
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

import numpy as np

from jradix.cache.explain import (DEVICE_COLOR, HOST_COLOR, NAMESPACE_WORDS, NUM_LEAD_TOKENS, Decode, duration,
                                  texts_after, visible)
from jradix.cache.node import Namespace, Node, Tier
from jradix.cache.prefix_cache import PrefixCache

COLUMNS = ("tokens", "pages", "refs", "hits", "age", "tier")
NUM_EDGE_TOKENS = 48      # decoded of an edge: more than fit into its line

_TOKEN_BYTES = 4
# Sizes of the SVG in its own units. A cell of a 12-unit monospace font is 7.2 wide; a little more is kept for others.
_ROW, _INDENT, _MARGIN, _CELL, _BAR = 22, 18, 12, 7.4, 60
_COLUMN_WIDTHS = (68, 60, 48, 56, 60, 60)
# An image has no page whose colour it could take. Within a page the SVG is not the root, so this matches nothing there.
_STYLE = "svg:root{color:#1f2328}@media (prefers-color-scheme:dark){svg:root{color:#e6edf3}}"


class _Row(NamedTuple):
    """One line of the picture.

    Attributes:
      branches: per level from the root's children down, whether that ancestor (or the row itself) is the last child.
      parent: index of the parent's row; None for a namespace.
      label: text of the edge, name of the namespace, or the count of what is hidden.
      columns: values of COLUMNS; all empty for a count of hidden nodes.
      num_pages: pages of the whole subtree, hidden ones included.
      node: None for a count of hidden nodes.
    """
    branches: tuple[bool, ...]
    parent: int | None
    label: str
    columns: tuple[str, ...]
    num_pages: int
    node: Node | None


def tree_text(cache: PrefixCache, decode: Decode | None = None, *, max_depth: int = 6, max_children: int = 8,
              max_nodes: int = 100, max_cells: int = 48) -> str:
    """The tree of a cache in lines of text, with tokens, pages, references, hits, time since the last use and tier.

    Args:
      decode: ids to text, special tokens included; None: edges show their ids.
      max_depth: levels of nodes below a namespace.
      max_children: children shown of one node; also namespaces shown.
      max_nodes: nodes shown in all.
      max_cells: width of an edge's text in character cells.

    Raises:
      ValueError: a limit below 1.
    """
    rows = _rows(cache, decode, max_depth, max_children, max_nodes, max_cells)
    lines = [_summary(cache)]
    if not rows:
        return lines[0]
    labels = [_rails(row.branches) + row.label for row in rows]
    width = max(map(_num_cells, labels))
    sizes = [max(len(name), *(len(row.columns[i]) for row in rows)) for i, name in enumerate(COLUMNS)]
    for label, columns in [("", COLUMNS), *((label, row.columns) for label, row in zip(labels, rows))]:
        values = "  ".join(value.rjust(size) for value, size in zip(columns, sizes))
        lines.append(f"{label}{' ' * (width - _num_cells(label))}  {values}".rstrip())
    return "\n".join(lines)


def tree_svg(cache: PrefixCache, decode: Decode | None = None, *, max_depth: int = 6, max_children: int = 8,
             max_nodes: int = 60, max_cells: int = 48) -> str:
    """The tree of a cache as SVG, best put into a notebook's HTML output; arguments as of `tree_text`.

    Inside a page it takes the text colour around it; shown as an image of its own it follows the reader's light or dark
    setting. It loads nothing.
    """
    rows = _rows(cache, decode, max_depth, max_children, max_nodes, max_cells)
    depth = max((len(row.branches) for row in rows), default=0)
    label_width = (max((_num_cells(row.label) for row in rows), default=0) + 1) * _CELL
    bar_x = _MARGIN + depth * _INDENT + 14 + label_width
    edges = [bar_x + _BAR + sum(_COLUMN_WIDTHS[:i + 1]) for i in range(len(COLUMNS))]
    width = max(edges[-1] if rows else 0, (_num_cells(_summary(cache)) + 2) * _CELL) + _MARGIN
    height = _MARGIN + _ROW * (1 + (len(rows) + 2 if rows else 0)) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" style="max-width:100%;height:auto" fill="currentColor" font-size="12" '
        'font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace">',
        f"<title>prefix cache</title><style>{_STYLE}</style>",
        _text(_MARGIN, _middle(-1), _summary(cache), 'font-weight="bold"')]
    if rows:
        parts += [_text(x, _middle(0), name, 'text-anchor="end" opacity="0.65"') for x, name in zip(edges, COLUMNS)]
        parts.append(_text(bar_x, _middle(0), "share", 'opacity="0.65"'))
        parts += _connectors(rows)
        most = max(sum(row.num_pages for row in rows if row.parent is None), 1)
        for i, row in enumerate(rows):
            parts += _svg_row(row, _middle(i + 1), label_width, bar_x, edges, most)
        parts += _legend(_middle(len(rows) + 1))
    return "\n".join([*parts, "</svg>"])


# -- what is shown


def _rows(cache: PrefixCache, decode: Decode | None, max_depth: int, max_children: int, max_nodes: int, max_cells: int
          ) -> list[_Row]:
    for name, value in dict(max_depth=max_depth, max_children=max_children, max_nodes=max_nodes,
                            max_cells=max_cells).items():
        if value < 1:
            raise ValueError(f"{name}={value!r}: expected 1 or more")
    totals = _totals(cache)
    roots = {root: namespace for namespace, root in cache.tree.roots.items() if root.children}
    shown_roots = heapq.nlargest(max_children, roots, key=lambda root: totals[root][1])
    shown = _opened(shown_roots, totals, max_depth, max_children, max_nodes)
    now = cache.clock()
    rows: list[_Row] = []
    # A node, or (number, pages) of hidden ones; its branches; its parent's row. Last in, first out.
    todo: list[tuple[Node | tuple[int, int], tuple[bool, ...], int | None]] = []
    hidden = [totals[root] for root in roots.keys() - set(shown_roots)]
    if hidden:
        todo.append(((len(hidden), sum(pages for _, pages in hidden)), (), None))
    todo += [(root, (), None) for root in reversed(shown_roots)]
    while todo:
        item, branches, parent = todo.pop()
        if isinstance(item, tuple):
            number, pages = item
            what = "" if branches else " namespace" if number == 1 else " namespaces"
            label = f"+ {number:,} more{what}, {pages:,} {'page' if pages == 1 else 'pages'}"
            rows.append(_Row(branches, parent, label, ("",) * len(COLUMNS), pages, None))
            continue
        num_nodes, num_pages = totals[item]
        label = _namespace_label(roots[item]) if item.parent is None else _edge_label(item, decode, max_cells)
        here = len(rows)
        rows.append(_Row(branches, parent, label, _columns(item, num_pages, now), num_pages, item))
        children: list[Node | tuple[int, int]] = [*shown.get(item, ())]
        rest_nodes = num_nodes - (item.parent is not None) - sum(totals[child][0] for child in children)
        if rest_nodes:
            children.append((rest_nodes, num_pages - item.num_pages - sum(totals[child][1] for child in children)))
        todo += [(child, (*branches, i == 0), here) for i, child in enumerate(reversed(children))]
    return rows


def _totals(cache: PrefixCache) -> dict[Node, tuple[int, int]]:
    """Nodes and pages of each subtree, the node itself included; roots have no page and do not count."""
    totals: dict[Node, tuple[int, int]] = {root: (0, 0) for root in cache.tree.roots.values()}
    order = list(cache.tree.nodes())
    for node in reversed(order):
        num_nodes, num_pages = totals.get(node, (0, 0))
        totals[node] = num_nodes + 1, num_pages + node.num_pages
        above = totals.get(node.parent, (0, 0))
        totals[node.parent] = above[0] + num_nodes + 1, above[1] + num_pages + node.num_pages
    return totals


def _opened(roots: Iterable[Node], totals: dict[Node, tuple[int, int]], max_depth: int, max_children: int,
            max_nodes: int) -> dict[Node, list[Node]]:
    """The children to show of each node shown, those with the most pages below first."""
    shown: dict[Node, list[Node]] = {}
    heap = [(-totals[root][1], root.serial, root, 0) for root in roots]
    heapq.heapify(heap)
    num_nodes = 0
    while heap and num_nodes < max_nodes:
        _, _, node, depth = heapq.heappop(heap)
        if node.parent is not None:
            shown.setdefault(node.parent, []).append(node)
            num_nodes += 1
        if depth < max_depth and node.children:
            for child in heapq.nlargest(max_children, node.children.values(), key=lambda child: totals[child][1]):
                heapq.heappush(heap, (-totals[child][1], child.serial, child, depth + 1))
    return shown


def _columns(node: Node, num_pages: int, now: float) -> tuple[str, ...]:
    if node.parent is None:
        return "", f"{num_pages:,}", f"{node.lock_count:,}", "", "", ""
    return (f"{len(node.key) // _TOKEN_BYTES:,}", f"{node.num_pages:,}", f"{node.lock_count:,}", f"{node.hits:,}",
            duration(max(now - node.used_s, 0.0)), node.tier.name.lower())


def _summary(cache: PrefixCache) -> str:
    tree, state = cache.tree, "" if cache.enabled else ", prefix caching is off"
    num_device, num_host = tree.num_evictable_pages + tree.num_locked_pages, tree.num_host_pages
    if not num_device and not num_host:
        return f"prefix cache: empty, {cache.num_pages:,} pages of {tree.page_size:,} tokens{state}"
    host = f", {num_host:,} more in host memory" if num_host else ""
    return (f"prefix cache: {num_device:,} of {cache.num_pages:,} pages of {tree.page_size:,} tokens, "
            f"{tree.num_locked_pages:,} of them in use or pinned{host}{state}")


def _namespace_label(namespace: Namespace) -> str:
    parts = [f"{NAMESPACE_WORDS[name]} {value!r}" for name, value, default in
             zip(Namespace._fields, namespace, Namespace()) if value != default]
    return _shortened(visible("namespace " + ", ".join(parts) if parts else "default namespace"), 72)


def _edge_label(node: Node, decode: Decode | None, max_cells: int) -> str:
    """The beginning of an edge's text in quotes, or its ids."""
    tokens = _ids(node.key[:NUM_EDGE_TOKENS * _TOKEN_BYTES])
    is_cut = len(node.key) > NUM_EDGE_TOKENS * _TOKEN_BYTES
    text = ""
    if decode is not None:
        _, (text,) = texts_after(decode, _ids(_bytes_before(node)), tokens)
    if not text:      # no decoder, or all of the edge is inside one character
        return _shortened(" ".join(map(str, tokens)) + (" …" if is_cut else ""), max_cells)
    return f'"{_shortened(visible(text) + ("…" if is_cut else ""), max_cells)}"'


def _bytes_before(node: Node) -> bytes:
    """The last few tokens on the way to a node, its own left out."""
    before, above = b"", node.parent
    while above is not None and len(before) < NUM_LEAD_TOKENS * _TOKEN_BYTES:
        before, above = above.key[-NUM_LEAD_TOKENS * _TOKEN_BYTES:] + before, above.parent
    return before


def _ids(key: bytes) -> list[int]:
    return np.frombuffer(key, ">i4").tolist()


# -- how wide it is


def _num_cells(text: str) -> int:
    """Cells of a monospace font, two for wide characters and none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _shortened(text: str, max_cells: int) -> str:
    if _num_cells(text) <= max_cells:
        return text
    kept, cells = [], 1
    for c in text:
        cells += _num_cells(c)
        if cells > max_cells:
            break
        kept.append(c)
    return "".join(kept).removesuffix("…") + "…"


def _rails(branches: tuple[bool, ...]) -> str:
    if not branches:
        return ""
    above = "".join("   " if is_last else "│  " for is_last in branches[:-1])
    return above + ("└─ " if branches[-1] else "├─ ")


# -- SVG


def _middle(row: int) -> float:
    """Height of the middle of a row; row -1 is the summary, row 0 the heads of the columns."""
    return _MARGIN + _ROW * (row + 1.5)


def _node_x(row: _Row) -> float:
    return _MARGIN + 5 + len(row.branches) * _INDENT


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" style="white-space:pre" {attributes}>{escape(text)}</text>'


def _connectors(rows: list[_Row]) -> list[str]:
    lines = []
    for i, row in enumerate(rows):
        if row.parent is not None:
            x, y = _node_x(rows[row.parent]), _middle(row.parent + 1)
            lines.append(f"M{x:.1f} {y + 5:.1f}V{_middle(i + 1):.1f}H{_node_x(row) - 5:.1f}")
    return [f'<path d="{"".join(lines)}" fill="none" stroke="currentColor" opacity="0.35"/>']


def _svg_row(row: _Row, y: float, label_width: float, bar_x: float, edges: list[float], most: int) -> list[str]:
    x = _node_x(row)
    left = _MARGIN if row.parent is None else x + 10
    # A viewport of its own cuts a label off at its end, should a font be wider than expected.
    viewport = (f'<svg x="{left:.1f}" y="{y - _ROW / 2:.1f}" width="{bar_x - left - 4:.1f}" height="{_ROW}" '
                'overflow="hidden">')
    style = 'opacity="0.65" font-style="italic"' if row.node is None else (
        'font-weight="bold"' if row.parent is None else "")
    parts = [f"{viewport}{_text(0, _ROW / 2, row.label, style)}</svg>"]
    if row.node is not None and row.parent is not None:
        parts.append(_marker(x, y, row.node.tier, row.node.lock_count > 0))
    parts += [_text(edge, y, value, 'text-anchor="end"') for edge, value in zip(edges, row.columns) if value]
    width = max((_BAR - 8) * row.num_pages / most, 1)
    parts.append(f'<rect x="{bar_x:.1f}" y="{y - 4:.1f}" width="{width:.1f}" height="8" rx="1" opacity="0.45"/>')
    return parts


def _marker(x: float, y: float, tier: Tier, is_held: bool) -> str:
    color = HOST_COLOR if tier is Tier.HOST else DEVICE_COLOR
    fill = color if is_held else "none"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{color}" stroke-width="2"/>'


def _legend(y: float) -> list[str]:
    parts, x = [], _MARGIN + 5.0
    for tier, is_held, words in ((Tier.DEVICE, True, "in use or pinned"), (Tier.DEVICE, False, "on the device"),
                                 (Tier.HOST, False, "in host memory")):
        parts += [_marker(x, y, tier, is_held), _text(x + 10, y, words, 'opacity="0.65"')]
        x += 10 + (len(words) + 2) * _CELL
    return parts
