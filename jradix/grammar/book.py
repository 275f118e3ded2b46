"""The grammars of an engine: compiled once per source, placed in the device's arena while requests use them."""
from __future__ import annotations

from collections import OrderedDict
from typing import Any, Mapping

from jradix.grammar.compiler import Grammar, compile_grammar
from jradix.grammar.table_pool import ArenaSize, TablePool
from jradix.grammar.token_dfa import TokenTables, build_token_tables
from jradix.grammar.vocabulary import Vocabulary

MAX_COMPILED = 512     # grammars kept compiled, the least recently used go first


class Constraint:
    """One request on its way through a grammar.

    The scheduler acquires it when the request starts to run, tells it each token, and releases it when the request
    leaves; the way it has gone stays.
    """
    __slots__ = ("grammar", "_tables", "_key", "_pool", "_state", "_first_state")

    def __init__(self, grammar: Grammar, tables: TokenTables, key: str, pool: TablePool):
        self.grammar = grammar
        self._tables = tables
        self._key = key
        self._pool = pool
        self._state = 0
        self._first_state: int | None = None      # of the grammar in the arena; None while it is not acquired

    def try_acquire(self) -> bool:
        """Puts the grammar into the arena and holds it there; False while others need the space.

        Raises:
          GrammarTooLarge: the arena could never hold it.
        """
        assert self._first_state is None, "acquired twice"
        placement = self._pool.try_acquire(self._key, self._tables)
        if placement is None:
            return False
        self._first_state = placement.state_start
        return True

    def release(self) -> None:
        if self._first_state is not None:
            self._pool.release(self._key)
            self._first_state = None

    def advance(self, token: int) -> None:
        """Goes on by a token that the grammar allows in its present state."""
        self._state = self._tables.advance(self._state, token)

    @property
    def engine(self) -> str:
        return self.grammar.engine

    @property
    def device_state(self) -> int:
        """Where the request stands, as a state of the device's arena."""
        return self._first_state + self._state


class GrammarBook:
    """Compiles grammars and keeps account of the arena.

    Args:
      vocabulary: of the model's head.
      size: of the arena.
    """

    def __init__(self, vocabulary: Vocabulary, size: ArenaSize):
        self.num_compiled = 0
        self._vocabulary = vocabulary
        self._size = size
        self._compiled: OrderedDict[str, tuple[Grammar, TokenTables]] = OrderedDict()
        self.reset()

    def reset(self) -> None:
        """Forgets what the arena holds, because the device has forgotten it."""
        self.pool = TablePool(self._size, self._vocabulary.num_words)

    def constraint(self, key: str, sources: Mapping[str, Any]) -> Constraint:
        """A constraint at the start of a grammar.

        Args:
          key: equal for equal sources.
          sources: arguments of `compile_grammar`.

        Raises:
          GrammarError: the grammar cannot be used.
        """
        found = self._compiled.get(key)
        if found is None:
            grammar = compile_grammar(**sources)
            found = grammar, build_token_tables(grammar.dfa, self._vocabulary)
            self.pool.check_size(found[1])      # before it is kept: what is kept can always be acquired some day
            self._compiled[key] = found
            self.num_compiled += 1
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return Constraint(*found, key, self.pool)
