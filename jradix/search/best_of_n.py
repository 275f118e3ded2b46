"""Best of n: several continuations of one text, the one with the highest score."""
from __future__ import annotations

from collections.abc import Callable

from jradix.program.state import State
from jradix.search.tree import SearchNode, SearchResult


def best_of_n(s: State, n: int, step: Callable[[State], object], score: Callable[[State], float]) -> SearchResult:
    """Continues `s` in `n` ways at once and takes the best.

    Args:
      s: the text to continue; its tokens are computed once.
      n: number of ways.
      step: writes one way: `lambda s: s.assistant(gen("answer", temperature=1.0))`.
      score: judges it, the higher the better. It may generate: all n are judged at once.

    Raises:
      ProgramError: a way could not be generated.
    """
    forks = s.fork(n)

    def run(fork: State) -> float:
        step(fork)
        fork.text()
        return float(score(fork))

    scores = forks.map(run)
    root = SearchNode(s.text(), s)
    nodes = [root.add(fork, value) for fork, value in zip(forks, scores)]
    best = max(nodes, key=lambda node: node.score)
    best.choose()
    return SearchResult(best.state, best.score, root)
