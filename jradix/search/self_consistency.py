"""Self-consistency: several ways of reasoning, and the answer that most of them reach (Wang et al. 2022)."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

from jradix.program.state import State
from jradix.search.tree import SearchNode, SearchResult


def self_consistency(s: State, n: int, step: Callable[[State], object], answer: Callable[[State], Hashable]
                     ) -> SearchResult:
    """Continues `s` in `n` ways at once and takes the answer with most votes, the earliest among equals.

    Args:
      s: the question; its tokens are computed once.
      n: number of ways.
      step: writes one way of reasoning, with a temperature above 0.
      answer: the answer in it; None is no vote.

    Returns:
      The result with `answer`; each node's score is the share of votes its answer got.

    Raises:
      ProgramError: a way could not be generated.
      ValueError: none of them has an answer.
    """
    forks = s.fork(n)

    def run(fork: State) -> Hashable:
        step(fork)
        fork.text()
        return answer(fork)

    answers = forks.map(run)
    votes = Counter(each for each in answers if each is not None)
    if not votes:
        raise ValueError(f"none of {n} ways has an answer; look at what `step` writes and what `answer` finds in it")
    winner = max(votes, key=votes.get)
    root = SearchNode(s.text(), s)
    nodes = [root.add(fork, votes[each] / n if each is not None else None) for fork, each in zip(forks, answers)]
    best = nodes[answers.index(winner)]
    best.choose()
    return SearchResult(best.state, best.score, root, winner)
