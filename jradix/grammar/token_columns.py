"""What every token does in every state of a byte automaton, found for all states at once and without a [Q, V] array.

The walk goes down the trie of token bytes. A trie node has a *column*, the map from states to where its bytes lead from
each; only alive (state, target) pairs are kept. Nodes with equal columns share one, so that each (column, byte class)
pair is expanded once however many tokens spell it. Large automata are walked in slices of states. Rows, classes and
masks are made of the columns in `token_dfa.py`.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jradix.errors import GrammarTooLarge
from jradix.grammar.dfa import Dfa
from jradix.grammar.vocabulary import Vocabulary

MAX_SLICE = 8_192               # states walked together
MAX_LEVEL_PAIRS = 1 << 22       # alive pairs of one trie level; beyond it the slice is cut into PARTS
PARTS = 8
MIN_SLICE = 64
MAX_WORK = 100_000_000          # alive pairs of a whole walk; a count, so that the verdict is always the same
DEEP, FEW_NODES = 16, 64        # so deep, so few trie nodes are mostly long runs, cheaper one by one
DENSE_DEGREES = (4, 32)         # alive bytes of a state; states of like degree are walked together


class Columns(NamedTuple):
    """Sparse maps: column c sends sources[i] to targets[i] for i in [starts[c], starts[c + 1]); sources ascend."""
    starts: np.ndarray
    sources: np.ndarray
    targets: np.ndarray

    def owner(self) -> np.ndarray:
        """The column of each entry."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def take(self, kept: np.ndarray) -> Columns:
        """The columns `kept`, in that order."""
        lengths = np.diff(self.starts)[kept]
        entries = _ranges(self.starts[kept], lengths)
        return Columns(_starts(lengths), self.sources[entries], self.targets[entries])


class Slice(NamedTuple):
    """Tables of some states: columns over positions in `states`, and each token's column (-1: allowed in none)."""
    states: np.ndarray
    columns: Columns
    token_column: np.ndarray


def walk_slices(dfa: Dfa, vocabulary: Vocabulary, live: np.ndarray) -> Iterator[Slice]:
    """Walks the trie from every live state. Tokens that lead to a state that is not `live` are left out.

    Raises:
      GrammarTooLarge: more than `MAX_WORK` alive pairs.
    """
    work = _Work()
    degree = ((dfa.next_state >= 0) * np.bincount(dfa.byte_class, minlength=dfa.num_classes)).sum(axis=1)
    # States with many and with few bytes apart: among the many, letters that only a keyword tells apart are one.
    kind = np.searchsorted(DENSE_DEGREES, degree, side="right")
    for group in range(len(DENSE_DEGREES) + 1):
        states = np.flatnonzero((kind == group) & live)
        pending = [states[i:i + MAX_SLICE] for i in range(0, len(states), MAX_SLICE)][::-1]
        while pending:
            part = pending.pop()
            done = _walk(dfa, vocabulary, live, part, work)
            if done is None:
                pending += np.array_split(part, PARTS)[::-1]
            else:
                yield done


class _Work:
    """Counts the pairs of one walk."""

    def __init__(self) -> None:
        self.spent = 0

    def spend(self, num_pairs: int) -> None:
        self.spent += num_pairs
        if self.spent > MAX_WORK:
            raise GrammarTooLarge(f"the automaton and the vocabulary meet in more than {MAX_WORK:,} pairs of state and "
                                  "token part; use a simpler grammar")


