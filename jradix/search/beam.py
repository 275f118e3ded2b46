"""Beam search over tokens. The beams share the pages of what they have in common: the cache knows it by the tokens."""
from __future__ import annotations

from jradix.program.parts import gen
from jradix.program.state import State
from jradix.sampling_params import MAX_LOGPROBS
from jradix.search.tree import SearchNode, SearchResult


def beam(s: State, *, width: int = 4, max_tokens: int = 32, length_penalty: float = 1.0) -> SearchResult:
    """The continuation with the highest log-probability that a beam of this width finds.

    A beam that ends with an end token of the model leaves the search with its score; the search is over when as many
    have ended as it is wide and no running one can still beat them, or at `max_tokens`.

    Args:
      s: the text to continue.
      width: beams kept, 1 to 10.
      max_tokens: of a continuation.
      length_penalty: a score is the log-probability over the number of tokens to this power (Wu et al. 2016 without
        the constants, as in transformers).

    Raises:
      ValueError: a width out of its range.
      ProgramError: a token could not be generated.
    """
    if not 1 <= width <= MAX_LOGPROBS // 2:
        raise ValueError(f"width={width}: expected 1 to {MAX_LOGPROBS // 2}")
    root = SearchNode(s.text(), s, 0.0)
    beams = [(0.0, 0, root)]                   # log-probability, tokens, node
    ended: list[tuple[float, SearchNode]] = []

    def score(logprob: float, num_tokens: int) -> float:
        return logprob / num_tokens ** length_penalty

    def next_tokens(beam: tuple[float, int, SearchNode]) -> dict[int, float]:
        probe = beam[2].state.copy()
        probe += gen("token", max_tokens=1, temperature=0.0, logprobs=2 * width)
        return {token: each.logprob for token, each in probe.logprobs("token")[0].items()}

    for _ in range(max_tokens):
        found = s.map(next_tokens, beams)
        candidates = sorted(((logprob + more, token, num + 1, node)
                             for (logprob, num, node), tokens in zip(beams, found) for token, more in tokens.items()),
                            key=lambda each: -each[0])
        beams = []
        for logprob, token, num, node in candidates[:2 * width]:
            if token in s.llm.end_token_ids:
                node.children.append(SearchNode("<end>", node.state, score(logprob, num), parent=node))
                ended.append((score(logprob, num), node.children[-1]))
            elif len(beams) < width:
                state = node.state.copy()
                state.append_token_ids([token])
                beams.append((logprob, num, node.add(state, score(logprob, num))))
        ended = sorted(ended, key=lambda each: -each[0])[:width]
        if not beams or len(ended) == width and ended[-1][0] >= score(*beams[0][:2]):
            break
    best, node = max([*ended, *((score(logprob, num), node) for logprob, num, node in beams)],
                     key=lambda each: each[0])
    node.choose()
    return SearchResult(node.state, best, root)
