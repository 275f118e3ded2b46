"""Which rows, states and transitions of the device's grammar arena belong to which grammar. Accounting only: no device.

Mask rows are shared: equal rows of different grammars are one. States and transition words are ranges of each grammar's
own. Grammars that no request uses stay until their space is wanted, least recently used first. What must be written to
the device is handed out as records of arrays; the device's side is `ops/grammar.py`.

Invariant: every row, state, transition word and slot is either free or belongs to a resident grammar, row by row with
its number of owners; rows 0 and 1, states 0 and 1 and slot 0 are the device's own (no grammar, ended) and never given
away.
"""
from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jradix.errors import GrammarTooLarge
from jradix.grammar.token_dfa import TokenTables


NUM_RESERVED = 2      # rows and states


class ArenaSize(NamedTuple):
    """Capacity of the arena: rows R, states N, uint16 transition words M, grammar slots G, reserved ones included."""
    rows: int
    states: int
    words: int
    slots: int


class RowUpload(NamedTuple):
    """Mask rows to write: rows uint32[n, W] go to the numbers ids int32[n]."""
    ids: np.ndarray
    rows: np.ndarray


class GrammarUpload(NamedTuple):
    """One grammar to write, at its own place.

    States [state_start, state_start + Q) get state_row int32[Q] (numbers of arena rows), accepting bool[Q],
    forced_token int32[Q] and may_jump bool[Q]. Words from word_start on get next_state uint16[Q, width], whose values
    count from state_start; 65,535 rejects. Slot `slot` gets token_class uint16[V], or byte_class uint8[256] where the
    transitions are over bytes; the other one is None.
    """
    slot: int
    state_start: int
    word_start: int
    state_row: np.ndarray
    accepting: np.ndarray
    forced_token: np.ndarray
    may_jump: np.ndarray
    next_state: np.ndarray
    token_class: np.ndarray | None
    byte_class: np.ndarray | None


class Uploads(NamedTuple):
    """Everything to be written before the next step: the rows first, then the grammars."""
    rows: RowUpload
    grammars: list[GrammarUpload]


@dataclass(slots=True)
class Placement:
    """Where a resident grammar lies. `num_users` counts the acquisitions not yet released.

    `row_ids` int32[R] are the arena numbers of the grammar's mask rows, row 0 included.
    """
    slot: int
    state_start: int
    num_states: int
    word_start: int
    num_words: int
    row_ids: np.ndarray
    tables: TokenTables
    num_users: int = 0


