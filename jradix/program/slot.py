"""A generated or chosen part of a program's text, from the moment it is appended."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jradix.outputs import CompletionOutput
from jradix.program.parts import Gen, Select


@dataclass(slots=True, eq=False)
class Slot:
    """Where the result of a `gen` or `select` goes.

    Attributes:
      part: what was asked for.
      is_trusted: special tokens spelled in it are meant.
      text: what it added to the program's text so far.
      value: what `s[name]` gives; None while it runs, or where `problem` says why there is none.
      completion: the output of a `gen`.
      scores: score of each choice of a `select`, by which it was made.
      choice_logprobs: log-probability of each choice, summed over its tokens.
    """
    part: Gen | Select
    is_trusted: bool
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
