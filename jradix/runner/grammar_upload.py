"""Uploads of grammar tables: checks, and the cutting into blocks of one size. It holds no state."""
from __future__ import annotations

from typing import Callable, Iterator

import numpy as np

from jradix.batch import GrammarTables
from jradix.config import NUM_RESERVED_STATES, GrammarSizes
from jradix.ops.grammar import NUM_BYTES, ArenaBlock, GrammarArena, write_block

ROWS_PER_CALL = 64             # 0.4 MB at 49,152 tokens
STATES_PER_CALL = 4096
TRANSITIONS_PER_CALL = 2**17   # 0.25 MB


def make_upload_grammar() -> Callable[[GrammarArena, ArenaBlock], GrammarArena]:
    """`upload_grammar(arena, block)`; a function of its own for each runner, because jit keeps programs by function."""

    def upload_grammar(arena: GrammarArena, block: ArenaBlock) -> GrammarArena:
        return write_block(arena, block)

    return upload_grammar


def check_tables(tables: GrammarTables, sizes: GrammarSizes, *, vocab_size: int, has_token_bytes: bool) -> None:
    """Refuses what lies beyond the arena or in its reserved places: there the device would write elsewhere in silence.

    Raises:
      ValueError: the first thing that is wrong.
    """
    num_words = -(-vocab_size // 32)
    num_states, num_classes = tables.next_state.shape
    if tables.mask_rows.shape != (len(tables.row_ids), num_words):
        raise ValueError(f"mask rows of shape {tables.mask_rows.shape}, expected {(len(tables.row_ids), num_words)}")
    if not num_states or tables.state_row.shape != (num_states,) or tables.is_accepting.shape != (num_states,):
        raise ValueError(f"{len(tables.state_row)} rows of states and {len(tables.is_accepting)} accepting flags, "
                         f"expected one for each of the {num_states} states of next_state, and at least one")
    num_symbols = NUM_BYTES if tables.uses_bytes else vocab_size
    if tables.classes.shape != (num_symbols,) or tables.classes.max() >= num_classes:
        raise ValueError(f"classes of shape {tables.classes.shape} up to {tables.classes.max()}, expected "
                         f"{num_symbols} numbers below {num_classes}, the width of next_state")
    if tables.uses_bytes and not has_token_bytes:
        raise ValueError("tables made of bytes need the runner's token_bytes; give them, or tables made of tokens")
    last_row = sizes.num_rows - 1
    for what, numbers in (("row_ids", tables.row_ids), ("state_row", tables.state_row)):
        lowest = NUM_RESERVED_STATES if what == "row_ids" else 0
        if numbers.size and not lowest <= numbers.min() <= numbers.max() <= last_row:
            raise ValueError(f"{what} {numbers.min()} to {numbers.max()}, expected {lowest} to {last_row}")
    inside = tables.next_state[tables.next_state != 65_535]
    if inside.size and inside.max() >= num_states:
        raise ValueError(f"next_state names state {inside.max()}, but there are {num_states}")
    for what, first, num, lowest, end in (
            ("grammar", tables.grammar, 1, 1, sizes.num_grammars),
            ("states", tables.first_state, num_states, NUM_RESERVED_STATES, sizes.num_states),
            ("transitions", tables.first_transition, tables.next_state.size, 0, sizes.num_transitions)):
        if not lowest <= first <= end - num:
            raise ValueError(f"{what} {first} to {first + num - 1}, expected {lowest} to {end - 1}; a larger "
                             "grammar_bytes makes room")


def grammar_blocks(tables: GrammarTables, sizes: GrammarSizes, vocab_size: int) -> Iterator[ArenaBlock]:
    """The blocks that together write a grammar's tables, as few as their largest part needs."""
    num_states, num_classes = tables.next_state.shape
    transitions = tables.next_state.reshape(-1)
    state_base = tables.first_transition + num_classes * np.arange(num_states, dtype=np.int32)
    blank = blank_block(sizes, vocab_size)
    classes = np.zeros_like(blank.classes)
    classes[:len(tables.classes)] = tables.classes
    blank = blank._replace(grammar=np.int32(tables.grammar), first_state=np.int32(tables.first_state),
                           uses_bytes=np.bool_(tables.uses_bytes), classes=classes)
    r, n, m = len(blank.row_ids), len(blank.state_row), len(blank.next_state)
    for i in range(max(-(-len(tables.row_ids) // r), -(-num_states // n), -(-len(transitions) // m))):
        block = blank
        ids = tables.row_ids[i * r:(i + 1) * r]
        if len(ids):
            block = block._replace(row_ids=_filled(blank.row_ids, 0, ids),
                                   mask_rows=_filled(blank.mask_rows, 0, tables.mask_rows[i * r:(i + 1) * r]))
        place, low = _place(tables.first_state, num_states, i, n, sizes.num_states)
        if place is not None:
            part = slice(i * n, (i + 1) * n)
            block = block._replace(
                states=place, state_row=_filled(blank.state_row, low, tables.state_row[part]),
                state_base=_filled(blank.state_base, low, state_base[part]),
                is_accepting=_filled(blank.is_accepting, low, tables.is_accepting[part]))
        place, low = _place(tables.first_transition, len(transitions), i, m, sizes.num_transitions)
        if place is not None:
            block = block._replace(transitions=place,
                                   next_state=_filled(blank.next_state, low, transitions[i * m:(i + 1) * m]))
        yield block


def blank_block(sizes: GrammarSizes, vocab_size: int) -> ArenaBlock:
    """A block that writes nothing but the unused grammar 0."""
    r, n, m = (min(ROWS_PER_CALL, sizes.num_rows), min(STATES_PER_CALL, sizes.num_states),
               min(TRANSITIONS_PER_CALL, sizes.num_transitions))
    return ArenaBlock(
        row_ids=np.full(r, sizes.num_rows, np.int32), mask_rows=np.zeros((r, -(-vocab_size // 32)), np.uint32),
        grammar=np.int32(0), first_state=np.int32(0), uses_bytes=np.bool_(False),
        classes=np.zeros(max(vocab_size, NUM_BYTES), np.uint16), states=np.zeros(3, np.int32),
        state_row=np.zeros(n, np.int32), state_base=np.zeros(n, np.int32), is_accepting=np.zeros(n, bool),
        transitions=np.zeros(3, np.int32), next_state=np.zeros(m, np.uint16))


def _place(first: int, num: int, i: int, size: int, capacity: int) -> tuple[np.ndarray | None, int]:
    """Base, low and high of the i-th block of a range, and low: a block never reaches beyond the capacity."""
    count = min(size, num - i * size)
    if count <= 0:
        return None, 0
    start = first + i * size
    base = min(start, capacity - size)
    return np.array([base, start - base, start - base + count], np.int32), start - base


def _filled(blank: np.ndarray, start: int, values: np.ndarray) -> np.ndarray:
    """A copy with `values` from `start` on: blocks are read by calls that may still be running."""
    filled = blank.copy()
    filled[start:start + len(values)] = values
    return filled
