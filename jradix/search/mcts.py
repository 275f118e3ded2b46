"""Monte Carlo tree search over texts: select by UCT, expand, roll out in batches, back up (Kocsis and Szepesvari 2006).

All rollouts of a round run at once. What they share is computed once, and the texts of the inner nodes are pinned while
the search runs, so that no rollout pushes its own parents out of the cache.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, suppress

from jradix.errors import PinError
from jradix.program.state import State
from jradix.search.tree import SearchNode, SearchResult


def mcts(s: State, *, step: Callable[[State], object], reward: Callable[[State], float],
         is_end: Callable[[State], bool] = lambda s: False, num_rollouts: int = 32, width: int = 4, max_depth: int = 4,
         batch: int = 8, exploration: float = math.sqrt(2)) -> SearchResult:
    """Searches for the continuation of `s` with the highest reward.

    Args:
      s: the text to continue.
      step: writes one move, with a temperature above 0: `lambda s: s.__iadd__(gen("thought", stop="\\n"))`.
      reward: judges a whole rollout, best in [0, 1]. It may generate.
      is_end: nothing comes after this text.
      num_rollouts: rollouts in all.
      width: moves tried from a node.
      max_depth: moves of a rollout.
      batch: rollouts that run at once; those of a round spread out by counting as lost until they are back.
      exploration: weight of what was seldom tried against what was good.

    Returns:
      The rollout with the highest reward, and the tree, in which the way to where it began is marked. A node's score is
      the mean reward of its rollouts.

    Raises:
      ProgramError: a move could not be generated.
      ValueError: a number below 1.
    """
    for name, value in dict(num_rollouts=num_rollouts, width=width, max_depth=max_depth, batch=batch).items():
        if value < 1:
            raise ValueError(f"{name}={value}: expected a positive number")
    root = SearchNode(s.text(), s, visits=0)
    totals: dict[SearchNode, float] = {root: 0.0}
    best: tuple[float, State, SearchNode] | None = None

    def bound(node: SearchNode) -> float:
        """Upper confidence bound of a child; one that nobody visited comes first."""
        if node.visits == 0:
            return math.inf
        return totals[node] / node.visits + exploration * math.sqrt(math.log(node.parent.visits) / node.visits)

    def descend(node: SearchNode) -> SearchNode:
        """The leaf below a node that is worth most; the visit of those on the way counts at once."""
        while node.children:
            node = max(node.children, key=bound)
            node.visits += 1
        return node

    def is_open(node: SearchNode) -> bool:
        return node.depth < max_depth and not is_end(node.state)

    def write(state: State) -> None:
        step(state)
        state.text()

    def expand(node: SearchNode) -> None:
        forks = node.state.fork(width)
        forks.map(write)
        for fork in forks:
            totals[node.add(fork, visits=0)] = 0.0

    def roll_out(leaf: SearchNode) -> tuple[float, State]:
        state, depth = leaf.state.copy(), leaf.depth
        while depth < max_depth and not is_end(state):
            write(state)
            depth += 1
        return float(reward(state)), state

    with ExitStack() as pins:
        while root.visits < num_rollouts:
            num = min(batch, num_rollouts - root.visits)
            root.visits += num
            leaves = [descend(root) for _ in range(num)]
            grown = [leaf for leaf in dict.fromkeys(leaves) if is_open(leaf) and (leaf.score is not None or leaf is root)]
            for node in grown:
                with suppress(PinError):        # beyond what may be pinned, the order of eviction has to do
                    pins.enter_context(node.state.pinned())
            s.map(expand, grown)
            leaves = [descend(leaf) for leaf in leaves]
            for leaf, (result, state) in zip(leaves, s.map(roll_out, leaves)):
                if best is None or result > best[0]:
                    best = result, state, leaf
                node: SearchNode | None = leaf
                while node is not None:
                    totals[node] += result
                    node.score, node = totals[node] / node.visits, node.parent
    result, state, leaf = best
    leaf.choose()
    return SearchResult(state, result, root)
