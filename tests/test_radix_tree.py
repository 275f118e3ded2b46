"""The radix tree against oracles: a dictionary of page-aligned prefixes, and a naive leaf-first LRU."""
from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from jradix.cache.radix_tree import Namespace, Node, RadixTree

NAMESPACES = (Namespace(), Namespace(adapter="a"))
NUM_OPERATIONS = 3600     # per page size, three of them: more than 10,000 in all


class Oracle:
    """What the tree must hold: one page per page-aligned prefix, and which prefixes are locked."""

    def __init__(self, page_size: int, num_groups: int = 1):
        self.tree = RadixTree(page_size, num_groups)
        self.page_size = page_size
        self.num_groups = num_groups
        self.pages: dict[tuple[Namespace, tuple[int, ...]], int] = {}
        self.locks: list[tuple[Node, Namespace, tuple[int, ...]]] = []
        self._next_page = 1

    def prefixes(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            yield tuple(tokens[:end])

    def longest(self, tokens: Sequence[int], namespace: Namespace) -> list[int]:
        """Pages of the longest cached prefix."""
        found: list[int] = []
        for prefix in self.prefixes(tokens):
            if (namespace, prefix) not in self.pages:
                break
            found.append(self.pages[namespace, prefix])
        return found

    def match(self, tokens: Sequence[int], namespace: Namespace) -> None:
        before = structure(self.tree)
        match = self.tree.match(tokens, namespace)
        expected = self.longest(tokens, namespace)
        assert match.pages.tolist() == [[page + 1000 * g for page in expected] for g in range(self.num_groups)]
        assert match.num_tokens == len(expected) * self.page_size
        assert structure(self.tree) == before

    def insert(self, tokens: Sequence[int], namespace: Namespace, *, below: Node | None = None,
               above: tuple[int, ...] = ()) -> None:
        whole = (*above, *tokens)
        new = list(self.prefixes(whole))[len(above) // self.page_size:]
        ids = np.arange(self._next_page, self._next_page + len(new), dtype=np.int32)
        self._next_page += len(new)
        num_existing = sum((namespace, prefix) in self.pages for prefix in new)
        inserted = self.tree.insert(tokens, np.stack([ids + 1000 * g for g in range(self.num_groups)]), namespace,
                                    below=below)
        for prefix, page in zip(new, ids.tolist()):
            self.pages.setdefault((namespace, prefix), page)
        assert inserted.num_existing_pages == num_existing
        assert inserted.match.pages[0].tolist() == [self.pages[namespace, prefix] for prefix in new]
        assert inserted.match.num_tokens == len(new) * self.page_size

    def lock(self, tokens: Sequence[int], namespace: Namespace) -> None:
        match = self.tree.match(tokens, namespace, touch=False)
        self.locks.append((self.tree.lock(match), namespace, tuple(tokens[:match.num_tokens])))

    def insert_below(self, lock: int, tokens: Sequence[int]) -> None:
        node, namespace, prefix = self.locks[lock]
        self.insert(tokens, namespace, below=node, above=prefix)

    def unlock(self, lock: int) -> None:
        self.tree.unlock(self.locks.pop(lock)[0])

    def evict(self, num_pages: int) -> None:
        expected = naive_evict(self.tree, num_pages)
        evicted = self.tree.evict(num_pages)
        assert evicted.shape[0] == self.num_groups and evicted[0].tolist() == expected
        gone = set(evicted[0].tolist())
        assert len(gone) == evicted.shape[1]
        locked = self.locked_prefixes()
        dropped = {key for key, page in self.pages.items() if page in gone}
        assert len(dropped) == len(gone) and not dropped & locked
        for key in dropped:
            del self.pages[key]
        for namespace, prefix in self.pages:     # nothing is left below an evicted page
            assert len(prefix) == self.page_size or (namespace, prefix[:-self.page_size]) in self.pages

    def locked_prefixes(self) -> set[tuple[Namespace, tuple[int, ...]]]:
        return {(namespace, prefix) for _, namespace, tokens in self.locks for prefix in self.prefixes(tokens)}

    def check(self) -> None:
        self.tree.check_invariants()
        num_locked = len(self.locked_prefixes())
        assert (self.tree.num_evictable_pages, self.tree.num_locked_pages) == (len(self.pages) - num_locked, num_locked)
        held = [page for node in self.tree.nodes() for page in node.pages[0].tolist()]
        assert sorted(held) == sorted(self.pages.values())
        assert self.tree.root_locks() == len(self.locks)


def structure(tree: RadixTree) -> list[tuple[int, bytes, list[list[int]], int]]:
    return [(id(node), node.key, node.pages.tolist(), node.lock_count) for node in tree.nodes()]


def naive_evict(tree: RadixTree, num_pages: int) -> list[int]:
    """Pages a leaf-first LRU gives up, found by scanning all nodes for each victim."""
    nodes = list(tree.nodes())
    left = {id(node): node.pages[0].tolist() for node in nodes}
    evicted: list[int] = []
    while len(evicted) < num_pages:
        leaves = [node for node in nodes if left[id(node)] and not node.lock_count
                  and not any(left[id(child)] for child in (node.children or {}).values())]
        if not leaves:
            break
        victim = left[id(min(leaves, key=lambda node: node.last_used))]
        n = min(num_pages - len(evicted), len(victim))
        evicted += victim[len(victim) - n:]
        del victim[len(victim) - n:]
    return evicted


def insert(tree: RadixTree, tokens: Sequence[int], first_page: int = 1) -> None:
    num_pages = len(tokens) // tree.page_size
    tree.insert(tokens, np.arange(first_page, first_page + num_pages))


def random_tokens(rng: random.Random, page_size: int) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randrange(6 * page_size + 2))]


