"""The states that a fork made, as a list that can be joined."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jradix.program.state import State


class Forks(list):
    """States that went on from one text, in order."""

    def __init__(self, parent: State, states: list[State]):
        super().__init__(states)
        self._parent = parent

    def map(self, function: Callable[[State], Any]) -> list[Any]:
        """`s.map(function, forks)`."""
        return self._parent.map(function, self)

    def join(self) -> None:
        """Waits for all of them and gathers what they named: `s["x"]` becomes the list of their values of "x".

        Raises:
          ProgramError: one of them failed.
        """
        self._parent.gather(self)
