"""Which rows of a step read a common prefix together: groups found on the tree paths that the rows hold locked."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jradix.cache.node import Node
from jradix.config import SharingCost
from jradix.sched.plan import SharedRows, StepPlan


class _Place(NamedTuple):
    """A node of the tree with the rows below it, while groups are sought."""
    num_pages: int
    rows: list[int]
    children: list[Node]


def shared_rows(plan: StepPlan, cost: SharingCost, page_size: int) -> list[SharedRows]:
    """The groups of rows that save most, each row in at most one.

    Candidates are the decode rows, and in a short step all rows, whose tokens are queries of their own. Of a node and
    the nodes below it the better choice is taken, from the leaves up; a row's own new tokens are never in a prefix.
    """
    rows = plan.rows if plan.is_short else plan.rows[:plan.num_decode]
    places, roots = _places([row.request.lease.node for row in rows])
    if not places:
        return []
    weights = [row.num_tokens for row in rows]
    best: dict[Node, tuple[float, list[SharedRows]]] = {}
    for node in reversed(places):               # children stand after their parents
        place = places[node]
        num_pages = min(place.num_pages, min(rows[i].start for i in place.rows) // page_size)
        gain = cost.gain(sum(weights[i] for i in place.rows), num_pages * page_size)
        below = sum(best[child][0] for child in place.children)
        if gain > max(below, 0) and len(place.rows) > 1:
            best[node] = gain, [SharedRows(num_pages, place.rows)]
        else:
            best[node] = below, [group for child in place.children for group in best[child][1]]
    return [group for root in roots for group in best[root][1]]


def _places(nodes: Sequence[Node | None]) -> tuple[dict[Node, _Place], list[Node]]:
    """All nodes that at least two rows hold, parents before children, and the roots among them."""
    rows_of: dict[Node, list[int]] = {}
    for i, node in enumerate(nodes):
        while node is not None:
            rows_of.setdefault(node, []).append(i)
            node = node.parent
    places: dict[Node, _Place] = {}
    roots: list[Node] = []

    def place(node: Node) -> _Place:
        chain = []
        while node is not None and node not in places:
            chain.append(node)
            node = node.parent
        above = places[node] if node is not None else None
        for one in reversed(chain):
            found = _Place((above.num_pages if above else 0) + one.num_pages, rows_of[one], [])
            if above is None:
                roots.append(one)
            else:
                above.children.append(one)
            places[one] = above = found
        return places[chain[0]] if chain else above

    for node, held in rows_of.items():
        if len(held) > 1 and node.parent is not None:
            place(node)
    return places, roots