# -- random operations


@pytest.mark.parametrize("page_size, num_groups", [(1, 1), (2, 2), (4, 1)])
def test_tree_random_operations_agree_with_dictionary(page_size: int, num_groups: int) -> None:
    rng, oracle = random.Random(page_size), Oracle(page_size, num_groups)
    done: dict[str, int] = {}
    for _ in range(NUM_OPERATIONS):
        operation = rng.choice(["match", "insert", "insert", "lock", "unlock", "evict", "insert_below"])
        namespace, tokens = rng.choice(NAMESPACES), random_tokens(rng, page_size)
        if (operation in ("unlock", "insert_below") and not oracle.locks) or (operation == "lock"
                                                                              and len(oracle.locks) > 6):
            operation = "match"
        done[operation] = done.get(operation, 0) + 1
        match operation:
            case "match": oracle.match(tokens, namespace)
            case "insert": oracle.insert(tokens, namespace)
            case "lock": oracle.lock(tokens, namespace)
            case "unlock": oracle.unlock(rng.randrange(len(oracle.locks)))
            case "insert_below": oracle.insert_below(rng.randrange(len(oracle.locks)), tokens)
            case "evict": oracle.evict(rng.choice([0, 1, 2, 5, 1000]))
        oracle.check()
    assert min(done.values()) > NUM_OPERATIONS // 20, done


