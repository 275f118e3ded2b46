"""Token tables: a byte automaton times a vocabulary, as the small arrays that a device steps through.

What a token does in each state comes from `token_columns.py`, forced tokens from `jump.py`; placing tables in the
device's arena is `table_pool.py`.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.dfa import Dfa
from jradix.grammar.jump import canonical_forced_tokens
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.token_columns import (Slice, distinct, distinct_below, live_over_single_bytes, live_over_tokens,
                                          reach, walk_slices)
from jradix.grammar.vocabulary import WORD_BITS, Vocabulary

REJECT = 0xFFFF                     # as a next state
MAX_STATES = 65_000
TRANSITION_BUDGET_BYTES = 4 << 20   # larger [Q, C] tables give way to the byte form
REJECT_CLASS = 0                    # of tokens that no state allows


@dataclass(frozen=True)
class ByteTables:
    """Transitions over bytes, for automata with too many token classes: a token steps over its bytes one by one.

    Attributes:
      byte_class: uint8[256].
      next_state: uint16[Q, K]; 65,535 rejects.
      byte_starts, byte_data: the bytes of each token, as in `Vocabulary`. End tokens have none and keep the state.
    """
    byte_class: np.ndarray
    next_state: np.ndarray
    byte_starts: np.ndarray
    byte_data: np.ndarray


@dataclass(frozen=True)
class TokenTables:
    """What a device needs to follow one grammar in one vocabulary. State 0 is the start.

    Either `token_class` and `next_state` or `byte_tables` are there. An end token keeps its (accepting) state. States
    that no sequence of allowed tokens reaches have row 0 and no forced token. Steps with a token that the mask of the
    state does not allow are undefined.

    Attributes:
      mask_rows: uint32[R, W]; token v is bit v // W of word v % W. Row 0 allows every real token.
      state_row: int32[Q], the row of each state.
      accepting: bool[Q]; exactly there the end tokens are allowed.
      forced_token: int32[Q], the one token allowed, -1 where there are more or only an end token.
      may_jump: bool[Q], one token can lead to a state with a forced token or to the end.
      token_class: uint16[V] or None.
      next_state: uint16[Q, C] or None; 65,535 rejects.
      byte_tables: the other form, or None.
      num_tokens: V.
      eos_ids: the end tokens.
      vocabulary_fingerprint: of the vocabulary the tables are for.
    """
    mask_rows: np.ndarray
    state_row: np.ndarray
    accepting: np.ndarray
    forced_token: np.ndarray
    may_jump: np.ndarray
    token_class: np.ndarray | None
    next_state: np.ndarray | None
    byte_tables: ByteTables | None
    num_tokens: int
    eos_ids: tuple[int, ...]
    vocabulary_fingerprint: str

    @property
    def num_states(self) -> int:
        return len(self.state_row)

    @property
    def num_rows(self) -> int:
        """Rows of this grammar's own: row 0 is everybody's."""
        return len(self.mask_rows) - 1

    @property
    def nbytes(self) -> int:
        """Bytes on the device, the token bytes (one copy for all grammars) left out."""
        if self.byte_tables is None:
            steps = (self.token_class, self.next_state)
        else:
            steps = (self.byte_tables.byte_class, self.byte_tables.next_state)
        return sum(a.nbytes for a in (self.mask_rows[1:], self.state_row, self.accepting, self.forced_token,
                                      self.may_jump, *steps))

    @cached_property
    def is_end(self) -> np.ndarray:
        """bool[Q]: the text is complete in this state, and nothing can follow it."""
        ids = np.array(self.eos_ids, np.int64)
        only_ends = np.zeros(self.mask_rows.shape[1], np.uint32)
        np.bitwise_or.at(only_ends, ids % len(only_ends), np.uint32(1) << (ids // len(only_ends)).astype(np.uint32))
        return self.accepting & (self.mask_rows == only_ends).all(axis=1)[self.state_row]

    def allowed_ids(self, state: int) -> np.ndarray:
        """Ids of the tokens allowed in `state`, ascending."""
        row = self.mask_rows[self.state_row[state]]
        bits = (row[None, :] >> np.arange(WORD_BITS, dtype=np.uint32)[:, None]) & 1
        return np.flatnonzero(bits.reshape(-1))

    def advance(self, state: int, token_id: int) -> int:
        """The state after an allowed token."""
        if token_id in self.eos_ids:
            return state
        if self.byte_tables is None:
            return int(self.next_state[state, self.token_class[token_id]])
        tables = self.byte_tables
        for byte in tables.byte_data[tables.byte_starts[token_id]:tables.byte_starts[token_id + 1]]:
            state = int(tables.next_state[state, tables.byte_class[byte]])
            if state == REJECT:
                return REJECT
        return state


def build_token_tables(dfa: Dfa, vocabulary: Vocabulary, limits: GrammarLimits | None = None, *,
                       canonical: bool = True, transition_budget_bytes: int = TRANSITION_BUDGET_BYTES) -> TokenTables:
    """Tables of `dfa` for `vocabulary`.

    Args:
      dfa: every state reachable and able to reach acceptance.
      vocabulary: tokens of the model's head.
      limits: bounds on states and bytes; None for the defaults.
      canonical: narrow the mask where the text that must come next has one tokenisation. False: a token is forced only
        where it is the only one that fits.
      transition_budget_bytes: size up to which transitions are kept per token class.

    Raises:
      GrammarError: the vocabulary lacks a byte that every text of the language needs.
      GrammarTooLarge: more states or table bytes than `limits` allows, or too much work.
    """
    limits = limits or GrammarLimits()
    num_states = dfa.num_states
    max_states = min(limits.max_states, MAX_STATES)
    if num_states > max_states:
        raise GrammarTooLarge(f"the automaton has {num_states:,} states; device tables hold at most {max_states:,}")
    # A state from which only missing bytes lead on is a trap: texts must not be led into it.
    live = live_over_single_bytes(dfa, vocabulary)
    if not live.all():
        live = live_over_tokens(dfa, vocabulary)
    if not live[0]:
        is_used = (dfa.next_state >= 0).any(axis=0)[dfa.byte_class]
        is_used &= ~np.isin(dfa.byte_class, dfa.byte_class[~vocabulary.missing_bytes])
        names = [f"0x{byte:02X}" for byte in np.flatnonzero(is_used)]
        raise GrammarError(f"no text of the grammar can be spelled with this vocabulary: it has no token for "
                           f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}; use another model or grammar")
    forced = canonical_forced_tokens(dfa, vocabulary) if canonical else np.full(num_states, -1, np.int32)
    return _Assembly(dfa, vocabulary, limits, transition_budget_bytes, forced, live).build()


class _Assembly:
    """Puts the slices together. Owns the growing lists of rows, classes and edges."""

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, limits: GrammarLimits, budget: int, forced: np.ndarray,
                 live: np.ndarray) -> None:
        self.dfa, self.vocabulary, self.limits, self.budget = dfa, vocabulary, limits, budget
        self.forced, self.live = forced, live
        self.state_row = np.zeros(dfa.num_states, np.int32)
        self.rows: list[np.ndarray] = [pack_rows(vocabulary.is_real[None], vocabulary.num_words)[0]]
        self.row_of: dict[bytes, int] = {}
        self.token_class = np.full(vocabulary.num_tokens, REJECT_CLASS, np.int64)
        self.num_classes = 1
        self.slices: list[Slice] | None = []       # None once they are known to exceed the budget
        self.edges: list[tuple[np.ndarray, np.ndarray]] = []
        # The token behind each bit, word by word: packed in this order, bits are the words of a row
        self.planar = np.arange(vocabulary.num_words * WORD_BITS).reshape(WORD_BITS, -1).T.reshape(-1)

    def build(self) -> TokenTables:
        for part in walk_slices(self.dfa, self.vocabulary, self.live):
            self._add_classes(part)
            self._add_rows(part)
        sources, targets = (np.concatenate(side) for side in zip(*self.edges))
        reached = reach(self.dfa.num_states, sources, targets, np.array([0]))
        forced = np.where(reached, self.forced, -1).astype(np.int32)
        is_end = self.dfa.accepting & (self.dfa.next_state < 0).all(axis=1)
        may_jump = np.zeros(self.dfa.num_states, bool)
        may_jump[sources[(forced[targets] >= 0) | is_end[targets]]] = True
        state_row = np.where(reached, self.state_row, 0)
        used, state_row = np.unique(np.append(state_row, 0), return_inverse=True)
        rows = np.stack([self.rows[i] for i in used])
        byte_tables, classes, next_state = None, None, None
        if self.slices is not None:
            classes, next_state = self.token_class.astype(np.uint16), self._transitions()
        else:
            table = np.where(self.dfa.next_state < 0, REJECT, self.dfa.next_state).astype(np.uint16)
            byte_tables = ByteTables(np.asarray(self.dfa.byte_class, np.uint8), table, self.vocabulary.byte_starts,
                                     self.vocabulary.byte_data)
        return TokenTables(rows, state_row[:-1].astype(np.int32), np.array(self.dfa.accepting, bool), forced,
                           may_jump & reached, classes, next_state, byte_tables, self.vocabulary.num_tokens,
                           self.vocabulary.eos_ids, self.vocabulary.fingerprint)

    def _add_classes(self, part: Slice) -> None:
        """Splits the token classes by the columns of `part`; keeps `part` while the transitions fit the budget."""
        num_kinds = len(part.columns.starts)            # of columns, and none
        key = self.token_class * num_kinds + part.token_column + 1
        used, self.token_class = distinct_below(key, self.num_classes * num_kinds)
        if used[0] != 0:                     # class 0 stays the one that no state allows
            used = np.append(0, used)
            self.token_class += 1
        self.num_classes = len(used)
        if self.slices is not None:
            self.slices.append(part)
            if self.num_classes * self.dfa.num_states * 2 > self.budget or self.num_classes >= REJECT:
                self.slices = None

    def _add_rows(self, part: Slice) -> None:
        """Rows, forced tokens and edges of the states of `part`."""
        columns, states = part.columns, part.states
        owner = columns.owner()
        num_columns = len(columns.starts) - 1
        per_column = np.bincount(part.token_column[part.token_column >= 0], minlength=num_columns)
        num_allowed = np.bincount(columns.sources, per_column[owner], len(states)).astype(np.int64)
        single = (num_allowed == 1) & ~self.dfa.accepting[states] & (self.forced[states] < 0)
        if single.any():
            token_of = np.full(num_columns, -1, np.int64)
            has_column = np.flatnonzero(part.token_column >= 0)
            token_of[part.token_column[has_column]] = has_column
            is_single = single[columns.sources]
            self.forced[states[columns.sources[is_single]]] = token_of[owner[is_single]]
        is_forced = self.forced[states] >= 0
        for i in np.flatnonzero(is_forced):
            self.state_row[states[i]] = self._row_of_token(int(self.forced[states[i]]))
        self._add_edges(part, owner, is_forced)

        allowed = np.zeros((len(states), num_columns + 2), bool)
        allowed[columns.sources, owner] = True
        allowed[:, num_columns] = self.dfa.accepting[states]
        free = np.flatnonzero(~is_forced)
        if not free.size:
            return
        packed = np.packbits(allowed[free], axis=1)
        _, first, which = np.unique(packed.view(f"V{packed.shape[1]}").reshape(-1), return_index=True,
                                    return_inverse=True)
        # Column of each position of the planar row: the last column is allowed nowhere
        column = np.full(len(self.planar), num_columns + 1)
        column[:self.vocabulary.num_tokens] = np.where(part.token_column < 0, num_columns + 1, part.token_column)
        column[list(self.vocabulary.eos_ids)] = num_columns
        column = column[self.planar]
        row_ids = np.empty(len(first), np.int32)
        for begin in range(0, len(first), 64):
            words = _picked_bits(allowed[free[first[begin:begin + 64]]], column).view("<u4")
            row_ids[begin:begin + 64] = [self._row(row) for row in words]
        self.state_row[states[free]] = row_ids[which]

    def _add_edges(self, part: Slice, owner: np.ndarray, is_forced: np.ndarray) -> None:
        """The (state, next state) pairs that allowed tokens make, each once."""
        columns, states = part.columns, part.states
        kept = ~is_forced[columns.sources]
        kept |= owner == part.token_column[self.forced[states]][columns.sources]
        pairs = distinct(columns.sources[kept].astype(np.int64) * self.dfa.num_states + columns.targets[kept])
        sources, targets = np.divmod(pairs, self.dfa.num_states)
        self.edges.append((states[sources], targets))

    def _row_of_token(self, token_id: int) -> int:
        row = np.zeros(self.vocabulary.num_words, np.uint32)
        row[token_id % len(row)] = np.uint32(1) << np.uint32(token_id // len(row))
        return self._row(row)

    def _row(self, row: np.ndarray) -> int:
        """Number of a row with this content."""
        number = self.row_of.setdefault(row.tobytes(), len(self.rows))
        if number == len(self.rows):
            self.rows.append(np.array(row, np.uint32))
            if len(self.rows) * row.nbytes > self.limits.max_table_bytes:
                raise GrammarTooLarge(f"more than {len(self.rows) - 1:,} different token masks of {row.nbytes:,} bytes;"
                                      f" the tables may have {self.limits.max_table_bytes:,} bytes")
        return number

    def _transitions(self) -> np.ndarray:
        table = np.full((self.dfa.num_states, self.num_classes), REJECT, np.uint16)
        classes = np.arange(self.num_classes)
        member = np.full(self.num_classes, -1)
        member[self.token_class] = np.arange(len(self.token_class))         # one token of each class
        classes, member = classes[member >= 0], member[member >= 0]
        for part in self.slices:
            columns = part.columns
            dense = np.full((len(part.states), len(columns.starts)), REJECT, np.uint16)     # the last: no column
            dense[columns.sources, columns.owner()] = columns.targets
            table[part.states[:, None], classes] = dense[:, part.token_column[member]]
        return table


def _picked_bits(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """uint8[R, N / 8]: bit n % 8 of byte n // 8 of row r is rows[r, columns[n]]; R at most 64, N a multiple of 8.

    One gather for all rows together, then 8 x 8 bits are turned at a time (Hacker's Delight, section 7-3).
    """
    of_column = np.zeros((rows.shape[1], 8), np.uint8)
    packed = np.packbits(rows.T, axis=1, bitorder="little")
    of_column[:, :packed.shape[1]] = packed
    blocks = np.take(of_column.view("<u8")[:, 0], columns).view(np.uint8).reshape(-1, 8, 8)
    turned = np.ascontiguousarray(blocks.transpose(2, 0, 1)[:packed.shape[1]]).view("<u8")
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        moved = (turned ^ turned >> np.uint64(shift)) & np.uint64(mask)
        turned ^= moved ^ moved << np.uint64(shift)
    by_row = turned.view(np.uint8).reshape(packed.shape[1], -1, 8).transpose(0, 2, 1)
    return np.ascontiguousarray(by_row).reshape(8 * packed.shape[1], -1)[:len(rows)]


def pack_rows(allowed: np.ndarray, num_words: int) -> np.ndarray:
    """uint32[R, W] planar rows of bool[R, V]."""
    padded = np.zeros((len(allowed), WORD_BITS * num_words), bool)
    padded[:, :allowed.shape[1]] = allowed
    planes = padded.reshape(len(allowed), WORD_BITS, num_words).transpose(0, 2, 1)
    return np.packbits(planes.reshape(len(allowed), -1), axis=1, bitorder="little").view("<u4").astype(np.uint32)
