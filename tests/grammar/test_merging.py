"""Minimisation against the textbook table filling, on random automata and on long chains."""
from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from jradix.grammar import merging
from jradix.grammar.dfa import compile_language
from jradix.grammar.language import Lang, byte_set, chars, repeat, seq, text
from jradix.grammar.merging import distances_to_end, equal_states, longest_ways
from jradix.grammar.subsets import Row


def random_rows(rng: random.Random, num_states: int, num_classes: int) -> list[Row]:
    """Rows of an automaton whose states all lead on somewhere or accept."""
    rows = []
    for _ in range(num_states):
        masks: dict[int, int] = {}
        for byte in range(num_classes):
            if rng.random() < 0.7:
                target = rng.randrange(num_states)
                masks[target] = masks.get(target, 0) | 1 << byte
        rows.append([(mask, target) for target, mask in masks.items()])
    return rows


def dense(rows: list[Row], num_classes: int) -> np.ndarray:
    table = np.full((len(rows), num_classes), -1, np.int32)
    for state, row in enumerate(rows):
        for mask, target in row:
            table[state, [byte for byte in range(num_classes) if mask >> byte & 1]] = target
    return table


def distinguished(table: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """bool[Q + 1, Q + 1]: pairs that some text tells apart; the last state is the one that rejects."""
    num_states = len(table)
    table = np.append(np.where(table < 0, num_states, table), np.full((1, table.shape[1]), num_states), axis=0)
    accepting = np.append(accepting, False)
    differ = accepting[:, None] != accepting[None, :]
    while True:
        more = differ.copy()
        for column in table.T:
            more |= differ[column[:, None], column[None, :]]
        if (more == differ).all():
            return differ
        differ = more


def classes(rows: list[Row], accepting: list[bool], num_classes: int) -> np.ndarray:
    edges = np.array([(state, target) for state, row in enumerate(rows) for _, target in row] or np.zeros((0, 2)), int)
    return equal_states(dense(rows, num_classes), np.array(accepting, int), edges[:, 0], edges[:, 1])


def test_equal_states_are_exactly_those_that_no_text_tells_apart() -> None:
    rng = random.Random(0)
    for _ in range(300):
        num_states, num_classes = rng.randint(1, 14), rng.randint(1, 3)
        rows = random_rows(rng, num_states, num_classes)
        accepting = [rng.random() < 0.4 for _ in rows]
        distance = distances_to_end(rows, accepting)
        rows = [[(mask, target) for mask, target in row if distance[target] >= 0] for row in rows]
        found = classes(rows, accepting, num_classes)
        differ = distinguished(dense(rows, num_classes), np.array(accepting))[:-1, :-1]
        assert ((found[:, None] != found[None, :]) == differ).all()
        first = [found.tolist().index(number) for number in range(found.max() + 1)]
        assert first == sorted(first)


def test_equal_sums_of_different_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    original = merging._Refinement._sums

    def colliding(self: merging._Refinement, states: np.ndarray) -> np.ndarray:
        seeds.append(1)
        return np.zeros(len(states), np.uint64) if len(seeds) == 1 else original(self, states)

    monkeypatch.setattr(merging._Refinement, "_sums", colliding)
    rows: list[Row] = [[(1, 1)], [(2, 0)]]
    assert classes(rows, [True, True], 2).tolist() == [0, 1] and len(seeds) > 1


def test_too_many_rounds_keep_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MAX_ROUNDS", 3)
    dfa = compile_language(repeat(seq(repeat(text("a"), 0, 50), text("b")), 0))
    assert dfa.num_states >= 51 and dfa.accepts("a" * 50 + "bab") and not dfa.accepts("a" * 51 + "b")


def test_distances_and_longest_ways_of_a_small_graph() -> None:
    rows: list[Row] = [[(1, 1), (2, 2)], [(1, 3)], [(1, 2), (2, 3)], [], [(1, 4)]]
    assert distances_to_end(rows, [False, False, False, True, False]) == [2, 1, 1, 0, -1]
    edges = np.array([(state, target) for state, row in enumerate(rows) for _, target in row])
    assert longest_ways(5, edges[:, 0], edges[:, 1]).tolist() == [-1, 1, -1, 0, -1]


@pytest.mark.parametrize("part", [byte_set(b"x"), chars(((0x61, 0x10FFFF),))], ids=["byte", "character"])
def test_counted_characters_inside_a_loop_share_nothing_they_should_not(part: Lang) -> None:
    dfa = compile_language(repeat(seq(text("("), repeat(part, 0, 40), text(")")), 0))
    for lengths in itertools.product((0, 39, 40), repeat=2):
        assert dfa.accepts("".join(f"({'x' * length})" for length in lengths))
    assert not dfa.accepts("(" + "x" * 41 + ")") and not dfa.accepts("(" + "x" * 39 + "())")