class TreeMachine(RuleBasedStateMachine):
    """The same operations chosen by hypothesis, so that a failure is shrunk to a few steps."""
    page_size = 2
    namespaces = st.sampled_from(NAMESPACES)
    tokens = st.lists(st.integers(0, 1), max_size=9)

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle(self.page_size)

    @rule(tokens=tokens, namespace=namespaces)
    def match(self, tokens: list[int], namespace: Namespace) -> None:
        self.oracle.match(tokens, namespace)

    @rule(tokens=tokens, namespace=namespaces)
    def insert(self, tokens: list[int], namespace: Namespace) -> None:
        self.oracle.insert(tokens, namespace)

    @rule(tokens=tokens, namespace=namespaces)
    def lock(self, tokens: list[int], namespace: Namespace) -> None:
        self.oracle.lock(tokens, namespace)

    @precondition(lambda self: self.oracle.locks)
    @rule(data=st.data(), tokens=tokens)
    def insert_below(self, data: st.DataObject, tokens: list[int]) -> None:
        self.oracle.insert_below(data.draw(st.integers(0, len(self.oracle.locks) - 1)), tokens)

    @precondition(lambda self: self.oracle.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.oracle.unlock(data.draw(st.integers(0, len(self.oracle.locks) - 1)))

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        self.oracle.evict(num_pages)

    @invariant()
    def check(self) -> None:
        self.oracle.check()


def test_tree_stateful_operations_agree_with_dictionary() -> None:
    run_state_machine_as_test(TreeMachine, settings=settings(
        max_examples=30, stateful_step_count=40, deadline=None, derandomize=True, database=None))


def test_evict_single_page_edges_follows_least_recent_use() -> None:
    """Edges of one page each, so that the time of last use of every prefix is known without looking into the tree."""
    rng, tree = random.Random(5), RadixTree(1)
    used: dict[tuple[int, ...], int] = {}
    page_of: dict[tuple[int, ...], int] = {}
    num_evicted = 0
    for now in range(1, 1500):
        tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 6)))
        match rng.randrange(3):
            case 0:
                for end in range(1, len(tokens) + 1):
                    page_of.setdefault(tokens[:end], now * 10 + end)
                    tree.insert(tokens[:end], [page_of[tokens[:i]] for i in range(1, end + 1)])
                    used.update({tokens[:i]: now for i in range(1, end + 1)})
            case 1:
                found = tree.match(tokens).num_tokens
                used.update({tokens[:i]: now for i in range(1, found + 1)})
            case 2 if used:
                parents = {prefix[:-1] for prefix in used}
                victim = min((prefix for prefix in used if prefix not in parents), key=lambda prefix: used[prefix])
                assert tree.evict(1).tolist() == [[page_of.pop(victim)]]
                del used[victim]
                num_evicted += 1
        tree.check_invariants()
    assert num_evicted > 200


# -- matching


def test_match_query_without_whole_page_changes_nothing() -> None:
    """R03: keys are whole pages; a query or a remainder shorter than one stores and finds nothing."""
    tree = RadixTree(4)
    insert(tree, [1, 2, 3, 4])
    before = structure(tree)
    assert [tree.match(query).num_tokens for query in ([1, 2, 3], [], [1, 2, 3, 4, 5])] == [0, 0, 4]
    inserted = tree.insert([7, 8, 9], np.empty((1, 0), np.int32))
    assert inserted.num_existing_pages == 0 and inserted.match.num_tokens == 0
    assert structure(tree) == before and all(node.key for node in tree.nodes())
    tree.check_invariants()
    assert tree.evict(10).tolist() == [[1]]
    assert tree.insert([7, 8, 9], np.empty((1, 0), np.int32)).match.pages.shape == (1, 0)


def test_match_inside_an_edge_gives_whole_pages_and_no_split() -> None:
    tree = RadixTree(2)
    insert(tree, [1, 2, 3, 4, 5, 6])
    match = tree.match([1, 2, 3, 4, 5, 9])
    assert (match.num_tokens, match.num_node_pages, match.pages.tolist()) == (4, 2, [[1, 2]])
    assert len(list(tree.nodes())) == 1


def test_match_first_page_differs_only_in_its_last_token_finds_nothing() -> None:
    tree = RadixTree(4)
    insert(tree, [1, 2, 3, 4])
    assert tree.match([1, 2, 3, 5]).num_tokens == 0


