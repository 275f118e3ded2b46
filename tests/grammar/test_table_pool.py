"""The books of the device arena against a replayed arena."""
from __future__ import annotations

import random

import numpy as np
import pytest

from jradix.errors import GrammarTooLarge
from jradix.grammar.dfa import compile_language
from jradix.grammar.language import alt, byte_set, repeat, seq, text
from jradix.grammar.table_pool import ArenaSize, Placement, Ranges, TablePool, Uploads
from jradix.grammar.token_dfa import TokenTables, build_token_tables
from jradix.grammar.vocabulary import Vocabulary

VOCABULARY = Vocabulary([*(bytes([b]) for b in range(97, 123)), b"ab", b"abc", b"yes", None], eos_ids=[29])
LANGUAGES = [text("yes"), alt(text("yes"), text("no")), repeat(text("ab"), 1, None), repeat(byte_set(b"abc"), 0, 6),
             seq(byte_set(range(97, 123)), text("abc")), repeat(byte_set(b"xyz"), 3, 9), alt(text("q"), text("abcabc"))]
TABLES = [build_token_tables(compile_language(lang), VOCABULARY, transition_budget_bytes=0 if n % 3 == 2 else 1 << 20)
          for n, lang in enumerate(LANGUAGES)]
ROOMY = ArenaSize(rows=200, states=200, words=10_000, slots=20)


class Arena:
    """What a device would hold: it writes the uploads and reads a grammar back through its placement."""

    def __init__(self, size: ArenaSize) -> None:
        self.rows = np.zeros((size.rows, VOCABULARY.num_words), np.uint32)
        self.state_row, self.forced = np.zeros(size.states, np.int32), np.zeros(size.states, np.int32)
        self.flags = np.zeros((2, size.states), bool)
        self.words = np.zeros(size.words, np.uint16)
        self.classes: dict[int, np.ndarray] = {}

    def write(self, uploads: Uploads) -> None:
        self.rows[uploads.rows.ids] = uploads.rows.rows
        for grammar in uploads.grammars:
            states = slice(grammar.state_start, grammar.state_start + len(grammar.state_row))
            self.state_row[states], self.forced[states] = grammar.state_row, grammar.forced_token
            self.flags[:, states] = grammar.accepting, grammar.may_jump
            self.words[grammar.word_start:grammar.word_start + grammar.next_state.size] = grammar.next_state.reshape(-1)
            self.classes[grammar.slot] = grammar.byte_class if grammar.token_class is None else grammar.token_class

    def check(self, placement: Placement, tables: TokenTables) -> None:
        states = slice(placement.state_start, placement.state_start + placement.num_states)
        assert (self.rows[self.state_row[states]][tables.state_row != 0]
                == tables.mask_rows[tables.state_row][tables.state_row != 0]).all()
        assert (self.state_row[states][tables.state_row == 0] == 0).all()
        assert (self.forced[states] == tables.forced_token).all()
        assert (self.flags[:, states] == [tables.accepting, tables.may_jump]).all()
        by_bytes = tables.byte_tables
        steps, classes = ((tables.next_state, tables.token_class) if by_bytes is None
                          else (by_bytes.next_state, by_bytes.byte_class))
        words = self.words[placement.word_start:placement.word_start + placement.num_words]
        assert (words.reshape(steps.shape) == steps).all() and (self.classes[placement.slot] == classes).all()


@pytest.mark.parametrize("seed", range(6))
def test_pool_random_requests_every_resident_grammar_reads_back(seed):
    rng = random.Random(seed)
    size = ArenaSize(rows=26, states=30, words=420, slots=4) if seed % 2 else ROOMY
    pool, arena, users = TablePool(size, VOCABULARY.num_words), Arena(size), {}
    num_waits = 0
    for _ in range(150):
        if users and rng.random() < 0.45:
            n = rng.choice(sorted(users))
            pool.release(str(n))
            users[n][1] -= 1
            if not users[n][1]:
                del users[n]
        else:
            n = rng.randrange(len(TABLES))
            placement = pool.try_acquire(str(n), TABLES[n])
            if placement is None:
                num_waits += 1
                assert n not in users and "full" in pool.shortage(TABLES[n])
            else:
                users.setdefault(n, [placement, 0])[1] += 1
                assert users[n][0] is placement and placement.num_users == users[n][1]
        pool.check_invariants()
        if rng.random() < 0.7:
            arena.write(pool.take_uploads())
            for n, (placement, _) in users.items():
                arena.check(placement, TABLES[n])
    assert (num_waits > 0) == bool(seed % 2)


