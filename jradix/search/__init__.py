"""Searches over texts, small enough to read and to copy: each returns the tree it searched, with scores."""
from __future__ import annotations

from jradix.search.beam import beam
from jradix.search.best_of_n import best_of_n
from jradix.search.mcts import mcts
from jradix.search.self_consistency import self_consistency
from jradix.search.tree import SearchNode, SearchResult

__all__ = ["SearchNode", "SearchResult", "beam", "best_of_n", "mcts", "self_consistency"]