def _walk(dfa: Dfa, vocabulary: Vocabulary, live: np.ndarray, states: np.ndarray, work: _Work) -> Slice | None:
    """The slice of `states`; None if a trie level has too many alive pairs for that many states."""
    trie = vocabulary.trie
    table, num_classes = np.ascontiguousarray(dfa.next_state, np.int32).reshape(-1), dfa.num_classes
    frontier = Columns(np.array([0, len(states)]), np.arange(len(states), dtype=np.int32), states.astype(np.int32))
    nodes, node_column = np.zeros(1, np.int64), np.zeros(1, np.int64)
    ended: list[Columns] = []
    column_of_node = np.full(len(trie.byte), -1, np.int64)
    num_ended = depth = 0
    while True:
        if depth >= DEEP and len(nodes) <= FEW_NODES:
            deep, deep_nodes, column = _walk_deep(dfa, vocabulary, frontier, nodes, node_column, work)
            column_of_node[deep_nodes] = num_ended + column
            ended.append(deep)
            num_ended += len(deep.starts) - 1
            break
        depth += 1
        counts = trie.num_children[nodes]
        children = _ranges(trie.first_child[nodes], counts)
        if not children.size:
            break
        key = np.repeat(node_column, counts) * num_classes + dfa.byte_class[trie.byte[children]]
        pairs, pair = distinct_below(key, (len(frontier.starts) - 1) * num_classes)
        column, step = np.divmod(pairs, num_classes)
        lengths = np.diff(frontier.starts)[column]
        if lengths.sum() > MAX_LEVEL_PAIRS and len(states) > MIN_SLICE:
            return None
        work.spend(int(lengths.sum()))
        entries = _ranges(frontier.starts[column], lengths)
        owner = np.repeat(np.arange(len(pairs)), lengths)
        targets = table[frontier.targets[entries] * num_classes + step[owner]]
        alive = np.flatnonzero(targets >= 0)
        lengths = np.bincount(owner[alive], minlength=len(pairs))
        expanded = Columns(_starts(lengths), frontier.sources[entries[alive]], targets[alive])
        frontier, new_id = merge(expanded)
        node_column = new_id[pair]
        is_alive = node_column >= 0
        nodes, node_column = children[is_alive], node_column[is_alive]
        has_token = trie.has_token[nodes]
        used, column = distinct_below(node_column[has_token], len(frontier.starts) - 1)
        column_of_node[nodes[has_token]] = num_ended + column
        ended.append(frontier.take(used))
        num_ended += len(used)
    columns = _concatenate(ended)
    if not live.all():
        kept = live[columns.targets]
        lengths = np.bincount(columns.owner()[kept], minlength=num_ended)
        columns = Columns(_starts(lengths), columns.sources[kept], columns.targets[kept])
    columns, new_id = merge(columns)
    token_column = np.full(vocabulary.num_tokens, -1, np.int64)
    has_bytes = trie.token_node >= 0
    ends_at = column_of_node[trie.token_node[has_bytes]]
    token_column[has_bytes] = np.where(ends_at < 0, -1, np.append(new_id, -1)[ends_at])
    return Slice(states, columns, token_column)


def _walk_deep(dfa: Dfa, vocabulary: Vocabulary, frontier: Columns, nodes: np.ndarray, node_column: np.ndarray,
               work: _Work) -> tuple[Columns, np.ndarray, np.ndarray]:
    """Goes on from `nodes` node by node: columns of those below that end a token, these nodes, the column of each."""
    trie, table, byte_class = vocabulary.trie, dfa.next_state, dfa.byte_class
    maps = [(frontier.sources[begin:end], frontier.targets[begin:end])
            for begin, end in zip(frontier.starts.tolist(), frontier.starts[1:].tolist())]
    number_of: dict[tuple[bytes, bytes], int] = {}
    stepped: dict[tuple[int, int], int] = {}            # (map, byte class) -> map, -1 where no state is left
    found: list[tuple[int, int]] = []
    stack = list(zip(nodes.tolist(), node_column.tolist()))
    while stack:
        node, number = stack.pop()
        first = int(trie.first_child[node])
        for child in range(first, first + int(trie.num_children[node])):
            step = int(byte_class[trie.byte[child]])
            target = stepped.get((number, step))
            if target is None:
                sources, targets = maps[number]
                work.spend(len(sources))
                targets = table[targets, step]
                alive = targets >= 0
                pair = sources[alive], targets[alive]
                target = number_of.setdefault((pair[0].tobytes(), pair[1].tobytes()), len(maps)) if alive.any() else -1
                if target == len(maps):
                    maps.append(pair)
                stepped[number, step] = target
            if target >= 0:
                stack.append((child, target))
                if trie.has_token[child]:
                    found.append((child, target))
    used = sorted({number for _, number in found})
    place = {number: i for i, number in enumerate(used)}
    none = np.zeros(0, np.int32)
    columns = Columns(_starts(np.array([len(maps[number][0]) for number in used], np.int64)),
                      np.concatenate([none, *(maps[number][0] for number in used)]),
                      np.concatenate([none, *(maps[number][1].astype(np.int32) for number in used)]))
    return columns, np.array([node for node, _ in found], np.int64), \
        np.array([place[number] for _, number in found], np.int64)