def test_pool_equal_rows_of_two_grammars_are_one():
    pool = TablePool(ROOMY, VOCABULARY.num_words)
    first, second = pool.try_acquire("yes", TABLES[0]), pool.try_acquire("choice", TABLES[1])
    shared = set(first.row_ids[1:].tolist()) & set(second.row_ids[1:].tolist())
    assert shared                                   # both end with only the end token allowed
    uploads = pool.take_uploads()
    assert len(uploads.rows.ids) == len(set(first.row_ids[1:].tolist()) | set(second.row_ids[1:].tolist()))
    assert len(uploads.grammars) == 2


def test_pool_grammar_acquired_again_uploads_nothing():
    pool = TablePool(ROOMY, VOCABULARY.num_words)
    first = pool.try_acquire("yes", TABLES[0])
    pool.take_uploads()
    pool.release("yes")
    assert pool.try_acquire("yes", TABLES[0]) is first
    uploads = pool.take_uploads()
    assert not uploads.grammars and not len(uploads.rows.ids)


def test_pool_full_arena_evicts_the_unused_grammar_of_longest_ago():
    pool = TablePool(ArenaSize(rows=200, states=200, words=10_000, slots=4), VOCABULARY.num_words)
    for n in range(3):
        pool.try_acquire(str(n), TABLES[n])
    for n in (1, 0, 2):
        pool.release(str(n))
    pool.try_acquire("0", TABLES[0])                # used again: 1 is the oldest now
    pool.release("0")
    pool.take_uploads()
    pool.try_acquire("3", TABLES[3])
    assert len(pool.take_uploads().grammars) == 1
    for n in (0, 2):
        pool.try_acquire(str(n), TABLES[n])
    assert not pool.take_uploads().grammars             # both were still there
    assert pool.num_resident == 3
    assert pool.try_acquire("1", TABLES[1]) is None     # the three slots are in use
    pool.check_invariants()


def test_pool_evicted_before_its_upload_is_not_uploaded():
    pool = TablePool(ArenaSize(rows=200, states=200, words=10_000, slots=2), VOCABULARY.num_words)
    pool.try_acquire("0", TABLES[0])
    pool.release("0")
    placement = pool.try_acquire("1", TABLES[1])
    uploads = pool.take_uploads()
    assert len(uploads.grammars) == 1 and sorted(set(placement.row_ids[1:].tolist())) == uploads.rows.ids.tolist()


@pytest.mark.parametrize("field, size", [("mask rows", ArenaSize(3, 200, 10_000, 4)),
                                         ("states", ArenaSize(200, 3, 10_000, 4)),
                                         ("transition words", ArenaSize(200, 200, 5, 4))])
def test_pool_grammar_beyond_the_whole_arena_is_too_large_and_changes_nothing(field, size):
    pool = TablePool(size, VOCABULARY.num_words)
    with pytest.raises(GrammarTooLarge, match=field):
        pool.try_acquire("3", TABLES[3])
    assert pool.num_resident == 0
    pool.check_invariants()


def test_pool_tables_of_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match="another vocabulary"):
        TablePool(ROOMY, VOCABULARY.num_words + 1).try_acquire("0", TABLES[0])


def test_pool_release_without_user_is_an_error():
    pool = TablePool(ROOMY, VOCABULARY.num_words)
    pool.try_acquire("0", TABLES[0])
    pool.release("0")
    with pytest.raises(ValueError, match="released more often"):
        pool.release("0")


@pytest.mark.parametrize("seed", range(4))
def test_ranges_random_takes_and_gives_never_overlap(seed):
    rng, ranges, taken = random.Random(seed), Ranges(1, 100), []
    for _ in range(300):
        if taken and rng.random() < 0.5:
            ranges.give(*taken.pop(rng.randrange(len(taken))))
        else:
            length = rng.randint(1, 20)
            largest = ranges.largest
            begin = ranges.try_take(length)
            assert (begin is None) == (largest < length)
            if begin is not None:
                taken.append((begin, length))
        free = ranges.free_ranges()
        cells = sorted([i for b, e in free for i in range(b, e)] + [i for b, n in taken for i in range(b, b + n)])
        assert cells == list(range(1, 100)) and ranges.num_free == 99 - sum(n for _, n in taken)
        assert all(left[1] < right[0] for left, right in zip(free, free[1:]))