class Ranges:
    """Free space of [begin, end), given out as ranges: the smallest free one that fits, joined again later."""

    def __init__(self, begin: int, end: int) -> None:
        self._free = [(begin, end)] if end > begin else []

    @property
    def num_free(self) -> int:
        return sum(end - begin for begin, end in self._free)

    @property
    def largest(self) -> int:
        return max((end - begin for begin, end in self._free), default=0)

    def free_ranges(self) -> list[tuple[int, int]]:
        """The free ranges [begin, end), ascending and apart."""
        return list(self._free)

    def try_take(self, length: int) -> int | None:
        """Start of a range of `length` (at least 1), or None."""
        fitting = [(end - begin, i) for i, (begin, end) in enumerate(self._free) if end - begin >= length]
        if not fitting:
            return None
        _, i = min(fitting)
        begin, end = self._free.pop(i)
        if begin + length < end:
            self._free.insert(i, (begin + length, end))
        return begin

    def give(self, begin: int, length: int) -> None:
        """Takes back a range."""
        end = begin + length
        i = bisect_left(self._free, (begin, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == begin:
            i -= 1
            begin = self._free.pop(i)[0]
        self._free.insert(i, (begin, end))


class TablePool:
    """The arena's occupants.

    A failed `try_acquire` leaves users and their grammars as they were; unused grammars may have gone.
    """

    def __init__(self, size: ArenaSize, num_row_words: int) -> None:
        """Makes an empty pool for rows of `num_row_words` uint32 each.

        Raises:
          ValueError: no room for one grammar beside the reserved entries.
        """
        if min(size.rows, size.states) <= NUM_RESERVED or size.slots < 2 or size.words < 1:
            raise ValueError(f"{size}: expected at least {NUM_RESERVED + 1} rows and states, 2 slots and 1 word")
        self.size = size
        self.num_row_words = num_row_words
        self._states, self._words = Ranges(NUM_RESERVED, size.states), Ranges(0, size.words)
        self._slots = list(range(size.slots - 1, 0, -1))
        self._free_rows = list(range(size.rows - 1, NUM_RESERVED - 1, -1))
        self._row_of: dict[bytes, int] = {}
        self._content: dict[int, bytes] = {}
        self._num_owners: Counter[int] = Counter()
        self._resident: OrderedDict[str, Placement] = OrderedDict()     # least recently used first
        self._new_rows: dict[int, np.ndarray] = {}
        self._new_grammars: dict[str, GrammarUpload] = {}

    def try_acquire(self, key: str, tables: TokenTables) -> Placement | None:
        """Makes the grammar `key` resident and counts one user more; None while other users hold the space it needs.

        Args:
          key: names the grammar and the vocabulary; equal keys mean equal tables.
          tables: its tables.

        Raises:
          GrammarTooLarge: it does not fit into an empty arena.
        """
        placement = self._resident.get(key)
        if placement is None:
            self.check_size(tables)
            placement = self._try_place(key, tables)
            if placement is None:
                return None
        self._resident.move_to_end(key)
        placement.num_users += 1
        return placement

    def release(self, key: str) -> None:
        """Counts one user less. The grammar stays until its space is wanted."""
        placement = self._resident[key]
        if placement.num_users < 1:
            raise ValueError(f"grammar {key!r} is released more often than it was acquired")
        placement.num_users -= 1

    def take_uploads(self) -> Uploads:
        """What must be written since the last call. The caller writes all of it before the next step."""
        ids = np.array(sorted(self._new_rows), np.int32)
        rows = np.zeros((len(ids), self.num_row_words), np.uint32)
        for n, i in enumerate(ids.tolist()):
            rows[n] = self._new_rows[i]
        grammars = list(self._new_grammars.values())
        self._new_rows, self._new_grammars = {}, {}
        return Uploads(RowUpload(ids, rows), grammars)

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    def shortage(self, tables: TokenTables) -> str:
        """Why `tables` do not fit now, in numbers, for the message to whoever waits or is refused."""
        used = [p for p in self._resident.values() if p.num_users]
        return (f"the grammar arena is full: this grammar needs {tables.num_rows:,} mask rows, {tables.num_states:,} "
                f"states and {_num_words(tables):,} transition words; free are {len(self._free_rows):,} of "
                f"{self.size.rows:,} rows, {self._states.num_free:,} of {self.size.states:,} states (at most "
                f"{self._states.largest:,} together), {self._words.num_free:,} of {self.size.words:,} words (at most "
                f"{self._words.largest:,} together) and {len(self._slots)} of {self.size.slots} slots; "
                f"{len(used)} grammars are in use")

    def check_size(self, tables: TokenTables) -> None:
        """Raises GrammarTooLarge for tables that an empty arena would not hold, ValueError for another vocabulary's."""
        if tables.mask_rows.shape[1] != self.num_row_words:
            raise ValueError(f"mask rows of {tables.mask_rows.shape[1]} words; the arena's have {self.num_row_words}: "
                             "the tables were made for another vocabulary")
        needs = ((tables.num_rows, self.size.rows - NUM_RESERVED, "mask rows"),
                 (tables.num_states, self.size.states - NUM_RESERVED, "states"),
                 (_num_words(tables), self.size.words, "transition words"))
        for need, has, name in needs:
            if need > has:
                raise GrammarTooLarge(f"the grammar needs {need:,} {name}; the device arena has {has:,}: simplify the "
                                      "grammar or give the arena more space")

    def _try_place(self, key: str, tables: TokenTables) -> Placement | None:
        num_words = _num_words(tables)
        contents = [row.tobytes() for row in tables.mask_rows[1:]]
        while True:
            missing = sum(content not in self._row_of for content in contents)
            if (missing <= len(self._free_rows) and self._slots and self._states.largest >= tables.num_states
                    and self._words.largest >= num_words):
                break
            if not self._evict_one():
                return None
        state_start, word_start = self._states.try_take(tables.num_states), self._words.try_take(num_words)
        assert state_start is not None and word_start is not None, (tables.num_states, num_words)
        row_ids = np.array([0, *(self._take_row(row, content) for row, content in zip(tables.mask_rows[1:], contents))],
                           np.int32)
        placement = Placement(self._slots.pop(), state_start, tables.num_states, word_start, num_words, row_ids, tables)
        self._resident[key] = placement
        by_bytes = tables.byte_tables
        self._new_grammars[key] = GrammarUpload(
            placement.slot, state_start, word_start, row_ids[tables.state_row], tables.accepting, tables.forced_token,
            tables.may_jump, tables.next_state if by_bytes is None else by_bytes.next_state, tables.token_class,
            None if by_bytes is None else by_bytes.byte_class)
        return placement

    def _take_row(self, row: np.ndarray, content: bytes) -> int:
        if content not in self._row_of:
            i = self._row_of[content] = self._free_rows.pop()
            self._content[i] = content
            self._new_rows[i] = row
        i = self._row_of[content]
        self._num_owners[i] += 1
        return i

    def _evict_one(self) -> bool:
        """Drops the unused grammar that was used longest ago; False if all are in use."""
        key = next((key for key, placement in self._resident.items() if not placement.num_users), None)
        if key is None:
            return False
        gone = self._resident.pop(key)
        self._states.give(gone.state_start, gone.num_states)
        self._words.give(gone.word_start, gone.num_words)
        self._slots.append(gone.slot)
        self._new_grammars.pop(key, None)
        for i in gone.row_ids[1:].tolist():
            self._num_owners[i] -= 1
            if not self._num_owners[i]:
                del self._num_owners[i], self._row_of[self._content.pop(i)]
                self._new_rows.pop(i, None)
                self._free_rows.append(i)
        return True

    def check_invariants(self) -> None:
        """Recomputes who owns what; raises AssertionError where the books differ."""
        owners: Counter[int] = Counter(i for p in self._resident.values() for i in p.row_ids[1:].tolist())
        assert owners == self._num_owners, (owners, self._num_owners)
        assert sorted([*owners, *self._free_rows]) == list(range(NUM_RESERVED, self.size.rows)), (
            owners, self._free_rows)
        assert {i: content for content, i in self._row_of.items()} == self._content
        assert set(self._new_rows) <= set(owners) and set(self._new_grammars) <= set(self._resident)
        slots = [p.slot for p in self._resident.values()]
        assert sorted([*slots, *self._slots]) == list(range(1, self.size.slots)), (slots, self._slots)
        for ranges, taken, begin, end in (
                (self._states, [(p.state_start, p.num_states) for p in self._resident.values()],
                 NUM_RESERVED, self.size.states),
                (self._words, [(p.word_start, p.num_words) for p in self._resident.values()], 0, self.size.words)):
            spans = sorted([*((at, at + length) for at, length in taken), *ranges.free_ranges()])
            assert [at for at, _ in spans] + [end] == [begin] + [after for _, after in spans], spans
        for placement in self._resident.values():
            for i, row in zip(placement.row_ids[1:].tolist(), placement.tables.mask_rows[1:]):
                assert self._content[i] == row.tobytes(), i


def _num_words(tables: TokenTables) -> int:
    return (tables.next_state if tables.byte_tables is None else tables.byte_tables.next_state).size
