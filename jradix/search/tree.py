"""The tree that a search leaves behind, and its pictures."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

from jradix.cache.explain import visible
from jradix.program.state import State

_COLUMN, _ROW, _MARGIN, _CHARS, _CELL = 230, 26, 10, 26, 7.4
_WON, _TRIED = "#1a7f37", "#8c959f"


@dataclass(slots=True, eq=False, repr=False)
class SearchNode:
    """A text that the search looked at.

    Attributes:
      text: what it adds to its parent's text.
      state: the whole text, to be read or gone on from.
      score: the higher the better; None where it was not judged.
      visits: how often the search went through it.
      is_chosen: it lies on the way to the answer.
    """
    text: str
    state: State
    score: float | None = None
    visits: int = 1
    is_chosen: bool = False
    parent: SearchNode | None = None
    children: list[SearchNode] = field(default_factory=list)

    def add(self, state: State, score: float | None = None, visits: int = 1) -> SearchNode:
        """A child whose text goes on from this one's."""
        text = state.text().removeprefix(self.state.text())
        child = SearchNode(text, state, score, visits, parent=self)
        self.children.append(child)
        return child

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    def choose(self) -> None:
        """Marks the way to this node."""
        node: SearchNode | None = self
        while node is not None:
            node.is_chosen, node = True, node.parent

    def walk(self) -> Iterator[SearchNode]:
        """This node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def label(self, num_chars: int) -> str:
        """Score, visits and the beginning of the text, on one line."""
        text = visible(" ".join(self.text.split()))
        text = text if len(text) <= num_chars else text[:num_chars - 1] + "…"
        facts = "" if self.score is None else f"{self.score:.3g} "
        return facts + (f"×{self.visits} " if self.visits > 1 else "") + text

    def __repr__(self) -> str:
        return f"SearchNode({self.label(48)!r}, {len(self.children)} children)"

    def __str__(self) -> str:
        return "\n".join("  " * node.depth + ("* " if node.is_chosen else "- ") + node.label(72) for node in self.walk())

    def svg(self) -> str:
        """The tree from left to right as SVG text; the chosen way is marked."""
        places: dict[int, tuple[float, float]] = {}
        num_rows = _place(self, 0, places)
        width = _MARGIN * 2 + _COLUMN * (1 + max(node.depth for node in self.walk()))
        shapes = []
        for node in self.walk():
            x, y = places[id(node)]
            color = _WON if node.is_chosen else _TRIED
            if node.parent is not None:
                px, py = places[id(node.parent)]
                middle = x - 20
                shapes.append(f'<path d="M{px + _CHARS * _CELL:.0f} {py:.0f}C{middle} {py:.0f} {middle} {y:.0f} '
                              f'{x - 4} {y:.0f}" stroke="{color}" fill="none"/>')
            shapes.append(f'<text x="{x}" y="{y + 4:.0f}" fill="{color}">{escape(node.label(_CHARS))}'
                          f'<title>{escape(visible(node.text))}</title></text>')
        height = 2 * _MARGIN + _ROW * num_rows
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" '
                f'font-size="12">{"".join(shapes)}</svg>')

    def _repr_html_(self) -> str:
        return self.svg()


def _place(node: SearchNode, row: int, places: dict[int, tuple[float, float]]) -> int:
    """Puts a node beside the middle of its children; returns the first row below them."""
    below = row
    for child in node.children:
        below = _place(child, below, places)
    below = max(below, row + 1)
    ys = [places[id(child)][1] for child in (node.children[:1] + node.children[-1:])]
    y = sum(ys) / len(ys) if ys else _MARGIN + _ROW * (row + 0.5)
    places[id(node)] = _MARGIN + _COLUMN * node.depth, y
    return below


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Attributes:
      best: the text that won.
      score: its score.
      tree: all that was tried.
      answer: of `self_consistency`, the answer with most votes.
    """
    best: State
    score: float
    tree: SearchNode
    answer: Any = None