def merge(columns: Columns) -> tuple[Columns, np.ndarray]:
    """Columns without doubles and empty ones, and the new number of each old column (-1: it was empty)."""
    lengths = np.diff(columns.starts)
    new_id = np.full(len(lengths), -1, np.int64)
    filled = np.flatnonzero(lengths)
    if not filled.size:
        return Columns(np.zeros(1, np.int64), columns.sources[:0], columns.targets[:0]), new_id
    sums = np.add.reduceat(mixed_pairs(columns.sources, columns.targets), columns.starts[filled])
    _, first, which = np.unique(sums, return_index=True, return_inverse=True)
    twin = filled[first][which]
    # Equal sums are almost surely equal columns; almost is not enough.
    others = np.flatnonzero(twin != filled)
    same = lengths[filled[others]] == lengths[twin[others]]
    twin[others[~same]] = filled[others[~same]]
    others = others[same]
    sizes = lengths[filled[others]]
    mine, theirs = _ranges(columns.starts[filled[others]], sizes), _ranges(columns.starts[twin[others]], sizes)
    differs = (columns.sources[mine] != columns.sources[theirs]) | (columns.targets[mine] != columns.targets[theirs])
    if differs.any():
        wrong = others[np.unique(np.repeat(np.arange(len(others)), sizes)[differs])]
        twin[wrong] = filled[wrong]
    kept, number = np.unique(twin, return_inverse=True)
    new_id[filled] = number
    return columns.take(kept), new_id


def mixed_pairs(sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """uint64 of each pair, by the finaliser of MurmurHash3."""
    mixed = sources.astype(np.uint64) << np.uint64(32) | targets.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(factor)
    return mixed ^ mixed >> np.uint64(33)


def live_over_single_bytes(dfa: Dfa, vocabulary: Vocabulary) -> np.ndarray:
    """bool[Q]: states that reach acceptance by tokens of one byte. All, where no byte is missing."""
    usable = np.zeros(dfa.num_classes, bool)
    usable[dfa.byte_class[~vocabulary.missing_bytes]] = True
    if usable.all():
        return np.ones(dfa.num_states, bool)
    state, step = np.nonzero((dfa.next_state >= 0) & usable)
    return reach(dfa.num_states, dfa.next_state[state, step], state, np.flatnonzero(dfa.accepting))


def live_over_tokens(dfa: Dfa, vocabulary: Vocabulary) -> np.ndarray:
    """bool[Q]: states that reach acceptance by any tokens. Costs a walk of its own."""
    edges = set()
    every = np.ones(dfa.num_states, bool)
    for part in walk_slices(dfa, vocabulary, every):
        pairs = part.states[part.columns.sources] * dfa.num_states + part.columns.targets
        edges.update(np.unique(pairs).tolist())
    sources, targets = np.divmod(np.fromiter(edges, np.int64, len(edges)), dfa.num_states)
    return reach(dfa.num_states, targets, sources, np.flatnonzero(dfa.accepting))


def reach(num_states: int, sources: np.ndarray, targets: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """bool[Q]: states on a path from a seed."""
    order = np.argsort(sources, kind="stable")
    targets = targets[order]
    counts = np.bincount(sources, minlength=num_states)
    starts = np.cumsum(counts) - counts
    reached = np.zeros(num_states, bool)
    reached[seeds] = True
    while seeds.size:
        found = targets[_ranges(starts[seeds], counts[seeds])]
        seeds = distinct(found[~reached[found]])
        reached[seeds] = True
    return reached


def distinct(values: np.ndarray) -> np.ndarray:
    """The different values, ascending. By sorting: `np.unique` hashes, which is slow for millions."""
    values = np.sort(values)
    return values[np.append(True, values[1:] != values[:-1])] if values.size else values


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers [starts[0], starts[0] + lengths[0]), then [starts[1], ...), and so on."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.append(0, np.cumsum(lengths))


def distinct_below(key: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The different values of `key`, all in [0, limit), ascending, and which of them each is."""
    if limit > 8 * len(key) + (1 << 20):
        return np.unique(key, return_inverse=True)
    seen = np.zeros(limit, bool)
    seen[key] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[key]


def _concatenate(parts: list[Columns]) -> Columns:
    lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(part.starts) for part in parts)])
    none = np.zeros(0, np.int32)
    return Columns(_starts(lengths), np.concatenate([none, *(part.sources for part in parts)]),
                   np.concatenate([none, *(part.targets for part in parts)]))
