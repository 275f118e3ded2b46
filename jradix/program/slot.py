"""A generated or chosen part of a program's text, from the moment it is appended; and tokens encoded when needed."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jradix.outputs import CompletionOutput
from jradix.program.parts import Gen, Select


@dataclass(slots=True, eq=False)
class Slot:
    """Where the result of a `gen` or `select` goes.

    Attributes:
      part: what was asked for.
      text: what it added to the program's text so far.
      value: what `s[name]` gives; None while it runs, or where `problem` says why there is none.
      completion: the output of a `gen`.
      scores: score of each choice of a `select`, by which it was made.
      choice_logprobs: log-probability of each choice, summed over its tokens.
    """
    part: Gen | Select
    text: str = ""
    is_done: bool = False
    value: Any = None
    problem: str | None = None
    completion: CompletionOutput | None = None
    scores: dict[str, float] | None = None
    choice_logprobs: dict[str, float] | None = None

    @property
    def title(self) -> str:
        """The part as an error names it."""
        kind = "gen" if isinstance(self.part, Gen) else "select"
        return f"{kind}({self.part.name!r})"


class TokenRun:
    """Tokens of a program's text. Shared by all its forks and never changed."""

    def __init__(self, make: Callable[[], list[int]]):
        self._make = make

    @cached_property
    def ids(self) -> np.ndarray:
        """int32[n], encoded at the first look."""
        return np.asarray(self._make(), np.int32)