def test_match_query_shorter_than_the_edge_stops_at_its_end() -> None:
    tree = RadixTree(2)
    insert(tree, [1, 2, 3, 4, 5, 6])
    assert tree.match([1, 2, 3, 4, 5]).num_tokens == 4
    assert tree.match([1]).num_tokens == 0


@pytest.mark.parametrize("as_array", [list, tuple, lambda t: np.array(t, np.int32), lambda t: np.array(t, np.int64)])
def test_match_any_kind_of_sequence_agrees(as_array: object) -> None:
    tree = RadixTree(2)
    tokens = [0, 2**31 - 1, 2**24, 255, 256, 65535]
    tree.insert(as_array(tokens), np.arange(1, 4, dtype=np.int32))
    assert tree.match(tokens).num_tokens == 6
    assert tree.match(as_array(tokens[:4] + [255, 256])).num_tokens == 4


def test_match_large_token_ids_keep_children_in_order() -> None:
    tree = RadixTree(1)
    ids = [2**31 - 1, 0, 1, 255, 256, 2**16, 2**24, 2**30, 2**31 - 2]
    for page, token in enumerate(ids, 1):
        tree.insert([token], [page])
        tree.check_invariants()
    assert [tree.match([token]).pages.tolist() for token in ids] == [[[page]] for page in range(1, len(ids) + 1)]
    in_order = [ids[child.pages[0, 0] - 1] for child in tree.match([]).node.children.values()]
    assert in_order == sorted(ids)


def test_match_namespaces_with_equal_joined_text_stay_apart() -> None:
    """R11: fields are compared one by one, never joined; R09 at the level of the tree."""
    pairs = [(Namespace(adapter="s"), Namespace(salt="s")), (Namespace(adapter="a", salt="bc"),
                                                             Namespace(adapter="ab", salt="c")),
             (Namespace(model="m", adapter=None), Namespace(model="m", adapter="")),
             (Namespace(weights_version=1), Namespace(weights_version=2))]
    for one, other in pairs:
        tree = RadixTree(1)
        tree.insert([1, 2, 3], [1, 2, 3], one)
        assert tree.match([1, 2, 3], one).num_tokens == 3
        assert tree.match([1, 2, 3], other).num_tokens == 0
        tree.insert([1, 2, 3], [4, 5, 6], other)
        assert tree.match([1, 2, 3], other).pages.tolist() == [[4, 5, 6]]
        tree.check_invariants()


def test_match_algebraic_twins_of_a_rolling_hash_stay_apart() -> None:
    """R13: token ids decide, nothing is hashed but the namespace."""
    base = [40, 41, 42, 43]
    tree = RadixTree(4)
    insert(tree, base)
    for j in range(3):
        twin = list(base)
        twin[j] += 31
        twin[j + 1] -= 1
        assert tree.match(twin).num_tokens == 0
        assert tree.match(twin[::-1]).num_tokens == 0
    assert tree.match([5, 6, 7, 8]).num_tokens == 0
    assert tree.match(base).num_tokens == 4


def test_match_tokens_whose_bytes_overlap_across_ids_stay_apart() -> None:
    """R13: [1, 0] and [0, 256] share bytes when they are shifted by one; a match must respect token borders."""
    tree = RadixTree(1)
    insert(tree, [0, 1, 0, 1])
    assert tree.match([0, 256, 0, 256]).num_tokens == 1
    assert tree.match([1 << 24]).num_tokens == 0


# -- locks


def test_insert_beside_a_locked_path_splits_it_with_its_lock() -> None:
    """R04: counters after each call, both halves of the split carry the lock."""
    tree, seen = RadixTree(1), []

    def note() -> None:
        tree.check_invariants()
        seen.append((tree.num_evictable_pages, tree.num_locked_pages))

    insert(tree, [1, 2, 3, 4, 5, 6])
    note()
    handle = tree.lock(tree.match([1, 2, 3, 4, 5, 6]))
    note()
    insert(tree, [1, 2, 3, 9, 8, 7], first_page=11)
    note()
    assert sorted((node.num_pages, node.lock_count) for node in tree.nodes()) == [(3, 0), (3, 1), (3, 1)]
    tree.unlock(handle)
    note()
    assert seen == [(6, 0), (0, 6), (3, 6), (9, 0)]


