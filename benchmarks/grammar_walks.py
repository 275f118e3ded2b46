"""Engines that follow a JSON schema byte by byte behind one small interface, and documents tried on them.

An engine compiles a schema to a `Walk`; a Walk steps from state to state over bytes. States are opaque and never
change, so that a document can be tried in several ways.
"""
from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol

from jradix.errors import GrammarError
from jradix.grammar.dfa import Dfa
from jradix.grammar.matcher import ByteWalker, MatcherSource

MAX_ORDERS = 20_000


class Walk(Protocol):
    """An automaton, or what serves as one."""
    start: Any

    def step(self, state: Any, data: bytes) -> Any | None:
        """The state after `data`; None when it is refused."""

    def accepts(self, state: Any) -> bool:
        """Whether the text may end here."""

    def same(self, state: Any) -> Hashable | None:
        """Equal for states that go on alike; None where the engine cannot tell."""


class DfaWalk:
    """Steps of a Dfa; its states are numbers."""

    def __init__(self, dfa: Dfa) -> None:
        self._dfa = dfa
        self.start = 0

    def step(self, state: int, data: bytes) -> int | None:
        found = self._dfa.walk(state, data)
        return None if found < 0 else found

    def accepts(self, state: int) -> bool:
        return bool(self._dfa.accepting[state])

    def same(self, state: int) -> Hashable:
        return state


class MatcherWalk:
    """Steps of the host matcher; a state is a walker that nobody moves any more."""

    def __init__(self, start: ByteWalker) -> None:
        self.start = start

    def step(self, state: ByteWalker, data: bytes) -> ByteWalker | None:
        moved = state.copy()
        return moved if moved.walk(data) else None

    def accepts(self, state: ByteWalker) -> bool:
        return state.is_accepting

    def same(self, state: ByteWalker) -> None:
        return None


class ReplayWalk:
    """Steps of a library whose matchers cannot be copied: a state is the text so far, read again from the start."""

    def __init__(self, reads: Callable[[bytes], tuple[bool, bool]]) -> None:
        """`reads` tells of a text whether it may begin an output and whether it may be one."""
        self._reads = reads
        self.start = b""

    def step(self, state: bytes, data: bytes) -> bytes | None:
        return state + data if self._reads(state + data)[0] else None

    def accepts(self, state: bytes) -> bool:
        return self._reads(state)[1]

    def same(self, state: bytes) -> None:
        return None


class TooManyOrders(RuntimeError):
    """A document has too many orders of keys to judge it."""


class _Left(NamedTuple):
    """Where the walk through an object stands: the state, keys still to come, keys that could have come before."""
    state: Any
    keys: frozenset[str]
    offered: frozenset[str]


class Serialiser:
    """Walks through a document, written compactly, trying orders of keys where there is a choice.

    First in line: a key that leaves all others possible is taken for good, which is quick. Where that does not succeed
    and states can be compared, all orders are tried.
    """

    def __init__(self, walk: Walk) -> None:
        self._walk, self._left = walk, MAX_ORDERS
        self._can_compare = walk.same(walk.start) is not None
        self._in_line = True

    def accepts(self, document: Any) -> bool:
        """Whether some order of keys is accepted."""
        for is_in_line in (True, False) if self._can_compare else (True,):
            self._in_line = is_in_line
            if any(map(self._walk.accepts, self._ends(document, self._walk.start))):
                return True
        return False

    def _ends(self, value: Any, state: Any) -> list[Any]:
        if isinstance(value, dict):
            return self._object_ends_in_line(value, state) if self._in_line else self._object_ends(value, state)
        if isinstance(value, list):
            states = self._steps([state], "[")
            for i, item in enumerate(value):
                states = self._steps(states, "," if i else "")
                states = self._distinct(end for one in states for end in self._ends(item, one))
            return self._steps(states, "]")
        return self._steps([state], json.dumps(value, ensure_ascii=False))

    def _object_ends(self, value: dict[str, Any], state: Any) -> list[Any]:
        seen: set[tuple[Hashable, frozenset[str]]] = set()
        stack = [[_Left(one, frozenset(value), frozenset()) for one in self._steps([state], "{")]]
        while stack:
            if not stack[-1]:
                stack.pop()
                continue
            one, left, offered = stack[-1].pop()
            follow = self._follow(one)
            if (follow, left) in seen:
                continue
            seen.add((follow, left))
            self._count()
            if not left:
                ends = self._steps([one], "}")
                if ends:
                    return ends
                continue
            started = len(left) < len(value)
            inside = self._inside([key for key in value if key in left], one, started)
            possible = frozenset(inside)
            if offered & left - possible:
                continue                        # a key was passed over, and declared keys do not come back
            choices: list[_Left] = []
            for key in reversed(inside):
                ends = self._distinct(end for one_inside in inside[key] for end in self._ends(value[key], one_inside))
                choices += [_Left(end, left - {key}, possible) for end in ends]
                if started and {self._follow(end) for end in ends} == {follow}:
                    choices = [_Left(ends[0], left - {key}, possible)]
                    break                       # it changes nothing, so it may as well come now
            stack.append(choices)
        return []

    def _object_ends_in_line(self, value: dict[str, Any], state: Any) -> list[Any]:
        left = list(value)
        states = self._steps([state], "{")
        inside = self._inside(left, states[0], False) if states else {}
        while left:
            found = None
            for key in inside:
                self._count()
                others = [other for other in left if other != key]
                for end in (end for one in inside[key] for end in self._ends(value[key], one)):
                    after = self._inside(others, end, True)
                    if inside.keys() - after.keys() <= {key}:
                        found = end, others, after
                        break
                if found:
                    break
            if not found:
                return []
            states, left, inside = [found[0]], found[1], found[2]
        return self._steps(states, "}")

    def _inside(self, keys: list[str], state: Any, started: bool) -> dict[str, list[Any]]:
        """The keys that may come now, with the states in which their values begin."""
        comma = "," if started else ""
        found = {key: self._steps([state], f"{comma}{json.dumps(key, ensure_ascii=False)}:") for key in keys}
        return {key: states for key, states in found.items() if states}

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TooManyOrders(f"more than {MAX_ORDERS} orders of keys to try")

    def _follow(self, state: Any) -> tuple[Hashable, Hashable]:
        """What counts of a state after a value: where a comma and where the end of the object lead."""
        comma, end = self._walk.step(state, b","), self._walk.step(state, b"}")
        return None if comma is None else self._walk.same(comma), None if end is None else self._walk.same(end)

    def _steps(self, states: list[Any], data: str) -> list[Any]:
        if not data:
            return states
        moved = (self._walk.step(state, data.encode("utf-8", "surrogatepass")) for state in states)
        return self._distinct(state for state in moved if state is not None)

    def _distinct(self, states: Iterable[Any]) -> list[Any]:
        if self._can_compare:
            return list({self._walk.same(state): state for state in states}.values())
        return list(states)


