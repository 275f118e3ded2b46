"""The byte automaton of a language: small arrays, every state reachable and alive. Knows no tokens."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.language import NUM_BYTES, Lang
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.merging import distances_to_end, equal_states
from jradix.grammar.subsets import Row, Subsets

REJECT = -1
EXPLORED_PER_STATE = 1.5    # how many states may be found for each one of the limit: most automata shrink to a half
SHOWN_BYTES = 40        # how much forced text an explanation quotes


@dataclass(frozen=True)
class Refusal:
    """Why a text is refused.

    Attributes:
      byte: where, in bytes of the UTF-8 form; the length of the text when it ends too early.
      char: the same in characters.
      message: one sentence: where, what was found there and what was expected.
    """
    byte: int
    char: int
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, eq=False)
class Dfa:
    """A deterministic automaton over bytes. State 0 is the start; from every state acceptance can be reached.

    The empty language, where it was allowed, has no states at all.

    Attributes:
      byte_class: uint8[256], the class of each byte; bytes of one class behave alike in every state.
      next_state: int32[Q, K], where class k leads from state q; -1 rejects.
      accepting: bool[Q], whether the text may end in state q.
    """
    byte_class: np.ndarray
    next_state: np.ndarray
    accepting: np.ndarray

    @property
    def num_states(self) -> int:
        """Q."""
        return self.next_state.shape[0]

    @property
    def num_classes(self) -> int:
        """K."""
        return self.next_state.shape[1]

    def walk(self, state: int, data: bytes | str) -> int:
        """The state after `data`, begun in `state`; -1 as soon as it is refused."""
        if not self.num_states:
            return REJECT
        step = self.next_state.item
        for byte_class in _utf8(data).translate(self.byte_class.tobytes()):
            state = step(state, byte_class)
            if state < 0:
                return REJECT
        return state

    def accepts(self, data: bytes | str) -> bool:
        """Whether the whole of `data` belongs to the language."""
        state = self.walk(0, data)
        return state >= 0 and bool(self.accepting[state])

    def longest(self) -> int | None:
        """Bytes of the longest accepted text; None when there is no longest. Takes time proportional to Q * K."""
        targets = [[int(state) for state in np.unique(row) if state >= 0] for row in self.next_state]
        num_ways_in = [0] * self.num_states
        for row in targets:
            for state in row:
                num_ways_in[state] += 1
        depth, order = [0] * self.num_states, [state for state, count in enumerate(num_ways_in) if not count]
        for state in order:                             # grows while it is read
            for target in targets[state]:
                depth[target] = max(depth[target], depth[state] + 1)
                num_ways_in[target] -= 1
                if not num_ways_in[target]:
                    order.append(target)
        return max(depth) if len(order) == self.num_states else None

    def shortest_example(self) -> bytes:
        """One of the shortest accepted texts, printable where the first choice allows. Raises for an empty language."""
        if not self.num_states:
            raise GrammarError("unsatisfiable: no text belongs to this grammar, so there is no example of one")
        preference = [*range(0x61, 0x7B), *range(0x30, 0x3A), *range(0x21, 0x7F), *range(NUM_BYTES)]
        bytes_in_order = sorted({int(self.byte_class[byte]): byte for byte in reversed(preference)}.items(),
                                key=lambda pair: preference.index(pair[1]))
        came_from: dict[int, tuple[int, int]] = {0: (REJECT, 0)}
        queue = deque([0])
        while queue:
            state = queue.popleft()
            if self.accepting[state]:
                found = bytearray()
                while state:
                    state, byte = came_from[state]
                    found.append(byte)
                return bytes(reversed(found))
            for byte_class, byte in bytes_in_order:
                target = int(self.next_state[state, byte_class])
                if target >= 0 and target not in came_from:
                    came_from[target] = state, byte
                    queue.append(target)
        raise AssertionError("no accepting state can be reached from the start")

    def explain(self, data: bytes | str) -> Refusal | None:
        """Where and why `data` is refused, and what was expected there; None when it is accepted."""
        data = _utf8(data)
        if not self.num_states:
            return Refusal(0, 0, "no text at all belongs to this grammar: its parts exclude each other")
        state = 0
        for position, byte in enumerate(data):
            target = int(self.next_state[state, self.byte_class[byte]])
            if target < 0:
                return self._refusal(data, position, state)
            state = target
        if self.accepting[state]:
            return None
        return Refusal(len(data), _num_chars(data), f"the text ends too early, after {_place(data, len(data))}: "
                                                    f"expected {self.expected(state)}")

    def expected(self, state: int) -> str:
        """What may come in a state, for people: forced text in quotes, else ranges of characters, or the end."""
        forced = bytearray()
        at = state
        while len(forced) < SHOWN_BYTES and not self.accepting[at]:
            allowed = self.allowed_bytes(at)
            if len(allowed) != 1:
                break
            forced += allowed
            at = int(self.next_state[at, self.byte_class[allowed[0]]])
        shown = forced.decode("utf-8", errors="ignore")
        if len(forced) > 1 and shown:
            return f"the text {shown!r}"
        ways = _readable(self.allowed_bytes(state))
        if self.accepting[state]:
            ways.append("the end of the text")
        return " or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways) if ways else "nothing at all"

    def allowed_bytes(self, state: int) -> bytes:
        """The bytes that may come in a state, in order."""
        return bytes(np.flatnonzero(self.next_state[state][self.byte_class] >= 0).astype(np.uint8))

    def _refusal(self, data: bytes, position: int, state: int) -> Refusal:
        start = position                                # of the character that the refused byte belongs to
        while start and data[start] & 0xC0 == 0x80 and position - start < 3:
            start -= 1
        try:
            found = repr(data[start:start + 4].decode("utf-8", errors="ignore")[0])
        except IndexError:
            found = f"byte 0x{data[position]:02X}"
            start = position
        expected = self.expected(state if start == position else self.walk(0, data[:start]))
        return Refusal(position, _num_chars(data[:start]), f"refused at {_place(data, start)}: found {found}, "
                                                           f"expected {expected}")


def compile_language(lang: Lang, limits: GrammarLimits | None = None, *, allow_empty: bool = False) -> Dfa:
    """Turns an expression into its automaton.

    States are the reachable sets of the subset construction, without those from which nothing can be accepted, and one
    of each class of equal ones: it is the smallest automaton.

    Args:
      lang: the language.
      limits: states, work and bytes it may take; None for the defaults.
      allow_empty: give the automaton without states, instead of an error, for an empty language.

    Raises:
      GrammarTooLarge: a limit would be passed. The message names it.
      GrammarError: the language is empty ("unsatisfiable").
    """
    limits = limits or GrammarLimits()
    if lang.shortest >= limits.max_states:
        raise GrammarTooLarge(f"the shortest text has {lang.shortest:,} bytes or more, so the automaton needs more "
                              f"than max_states={limits.max_states:,} states; use smaller counts")
    rows, accepting = _explored(lang, limits)
    distance = distances_to_end(rows, accepting)
    if distance[0] < 0:
        if allow_empty:
            return Dfa(np.zeros(NUM_BYTES, np.uint8), np.empty((0, 1), np.int32), np.empty(0, bool))
        raise GrammarError("unsatisfiable: no text belongs to this grammar; look for parts that exclude each other")
    return _smallest(rows, distance, limits)


def is_empty_language(lang: Lang, limits: GrammarLimits) -> tuple[bool, int]:
    """Whether no text belongs, and the work that finding out took; a text of the language ends the search.

    Raises GrammarTooLarge.
    """
    subsets = Subsets(lang, limits)
    order, seen = [subsets.start], {subsets.start}
    for set_id in order:                                # grows while it is read
        if subsets.accepts(set_id):
            return False, subsets.work
        for _, target in subsets.row(set_id):
            if target not in seen:
                seen.add(target)
                order.append(target)
    return True, subsets.work


def _explored(lang: Lang, limits: GrammarLimits) -> tuple[list[Row], list[bool]]:
    """Rows of (mask, state) and acceptance of all reachable states, breadth first."""
    subsets = Subsets(lang, limits)
    order, number = [subsets.start], {subsets.start: 0}
    rows = []
    for set_id in order:                                # grows while it is read
        row = []
        for mask, target in subsets.row(set_id):
            state = number.get(target)
            if state is None:
                state = number[target] = len(order)
                if state >= EXPLORED_PER_STATE * limits.max_states:
                    raise _too_many_states(limits)
                order.append(target)
            row.append((mask, state))
        rows.append(row)
    return rows, [subsets.accepts(set_id) for set_id in order]


def _smallest(rows: list[Row], distance: list[int], limits: GrammarLimits) -> Dfa:
    """The automaton of rows of (mask, state) with one state for each class of equal ones."""
    mask_ids: dict[int, int] = {}
    number = np.cumsum(np.array(distance) >= 0) - 1     # of the states from which the end can be reached
    edges = [(state, mask_ids.setdefault(mask, len(mask_ids)), target) for state, row in enumerate(rows)
             if distance[state] >= 0 for mask, target in row if distance[target] >= 0]
    states, masks, targets = np.array(edges, np.int64).reshape(-1, 3).T
    states, targets = number[states], number[targets]
    byte_class, has_class = _byte_classes(list(mask_ids))
    next_state = np.full((int(number[-1]) + 1, has_class.shape[1]), REJECT, np.int32)
    _, class_of = np.nonzero(has_class)                 # sorted by mask: the classes of mask m are one slice
    counts = has_class.sum(axis=1)
    begins = np.cumsum(counts) - counts
    length = counts[masks]
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    next_state[np.repeat(states, length), class_of[np.repeat(begins[masks], length) + within]] = \
        np.repeat(targets, length)
    # A state accepts where the end is 0 bytes away.
    kept_distance = np.array(distance)[np.array(distance) >= 0]
    class_of_state = equal_states(next_state, kept_distance, states, targets)
    first = np.unique(class_of_state, return_index=True)[1]
    if len(first) > limits.max_states:
        raise _too_many_states(limits)
    next_state = np.append(class_of_state, REJECT)[next_state[first]]
    # Bytes that only equal states told apart are one class now.
    number_of: dict[bytes, int] = {}
    merged = np.array([number_of.setdefault(column.tobytes(), len(number_of))
                       for column in np.ascontiguousarray(next_state.T)])
    kept = np.unique(merged, return_index=True)[1]
    if len(first) * len(kept) * 4 > limits.max_table_bytes:
        raise GrammarTooLarge(f"transitions of {len(first):,} states and {len(kept)} byte classes take "
                              f"{len(first) * len(kept) * 4:,} bytes, over max_table_bytes={limits.max_table_bytes:,}")
    return Dfa(merged[byte_class].astype(np.uint8), np.ascontiguousarray(next_state[:, kept], np.int32),
               kept_distance[first] == 0)


def _too_many_states(limits: GrammarLimits) -> GrammarTooLarge:
    return GrammarTooLarge(f"the automaton needs more than max_states={limits.max_states:,} states; use smaller counts "
                           "or fewer alternatives that begin alike")


def _byte_classes(masks: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """int64[256]: the class of each byte, alike in all masks; bool[M, K]: which classes each mask has."""
    packed = np.frombuffer(b"".join(mask.to_bytes(NUM_BYTES // 8, "little") for mask in masks), np.uint8)
    has_byte = np.unpackbits(packed.reshape(-1, NUM_BYTES // 8), axis=1, bitorder="little")
    class_ids: dict[bytes, int] = {}
    byte_class = np.array([class_ids.setdefault(row.tobytes(), len(class_ids))
                           for row in np.packbits(has_byte, axis=0).T])
    has_class = np.zeros((len(masks), len(class_ids)), bool)
    has_class[:, byte_class] = has_byte
    return byte_class, has_class


def _utf8(data: bytes | str) -> bytes:
    return data.encode("utf-8", errors="surrogatepass") if isinstance(data, str) else bytes(data)


def _num_chars(data: bytes) -> int:
    """Characters begun in `data`: bytes that continue none."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def _place(data: bytes, position: int) -> str:
    return f"character {_num_chars(data[:position])} (byte {position})"


def _readable(allowed: bytes) -> list[str]:
    """Runs of ASCII characters, then one word for all others."""
    runs: list[list[int]] = []
    for byte in allowed:
        if byte >= 0x80:
            break
        if runs and runs[-1][1] == byte - 1:
            runs[-1][1] = byte
        else:
            runs.append([byte, byte])
    ways = []
    for low, high in runs:
        if high - low > 1:
            ways.append(f"{chr(low)!r} to {chr(high)!r}")
        else:
            ways += [repr(chr(byte)) for byte in range(low, high + 1)]
    if allowed and allowed[-1] >= 0xC0:
        ways.append("a character beyond ASCII")
    elif allowed and allowed[-1] >= 0x80:
        ways.append("the rest of a character")
    return ways