def test_evict_everything_locked_frees_nothing() -> None:
    """R05: the matched node itself is protected, not only its parents."""
    tree = RadixTree(1)
    insert(tree, [1, 2])
    insert(tree, [1, 2, 3, 4])
    handle = tree.lock(tree.match([1, 2, 3, 4]))
    assert tree.evict(100).shape == (1, 0) and tree.match([1, 2, 3, 4]).num_tokens == 4
    tree.unlock(handle)
    assert tree.evict(100).shape == (1, 4)
    tree.check_invariants()


def test_lock_partial_match_pins_only_what_matched() -> None:
    """R06: the edge is split at the end of the match; the rest stays evictable."""
    tree = RadixTree(1)
    insert(tree, range(1, 9))
    match = tree.match([1, 2, 3, 99])
    handle = tree.lock(match)
    assert match.num_tokens == 3 and tree.evict(100).tolist() == [[4, 5, 6, 7, 8]]
    assert tree.match(range(1, 9)).num_tokens == 3
    tree.unlock(handle)
    assert tree.evict(100).tolist() == [[1, 2, 3]]
    tree.check_invariants()
    assert not list(tree.nodes())


def test_unlock_twice_asserts() -> None:
    tree = RadixTree(1)
    insert(tree, [1, 2])
    handle = tree.lock(tree.match([1, 2]))
    tree.unlock(handle)
    with pytest.raises(AssertionError, match="unlock without lock"):
        tree.unlock(handle)
    tree.check_invariants()


def test_unlock_in_any_order_after_splits_returns_to_zero() -> None:
    tree = RadixTree(1)
    insert(tree, range(10))
    handles = [tree.lock(tree.match(range(n))) for n in (10, 3, 7, 0, 3)]
    assert tree.num_locked_pages == 10
    for handle in (handles[i] for i in (1, 0, 4, 3, 2)):
        tree.unlock(handle)
        tree.check_invariants()
    assert (tree.num_evictable_pages, tree.num_locked_pages, tree.root_locks()) == (10, 0, 0)


def test_lock_unknown_namespace_holds_its_root_and_grows_below_it() -> None:
    tree, namespace = RadixTree(2), Namespace(adapter="new")
    handle = tree.lock(tree.match([1, 2], namespace))
    tree.insert([1, 2, 3, 4], [1, 2], namespace, below=handle)
    assert tree.match([1, 2, 3, 4], namespace).num_tokens == 4 and tree.root_locks() == 1
    tree.unlock(handle)
    tree.check_invariants()
    assert tree.evict(9).shape == (1, 2)


# -- insertion


@pytest.mark.parametrize("num_tokens, shape", [(4, (1, 1)), (4, (1, 3)), (4, (2, 2)), (5, (1, 3)), (0, (1, 1))])
def test_insert_wrong_number_of_pages_raises_and_changes_nothing(num_tokens: int, shape: tuple[int, int]) -> None:
    tree = RadixTree(2)
    insert(tree, [8, 8])
    before = structure(tree)
    with pytest.raises(ValueError, match=f"{num_tokens} tokens hold {num_tokens // 2} whole pages of 2"):
        tree.insert(list(range(num_tokens)), np.ones(shape, np.int32))
    assert structure(tree) == before
    tree.check_invariants()


def test_insert_does_not_keep_a_view_of_the_callers_pages() -> None:
    tree, pages = RadixTree(1), np.array([[1, 2, 3]], np.int32)
    tree.insert([5, 6, 7], pages)
    pages[:] = 0
    assert tree.match([5, 6, 7]).pages.tolist() == [[1, 2, 3]]