# Other libraries, each None where it is not installed. A library's own errors mean that it refuses the schema.

class Refused(ValueError):
    """A library does not take a schema."""


def llguidance_engine() -> Callable[[Any], Walk] | None:
    """llguidance as it reads schemas itself, without what jradix rewrites or refuses before."""
    if importlib.util.find_spec("llguidance") is None:
        return None
    import llguidance

    def compile_schema(schema: Any) -> Walk:
        try:
            text = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides=dict(whitespace_flexible=False, item_separator=",", key_separator=":"))
        except ValueError as error:         # a schema that is no object cannot take the overrides
            raise Refused(str(error)) from None
        try:
            return MatcherWalk(ByteWalker(MatcherSource(text, "json_schema")))
        except GrammarError as error:
            raise Refused(str(error)) from None

    return compile_schema


def xgrammar_engine() -> Callable[[Any], Walk] | None:
    """xgrammar over a vocabulary of the 256 bytes and an end token."""
    if importlib.util.find_spec("xgrammar") is None:
        return None
    import xgrammar

    end = 256
    vocabulary = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"</s>"], stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def compile_schema(schema: Any) -> Walk:
        try:
            grammar = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":"),
                                                   strict_mode=False)
        except (RuntimeError, ValueError) as error:
            raise Refused(str(error)) from None

        def reads(data: bytes) -> tuple[bool, bool]:
            matcher = xgrammar.GrammarMatcher(grammar)
            is_begun = not data or matcher.accept_string(data)
            return is_begun, is_begun and matcher.accept_token(end)

        return ReplayWalk(reads)

    return compile_schema


class OutlinesWalk:
    """Steps of an outlines-core index over the 256 bytes; its states are numbers."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self.start = index.get_initial_state()

    def step(self, state: int, data: bytes) -> int | None:
        for byte in data:
            state = self._index.get_next_state(state, byte)
            if state is None:
                return None
        return state

    def accepts(self, state: int) -> bool:
        return self._index.is_final_state(state)

    def same(self, state: int) -> Hashable:
        return state


def outlines_engine() -> Callable[[Any], Walk] | None:
    """outlines-core: its regex of a schema, and its index of that over bytes."""
    if importlib.util.find_spec("outlines_core") is None:
        return None
    from outlines_core import Index, Vocabulary, json_schema

    vocabulary = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})

    def compile_schema(schema: Any) -> Walk:
        try:
            return OutlinesWalk(Index(json_schema.build_regex_from_schema(json.dumps(schema), whitespace_pattern=""),
                                      vocabulary))
        except (ValueError, TypeError) as error:
            raise Refused(str(error)) from None

    return compile_schema


ENGINES = {"llguidance": llguidance_engine, "xgrammar": xgrammar_engine, "outlines-core": outlines_engine}
"""How to get the compiler of each other library."""
