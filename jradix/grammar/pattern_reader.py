"""A regular expression that is being read: the position in it, and errors that name it."""
from __future__ import annotations

from typing import NoReturn

from jradix.errors import GrammarError, GrammarUnsupported

SHOWN_PATTERN = 80      # characters of a long pattern that an error quotes


class PatternReader:
    """The pattern and how far it is read.

    Attributes:
      pattern: the expression.
      at: position of the next character.
      is_ecma: whether it is read by the rules of ECMAScript instead of Python's.
    """

    def __init__(self, pattern: str, *, is_ecma: bool) -> None:
        self.pattern = pattern
        self.at = 0
        self.is_ecma = is_ecma

    @property
    def is_at_end(self) -> bool:
        """Whether all is read."""
        return self.at >= len(self.pattern)

    def peek(self, count: int = 1) -> str:
        """The next `count` characters, fewer at the end."""
        return self.pattern[self.at:self.at + count]

    def take(self, sign: str) -> bool:
        """Steps over `sign` where it comes next."""
        is_there = self.pattern.startswith(sign, self.at)
        self.at += len(sign) if is_there else 0
        return is_there

    def take_until(self, sign: str, start: int, what: str) -> str:
        """The text up to `sign`, and steps over both; an error about `what`, begun at `start`, where there is none."""
        end = self.pattern.find(sign, self.at)
        if end < 0:
            self.fail(f"the {what} that begins here is not closed: add `{sign}`", start)
        found = self.pattern[self.at:end]
        self.at = end + len(sign)
        return found

    def escaped(self, start: int) -> str:
        """The character after the `\\` at `start`, without stepping over it."""
        if self.is_at_end:
            self.fail("`\\` at the end of the pattern: write `\\\\` for the character", start)
        return self.pattern[self.at]

    def refuse(self, construct: str, position: int) -> NoReturn:
        """Raises the error about a construct that is understood and not supported.

        It is GrammarUnsupported by ECMAScript's rules, those of JSON schemas: another engine may follow the schema.
        """
        self.fail(f"{construct} is not supported in the constraint of an output; write the expression without it",
                  position, GrammarUnsupported if self.is_ecma else GrammarError)

    def fail(self, message: str, position: int, error: type[GrammarError] = GrammarError) -> NoReturn:
        """Raises an error with the pattern and the position."""
        shown = self.pattern if len(self.pattern) <= SHOWN_PATTERN else f"{self.pattern[:SHOWN_PATTERN]}..."
        raise error(f"regex {shown!r}, position {position}: {message}")