def test_insert_two_groups_keeps_their_page_ids_apart() -> None:
    tree = RadixTree(1, num_groups=2)
    tree.insert([1, 2, 3], [[1, 2, 3], [7, 8, 9]])
    tree.insert([1, 2, 5], [[4, 5, 6], [10, 11, 12]])
    assert tree.match([1, 2, 5]).pages.tolist() == [[1, 2, 6], [7, 8, 12]]
    tree.check_invariants()
    tree.match([1, 2, 5])
    assert tree.evict(1).tolist() == [[3], [9]]


# -- eviction


def test_evict_least_recently_used_goes_first() -> None:
    """E01: a match counts as a use; insertion order does not decide."""
    tree = RadixTree(1)
    insert(tree, [1, 2, 3, 4])
    insert(tree, [5, 6, 7, 8], first_page=5)
    assert tree.match([1, 2, 3, 4]).num_tokens == 4
    assert tree.evict(4).tolist() == [[5, 6, 7, 8]]
    assert tree.match([1, 2, 3, 4]).num_tokens == 4


def test_match_without_touch_does_not_count_as_a_use() -> None:
    tree = RadixTree(1)
    insert(tree, [1])
    insert(tree, [2], first_page=2)
    tree.match([1], touch=False)
    assert tree.evict(1).tolist() == [[1]]


def test_evict_chain_goes_from_its_end() -> None:
    """E07: children before parents, so that every page left can be reached."""
    tree = RadixTree(1)
    for end in (4, 8, 12):
        insert(tree, range(end))
    assert len(list(tree.nodes())) == 3
    for left, pages in ((8, [9, 10, 11, 12]), (4, [5, 6, 7, 8]), (0, [1, 2, 3, 4])):
        assert tree.evict(4).tolist() == [pages]
        tree.check_invariants()
        assert tree.match(range(12), touch=False).num_tokens == left


def test_evict_part_of_an_edge_keeps_its_front() -> None:
    tree = RadixTree(2)
    insert(tree, range(10))
    assert tree.evict(2).tolist() == [[4, 5]]
    assert tree.match(range(10)).pages.tolist() == [[1, 2, 3]]
    insert(tree, range(10), first_page=11)
    assert tree.match(range(10)).pages.tolist() == [[1, 2, 3, 14, 15]]
    tree.check_invariants()


def test_evict_zero_and_empty_tree_return_no_pages() -> None:
    tree = RadixTree(1, num_groups=2)
    assert tree.evict(5).shape == (2, 0)
    tree.insert([1], [[1], [1]])
    assert tree.evict(0).shape == (2, 0) and tree.num_evictable_pages == 1


# -- sizes


def test_match_very_long_edge_finds_the_first_difference() -> None:
    tree, tokens = RadixTree(4), np.arange(100_000, dtype=np.int32)
    insert(tree, tokens)
    other = tokens.copy()
    other[77_777] = 0
    assert tree.match(tokens).num_tokens == 100_000
    assert tree.match(other).num_tokens == 77_776
    insert(tree, other, first_page=50_001)
    assert sorted(node.num_pages for node in tree.nodes()) == [5556, 5556, 19_444]
    tree.check_invariants()
    assert tree.evict(10**6).shape == (1, 30_556)


def test_match_among_many_children_finds_the_right_one() -> None:
    tree, order = RadixTree(2), list(range(5000))
    random.Random(1).shuffle(order)
    for token in order:
        tree.insert([token // 70, token], [token + 1])
    tree.check_invariants()
    assert all(tree.match([token // 70, token]).pages.tolist() == [[token + 1]] for token in range(0, 5000, 7))
    assert tree.match([70, 9999]).num_tokens == 0
    used, unused = range(0, 5000, 7), [token for token in order if token % 7]
    assert tree.evict(5000).tolist() == [[token + 1 for token in (*unused, *used)]]
