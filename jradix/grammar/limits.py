"""The limits within which a grammar is turned into an automaton: counts only, never wall time."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class GrammarLimits:
    """What the compilation of one grammar may use; beyond it, `GrammarTooLarge`. The same input always has one verdict.

    Attributes:
      max_states: states of the automaton; 65,535 marks a rejected transition in the device tables.
      max_work: steps of the construction. One step touches an element of a state; making a term or a state counts as
        many, about one per 16 bytes that stay allocated, so that this bounds the memory as well.
      max_table_bytes: bytes of the largest table.
      max_depth: how often a recursive definition is unrolled.
    """
    max_states: int = 65_000
    max_work: int = 20_000_000
    max_table_bytes: int = 1 << 30
    max_depth: int = 5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name}={value!r}: expected an integer >= 1")
        if self.max_states > 65_534:
            raise ValueError(f"max_states={self.max_states}: expected at most 65,534: states are 16-bit numbers")
