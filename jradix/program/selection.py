"""One choice among texts: what has to be scored for it, and which one wins."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from jradix.errors import RequestError
from jradix.outputs import RequestOutput
from jradix.program.parts import Select


class Selection:
    """The scoring of a `select`.

    Args:
      part: what was asked for.
      head: int32[n], tokens before the last word of the text.
      before: tokens of the last word.
      endings: tokens of the last word with each choice. All are scored from the first place where one of them leaves
        `before`: where the last word and a choice form a token, all choices answer for that word.
      start_id: what stands before a choice without context.
      alone: tokens of each choice without context, for the method that asks for them.

    Raises:
      RequestError: there is nothing before the choices, or one adds no token.

    Attributes:
      sums: log-probability of each choice, once all is scored.
      scores: by the method; with "greedy" the means.
    """

    def __init__(self, part: Select, head: np.ndarray, before: Sequence[int], endings: Sequence[Sequence[int]],
                 alone: Sequence[Sequence[int]] = (), start_id: int | None = None):
        self.endings = endings
        self._method = part.method
        start = min(_num_common(before, ending) for ending in endings)
        if len(head) + start == 0:
            raise RequestError("there is no text before the choices to judge them by; append some")
        for choice, ending in zip(part.choices, endings):
            if len(ending) <= start:
                raise RequestError(f"choice {choice!r} adds no token to the text")
        self.requests = [(np.concatenate([head, np.asarray(ending, np.int32)]), len(head) + start)
                         for ending in endings]
        if part.method == "unconditional":
            if start_id is None:
                raise RequestError('method "unconditional" needs a start or end token, and the tokenizer has neither')
            self.requests += [(np.asarray([start_id, *tokens], np.int32), 1) for tokens in alone]
        self._found: list[list[float] | None] = [None] * len(self.requests)
        self._choice_ids = [list(ending[start:]) for ending in endings]
        self.sums: list[float] = []
        self.scores: list[float] = []
        self.best = -1

    def take(self, index: int, output: RequestOutput) -> bool:
        """Takes in the score of request `index`; True when that was the last."""
        tokens, first = self.requests[index]
        self._found[index] = [output.prompt_logprobs[place][int(tokens[place])].logprob
                              for place in range(first, len(tokens))]
        if any(found is None for found in self._found):
            return False
        num = len(self.endings)
        rows = self._found[:num]
        self.sums = [sum(row) for row in rows]
        self.scores = [sum(row) / len(row) for row in rows]
        if self._method == "unconditional":
            self.scores = [(total - sum(alone)) / len(row)
                           for total, alone, row in zip(self.sums, self._found[num:], rows)]
        self.best = self._greedy(rows) if self._method == "greedy" else int(np.argmax(self.scores))
        return True

    def _greedy(self, rows: Sequence[Sequence[float]]) -> int:
        """Goes down the tree of the choices, always to the best child; one that has ended stands with its mean."""
        alive, depth = list(range(len(rows))), 0
        while len(alive) > 1:
            values: dict[int | tuple[int], float] = {}
            for i in alive:
                has_ended = depth >= len(rows[i])
                values[(i,) if has_ended else self._choice_ids[i][depth]] = (
                    self.scores[i] if has_ended else rows[i][depth])
            winner = max(values, key=values.get)
            if isinstance(winner, tuple):
                return winner[0]
            alive = [i for i in alive if depth < len(rows[i]) and self._choice_ids[i][depth] == winner]
            depth += 1
        return alive[0]


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))
