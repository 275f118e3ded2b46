"""The grammars of an engine: compiled once per source, and followed by its requests.

A grammar is compiled in a process beside the engine's, so that other requests go on meanwhile; the requests that want
it wait. What it becomes is the same wherever and whenever it is compiled.
"""
from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, Mapping, Protocol

import numpy as np

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.compile_pool import CompilePool
from jradix.grammar.compiler import Grammar, compile_grammar
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.matcher import Matcher, MatcherPool
from jradix.grammar.table_pool import ArenaSize, TablePool
from jradix.grammar.table_store import TableStore
from jradix.grammar.token_dfa import TokenTables
from jradix.grammar.vocabulary import Vocabulary

MAX_COMPILED = 512        # grammars kept compiled, the least recently used go first
MAX_WORKERS = 4
GRAMMAR_STARTS = ("tables", "matcher")
# Compiled on the spot where the engine has nothing else to do: about 0.1 s, less than a process takes to start.
SMALL = GrammarLimits(max_work=200_000, max_states=3_000)


class Follower(Protocol):
    """How one request follows its compiled grammar."""
    forced_token: int
    needs_token: bool
    is_accepting: bool
    is_finished: bool
    device_state: int

    def try_acquire(self) -> bool: ...

    def release(self) -> None: ...

    def advance(self, token: int) -> None: ...

    def mask(self) -> np.ndarray | None: ...


class TableFollower:
    """A state of the tables on the device, known to the host one step later."""

    def __init__(self, tables: TokenTables, key: str, pool: TablePool, *, jumps: bool):
        self._tables = tables
        self._key = key
        self._pool = pool
        self._jumps = jumps
        self._state = 0
        self._first_state: int | None = None      # of the grammar in the arena; None while it is not acquired

    def try_acquire(self) -> bool:
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
        self._state = self._tables.advance(self._state, token)

    def mask(self) -> None:
        return None

    @property
    def forced_token(self) -> int:
        return int(self._tables.forced_token[self._state]) if self._jumps else -1

    @property
    def needs_token(self) -> bool:
        return self._jumps and bool(self._tables.may_jump[self._state] or self._tables.forced_token[self._state] >= 0)

    @property
    def is_accepting(self) -> bool:
        return bool(self._tables.accepting[self._state])

    @property
    def is_finished(self) -> bool:
        return bool(self._tables.is_end[self._state])

    @property
    def device_state(self) -> int:
        return self._first_state + self._state


