"""Which states of an automaton are equal: the coarsest partition; one state of each class makes the smallest automaton.

Classes are split until the states of each have the same row of classes (Moore), and a state is looked at again only
when one it leads to has moved to a class of at most half the size (Hopcroft). Rows are compared by 64-bit sums, and the
result is checked.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from jradix.grammar.subsets import Row

NEVER = -1
MAX_ROUNDS = 40_000         # about 0.2 ms each; beyond them all states stay


def distances_to_end(rows: Sequence[Row], accepting: Sequence[bool]) -> list[int]:
    """Bytes of the shortest accepted text from each state; -1 where there is none."""
    ways_in: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for _, target in row:
            ways_in[target].append(state)
    found = [0 if accepts else NEVER for accepts in accepting]
    queue = deque(state for state, accepts in enumerate(accepting) if accepts)
    while queue:
        state = queue.popleft()
        further = found[state] + 1
        for before in ways_in[state]:
            if found[before] < 0:
                found[before] = further
                queue.append(before)
    return found


def longest_ways(num_states: int, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """int64[Q]: edges of the longest way from each state, -1 where there are cycles on the way."""
    left = np.bincount(sources, minlength=num_states)
    order = np.argsort(targets, kind="stable")
    begins = np.searchsorted(targets[order], np.arange(num_states + 1)).tolist()
    before = sources[order].tolist()
    found, num_left = [NEVER] * num_states, left.tolist()
    queue = deque(np.flatnonzero(left == 0).tolist())
    for state in queue:
        found[state] = 0
    while queue:
        state = queue.popleft()
        further = found[state] + 1
        for other in before[begins[state]:begins[state + 1]]:
            num_left[other] -= 1
            if not num_left[other]:                     # the last way on that is known is the longest
                found[other] = further
                queue.append(other)
    return np.array(found, np.int64)


def equal_states(next_state: np.ndarray, kinds: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """int64[Q]: the class of each state, in the order of the first state of each.

    Args:
      next_state: int32[Q, K]; -1 rejects.
      kinds: int[Q]; states of different kind are different. Whether a state accepts is part of it.
      sources, targets: every pair of a state and one it leads to, at least once.
    """
    num_states = len(next_state)
    longest = longest_ways(num_states, sources, targets) + 1
    _, start = np.unique(kinds * (longest.max() + 1) + longest, return_inverse=True)
    order = np.argsort(targets, kind="stable")
    begins = np.searchsorted(targets[order], np.arange(num_states + 1))
    before = sources[order]
    seed = 0
    while True:
        label = _Refinement(next_state, start, begins, before, seed).run()
        _, first, label = np.unique(label, return_index=True, return_inverse=True)
        if all((_labels(label, block) == _labels(label, next_state[first[label[begin:begin + len(block)]]])).all()
               for begin, block in _blocks(next_state)):
            rank = np.empty(len(first), np.int64)
            rank[np.argsort(first)] = np.arange(len(first))
            return rank[label]
        seed += 1                                       # two different rows had the same sum


class _Refinement:
    """One refinement: the classes of `label` are split until the states of each have equal sums of their rows."""

    def __init__(self, next_state: np.ndarray, start: np.ndarray, begins: np.ndarray, before: np.ndarray, seed: int
                 ) -> None:
        num_states, num_classes = next_state.shape
        self.next_state, self.label = next_state, start.astype(np.int64)
        self.begins, self.before = begins, before
        random = np.random.Generator(np.random.PCG64(seed))
        self.weights = random.integers(1 << 63, size=num_classes, dtype=np.uint64) << np.uint64(1) | np.uint64(1)
        self.names = random.integers(1 << 63, size=num_states + 1, dtype=np.uint64)     # of labels; the last: no state
        self.name_of_state = np.append(self.names[self.label], self.names[-1])
        self.sizes = np.bincount(self.label, minlength=num_states)
        self.num_labels = int(self.label.max()) + 1

    def run(self) -> np.ndarray:
        """The label of each state once nothing splits any more; all different if that takes too long."""
        every = np.arange(len(self.label))
        sums = self._sums(every)
        moved = self._split(every, sums)
        for _ in range(MAX_ROUNDS):
            if not moved.size:
                return self.label
            counts = self.begins[moved + 1] - self.begins[moved]
            ends = np.cumsum(counts)
            entries = np.arange(ends[-1]) + np.repeat(self.begins[moved] - (ends - counts), counts)
            dirty = _sorted_unique(self.before[entries])
            found = self._sums(dirty)
            is_changed = found != sums[dirty]
            dirty, found = dirty[is_changed], found[is_changed]
            sums[dirty] = found
            moved = self._split(dirty, found)
        return every

    def _sums(self, states: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.uint64), *(self.name_of_state[block] @ self.weights
                                                         for _, block in _blocks(self.next_state, states))])

    def _split(self, states: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Parts the labels of `states`, whose rows are new, by these; returns the states with another label."""
        if not states.size:
            return states
        label = self.label[states]
        order = np.lexsort((sums, label))
        states, label, sums = states[order], label[order], sums[order]
        is_first = np.append(True, (label[1:] != label[:-1]) | (sums[1:] != sums[:-1]))
        piece = np.cumsum(is_first) - 1
        piece_size, piece_label = np.bincount(piece), label[is_first]
        first_piece = np.flatnonzero(np.append(True, piece_label[1:] != piece_label[:-1]))
        labels = piece_label[first_piece]
        largest = np.maximum.reduceat(piece_size, first_piece)
        num_clean = self.sizes[labels] - np.add.reduceat(piece_size, first_piece)
        group = np.repeat(np.arange(len(labels)), np.diff(np.append(first_piece, len(piece_label))))
        # The largest piece keeps the label; the states whose row is as before are a piece too.
        keeps = (piece_size == largest[group]) & (num_clean[group] < piece_size)
        keeps &= ~_repeated(group, keeps)
        new_label = piece_label.copy()
        new_label[~keeps] = self.num_labels + np.arange(int((~keeps).sum()))
        self.num_labels += int((~keeps).sum())
        moved = [states[~keeps[piece]]]
        loses = labels[(num_clean > 0) & (num_clean < largest)]
        if loses.size:
            name = np.full(self.num_labels, NEVER)
            name[loses] = self.num_labels + np.arange(len(loses))
            self.num_labels += len(loses)
            clean = name[self.label]
            clean[states] = NEVER
            others = np.flatnonzero(clean >= 0)
            self._relabel(others, clean[others])
            moved.append(others)
        self._relabel(states, new_label[piece])
        return np.concatenate(moved)

    def _relabel(self, states: np.ndarray, label: np.ndarray) -> None:
        np.subtract.at(self.sizes, self.label[states], 1)
        np.add.at(self.sizes, label, 1)
        self.label[states] = label
        self.name_of_state[states] = self.names[label]


def _repeated(group: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """bool: chosen entries that are not the first of their (sorted) group."""
    at = np.flatnonzero(chosen)
    found = np.zeros(len(group), bool)
    found[at[1:]] = group[at[1:]] == group[at[:-1]]
    return found


def _labels(label: np.ndarray, block: np.ndarray) -> np.ndarray:
    return np.append(label, NEVER)[block]


def _blocks(table: np.ndarray, states: np.ndarray | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """(first position, rows) of the rows of `states`, or all, about 2^20 entries at a time."""
    size = max((1 << 20) // table.shape[1], 1)
    for begin in range(0, len(table) if states is None else len(states), size):
        yield begin, table[begin:begin + size] if states is None else table[states[begin:begin + size]]


def _sorted_unique(values: np.ndarray) -> np.ndarray:
    values = np.sort(values)
    return values[np.append(True, values[1:] != values[:-1])] if values.size else values