class MatcherFollower:
    """A matcher on the host, whose mask goes along with every step."""
    forced_token = -1
    needs_token = True
    device_state = 0        # of no grammar: the mask is the row's own

    def __init__(self, matcher: Matcher, stop_ids: frozenset[int]):
        self._matcher = matcher
        self._stop_ids = stop_ids
        self.advance = matcher.advance

    def try_acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass

    def mask(self) -> np.ndarray:
        """Stop tokens are allowed exactly where the text may end, as the device does it for its tables."""
        words = self._matcher.mask()
        if self._stop_ids:
            changed = words.copy()
            for token in self._stop_ids:
                bit = np.uint32(1) << np.uint32(token // len(words))
                place = token % len(words)
                changed[place] = changed[place] | bit if self._matcher.is_accepting else changed[place] & ~bit
            words = changed if changed.any() else words
        return words

    @property
    def is_accepting(self) -> bool:
        return self._matcher.is_accepting

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_finished


class Constraint:
    """One request on its way through a grammar, which may still be in the making.

    The scheduler acquires it when the request starts to run, tells it each token, and releases it when the request
    leaves; the way it has gone stays.

    Attributes:
      error: why the grammar cannot be used; None while that is not known, or when it can.
    """
    __slots__ = ("error", "engine", "jumps", "must_end", "stop_ids", "follower")

    def __init__(self, *, jumps: bool, must_end: bool, stop_ids: frozenset[int]) -> None:
        self.error: GrammarError | None = None
        self.engine: str | None = None
        self.jumps = jumps
        self.must_end = must_end
        self.stop_ids = stop_ids
        self.follower: Follower | None = None

    @property
    def is_ready(self) -> bool:
        return self.follower is not None

    @property
    def forced_token(self) -> int:
        return self.follower.forced_token

    @property
    def needs_token(self) -> bool:
        return self.follower.needs_token

    @property
    def is_accepting(self) -> bool:
        return self.follower.is_accepting

    @property
    def is_finished(self) -> bool:
        return self.follower.is_finished

    @property
    def device_state(self) -> int:
        """Where the request stands, as a state of the device's arena."""
        return self.follower.device_state

    def try_acquire(self) -> bool:
        """Holds what the grammar needs on the device; False while others need the space."""
        return self.follower.try_acquire()

    def release(self) -> None:
        if self.follower is not None:
            self.follower.release()

    def advance(self, token: int) -> None:
        """Goes on by a token that the grammar allows in its present state."""
        self.follower.advance(token)

    def mask(self) -> np.ndarray | None:
        """uint32[W], planar bits of the tokens allowed next; None where the device's tables say it."""
        return self.follower.mask()


class GrammarBook:
    """Compiles grammars, keeps them, and keeps account of the arena.

    Args:
      vocabulary: of the model's head.
      size: of the arena.
      num_workers: processes that compile; 0: the engine's own, which then holds everything up.
      start: "tables": a request waits until its grammar is compiled, so that its tokens are always the same;
        "matcher": it starts at once on the matcher where that is possible.
      cache_folder: where the workers' tables are kept between runs; None: nowhere.
    """

    def __init__(self, vocabulary: Vocabulary, size: ArenaSize, *, num_workers: int | None = None,
                 start: str = "tables", cache_folder: Path | None = None):
        self.num_compiled = 0
        self._vocabulary = vocabulary
        self._size = size
        self._start = start
        if num_workers is None:
            num_workers = min(max((os.cpu_count() or 2) - 1, 1), MAX_WORKERS)
        store = None if cache_folder is None else TableStore(cache_folder)
        self._workers = CompilePool(vocabulary, num_workers=num_workers, store=store) if num_workers else None
        self._matchers = MatcherPool(vocabulary)
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._waiting: dict[str, list[Constraint]] = {}       # by grammar in work, who wants it
        self.reset()

    @property
    def num_in_work(self) -> int:
        return len(self._waiting)

    def reset(self) -> None:
        """Forgets what the arena holds, because the device has forgotten it."""
        self.pool = TablePool(self._size, self._vocabulary.num_words)

    def constraint(self, sources: Mapping[str, Any], *, jumps: bool = True, must_end: bool = False,
                   stop_ids: frozenset[int] = frozenset(), is_idle: bool = False) -> Constraint:
        """A constraint at the start of a grammar; `poll` makes it ready where the grammar has to be compiled first.

        Args:
          sources: arguments of `compile_grammar`.
          jumps: it names forced tokens.
          must_end: a grammar that allows texts of any length is an error.
          stop_ids: tokens that end the output, beside the end tokens.
          is_idle: nothing else waits for the engine, so that a small grammar may be compiled here and now.

        Raises:
          GrammarError: the grammar cannot be used, where that is known at once.
        """
        key, constraint = repr(sources), Constraint(jumps=jumps, must_end=must_end, stop_ids=stop_ids)
        grammar = self._find(key)
        if grammar is None and key not in self._waiting:
            grammar = self._compile_now(key, sources, is_idle)
        if grammar is None:
            if key not in self._waiting:
                self._workers.submit(key, sources)
            quick = self._quick(sources) if self._start == "matcher" else None
            if quick is None:
                self._waiting.setdefault(key, []).append(constraint)
                return constraint
            self._waiting.setdefault(key, [])
            grammar = quick
        self._make_ready(constraint, key, grammar)
        if constraint.error is not None:
            raise constraint.error
        return constraint

    def check(self, sources: Mapping[str, Any], *, must_end: bool = False) -> None:
        """Raises the GrammarError of a grammar that cannot be used; waits until that is known."""
        constraint = self.constraint(sources, must_end=must_end, is_idle=True)
        while not constraint.is_ready:
            if constraint.error is not None:
                raise constraint.error
            self.wait(1.0)
            self.poll()

    def poll(self) -> bool:
        """Takes in what the workers have done; True when constraints became ready or failed."""
        finished = self._workers.take_finished() if self._waiting else ()
        for key, found in finished:
            waiting = self._waiting.pop(key)
            if isinstance(found, Grammar):
                try:
                    self._keep(key, found)
                except GrammarError as error:
                    found = error
            for constraint in waiting:
                if isinstance(found, Grammar):
                    self._make_ready(constraint, key, found)
                else:
                    constraint.error = found
        return bool(finished)

    def wait(self, timeout_s: float) -> None:
        """Blocks until a worker has finished a grammar, or for so long."""
        self._workers.wait(timeout_s)

    def close(self) -> None:
        """Ends the workers."""
        if self._workers is not None:
            self._workers.close()

    def _find(self, key: str) -> Grammar | None:
        grammar = self._compiled.get(key)
        if grammar is not None:
            self._compiled.move_to_end(key)
        return grammar

    def _compile_now(self, key: str, sources: Mapping[str, Any], is_idle: bool) -> Grammar | None:
        """The grammar if it is compiled in this process: always without workers, else a small one at an idle time."""
        if self._workers is None:
            grammar = compile_grammar(**sources, vocabulary=self._vocabulary)
        elif not is_idle or self._start == "matcher" or not _is_automatic(sources):
            return None
        else:
            try:
                grammar = compile_grammar(**{**sources, "engine": "dfa"}, vocabulary=self._vocabulary, limits=SMALL)
            except GrammarTooLarge:
                return None
        self._keep(key, grammar)
        return grammar

    def _quick(self, sources: Mapping[str, Any]) -> Grammar | None:
        """The grammar on the matcher, where that can follow it."""
        try:
            grammar = compile_grammar(**{**sources, "engine": "matcher"}, vocabulary=self._vocabulary)
            self._matchers.check(grammar.matcher)
        except GrammarError:
            return None
        return grammar

    def _keep(self, key: str, grammar: Grammar) -> None:
        """Raises GrammarTooLarge for tables that could never be placed, so that what is kept can be acquired."""
        if grammar.tables is not None:
            self.pool.check_size(grammar.tables)
        else:
            self._matchers.check(grammar.matcher)
        self._compiled[key] = grammar
        self.num_compiled += 1
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)

    def _make_ready(self, constraint: Constraint, key: str, grammar: Grammar) -> None:
        constraint.engine = grammar.engine
        if constraint.must_end and (grammar.dfa is None or grammar.dfa.longest() is None):
            constraint.error = GrammarError('max_tokens="enough": the grammar allows texts of any length, or is not '
                                            "followed by an automaton; give max_tokens a number")
        elif grammar.tables is not None:
            constraint.follower = TableFollower(grammar.tables, key, self.pool, jumps=constraint.jumps)
        else:
            constraint.follower = MatcherFollower(self._matchers.start(grammar.matcher), constraint.stop_ids)


def _is_automatic(sources: Mapping[str, Any]) -> bool:
    """False where the matcher is asked for, or nothing else can follow the grammar."""
    return (not {"grammar", "structural_tag"} & set(sources) and sources.get("max_depth", 0) is not None
            and sources.get("engine", "auto") == "auto")
