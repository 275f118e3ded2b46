"""The radix tree against oracles: a dictionary of page-aligned prefixes, a trie of tokens, a naive leaf-first LRU."""
from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from jradix.cache.node import Namespace, Node, Partial, Tier
from jradix.cache.radix_tree import RadixTree

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


# -- tails


def whole_page(tree: RadixTree, tokens: Sequence[int], page: int = 1) -> Node:
    """A page of `tokens`, and the node that tails go below."""
    return tree.insert(tokens, [page]).match.node


def add_tail(tree: RadixTree, tokens: Sequence[int], page: int, below: Node | None = None) -> bool:
    taken = tree.insert_tail(tokens, np.array([page]), below=below)
    tree.check_invariants()
    return taken


def freed(tree: RadixTree) -> list[int]:
    """Device pages the tree gave up on its own since the last call."""
    pages = [page for ids in tree.freed_pages for page in ids[0].tolist()]
    tree.freed_pages.clear()
    return pages


def found(tree: RadixTree, tokens: Sequence[int]) -> int:
    """Tokens of a match to the last one, on device and host."""
    match = tree.match(tokens, touch=False)
    return match.num_tokens + match.num_host_pages * tree.page_size + (match.partial.num_tokens if match.partial else 0)


@pytest.mark.parametrize("query, num_tokens", [
    ([5, 6, 7, 8, 9], 2), ([5, 6], 2), ([5], 1), ([5, 9], 1), ([9], 0), ([], 0), ([5, 6, 7], 2)])
def test_match_goes_on_into_a_tail(query: list[int], num_tokens: int) -> None:
    tree = RadixTree(4)
    node = whole_page(tree, [1, 2, 3, 4])
    assert add_tail(tree, [5, 6], 9, node)
    match = tree.match([1, 2, 3, 4, *query])
    tail, = node.children.values()
    assert (match.num_tokens, match.node, match.num_node_pages, match.pages.tolist()) == (4, node, 1, [[1]])
    assert match.partial == (Partial(tail, 0, num_tokens) if num_tokens else None)
    assert (tail.pages.tolist(), tail.num_pages, tree.num_evictable_pages) == ([[9]], 1, 2)


def test_match_goes_on_inside_an_edge() -> None:
    """A full page lends its first tokens like a tail; the first page of a child as well."""
    tree = RadixTree(4)
    insert(tree, range(12))
    node, = tree.nodes()
    assert tree.match([0, 1, 2, 3, 4, 5, 99, 7]).partial == Partial(node, 1, 2)
    assert tree.match([0, 1, 99]).partial == Partial(node, 0, 2)
    assert tree.match(range(8)).partial is None and tree.match([*range(8), 50]).partial is None
    assert tree.match(range(11)).partial == Partial(node, 2, 3)
    assert len(list(tree.nodes())) == 1


def test_insert_tail_longer_one_replaces_the_shorter() -> None:
    tree = RadixTree(4)
    node = whole_page(tree, [1, 2, 3, 4])
    for page, tokens in ((7, [5]), (8, [5, 6]), (9, [5, 6, 7])):
        assert add_tail(tree, tokens, page, node)
        assert freed(tree) == ([page - 1] if page > 7 else []) and len(node.children) == 1
        assert found(tree, [1, 2, 3, 4, 5, 6, 7, 8]) == 4 + len(tokens)
    assert tree.num_evictable_pages == 2


@pytest.mark.parametrize("tokens", [[5], [5, 6], [5, 6, 7]])
def test_insert_tail_that_a_tail_begins_with_is_refused(tokens: list[int]) -> None:
    tree = RadixTree(4)
    node = whole_page(tree, [1, 2, 3, 4])
    assert add_tail(tree, [5, 6, 7], 8, node)
    before = structure(tree)
    assert not add_tail(tree, tokens, 9, node)
    assert structure(tree) == before and freed(tree) == []


@pytest.mark.parametrize("tokens", [[5], [5, 6], [5, 6, 7]])
def test_insert_tail_that_a_full_page_begins_with_is_refused(tokens: list[int]) -> None:
    tree = RadixTree(4)
    insert(tree, range(1, 13))
    node = tree.lock(tree.match(range(1, 5)))
    before = structure(tree)
    assert not add_tail(tree, tokens, 9, node) and structure(tree) == before
    assert add_tail(tree, [*tokens[:-1], 99], 9, node)


def test_insert_full_page_that_begins_with_a_tail_replaces_it() -> None:
    tree = RadixTree(4)
    node = whole_page(tree, [1, 2, 3, 4])
    assert add_tail(tree, [5, 6], 8, node) and add_tail(tree, [5, 9], 9, node)
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3])
    tree.check_invariants()
    assert freed(tree) == [8] and found(tree, [1, 2, 3, 4, 5, 9, 9]) == 6
    assert sorted(len(child.key) // 4 for child in node.children.values()) == [2, 8]


def test_insert_full_page_that_parts_from_a_tail_leaves_it() -> None:
    tree = RadixTree(4)
    node = whole_page(tree, [1, 2, 3, 4])
    assert add_tail(tree, [5, 6, 7], 9, node)
    tree.insert([1, 2, 3, 4, 5, 6, 8, 8], [1, 2])
    assert freed(tree) == [] and len(node.children) == 2
    assert found(tree, [1, 2, 3, 4, 5, 6, 7, 7]) == 7 and found(tree, [1, 2, 3, 4, 5, 6, 8, 9]) == 7


@pytest.mark.parametrize("longer", [[5, 6, 7], [5, 6, 7, 8]])
def test_locked_tail_stays_beside_what_continues_it(longer: list[int]) -> None:
    """Somebody reads it: it goes by eviction, after its lock."""
    tree = RadixTree(4)
    node = whole_page(tree, [1, 2, 3, 4])
    assert add_tail(tree, [5, 6], 8, node)
    handle = tree.lock(tree.match([1, 2, 3, 4, 5, 6]), with_partial=True)
    if len(longer) < 4:
        assert add_tail(tree, longer, 9, node)
    else:
        tree.insert([1, 2, 3, 4, *longer], [1, 9])
    tree.check_invariants()
    assert freed(tree) == [] and sorted(page for child in node.children.values() for page in child.pages[0]) == [8, 9]
    assert found(tree, [1, 2, 3, 4, 5, 6, 7, 8]) == 4 + len(longer)
    assert tree.evict(9).tolist() == [[9]]
    tree.unlock(handle)
    assert tree.evict(9).tolist() == [[8, 1]]


def test_lock_without_the_partial_page_leaves_a_tail_evictable() -> None:
    tree = RadixTree(4)
    node = whole_page(tree, [1, 2, 3, 4])
    add_tail(tree, [5, 6], 8, node)
    assert tree.lock(tree.match([1, 2, 3, 4, 5, 6])) is node
    assert tree.evict(9).tolist() == [[8]]


def test_lock_with_a_partial_page_inside_an_edge_splits_after_it() -> None:
    tree = RadixTree(2)
    insert(tree, range(8))
    handle = tree.lock(tree.match([0, 1, 2, 9]), with_partial=True)
    assert handle.pages.tolist() == [[1, 2]] and tree.num_locked_pages == 2
    assert tree.evict(9).tolist() == [[3, 4]]


def test_match_takes_the_closest_of_many_tails() -> None:
    tree = RadixTree(8)
    for page, tokens in enumerate(([1], [2, 2, 2], [2, 3], [2, 3, 5, 5], [2, 3, 7], [2, 9], [3, 3])):
        tree.insert_tail(tokens, np.array([page + 1]))
    tree.check_invariants()
    assert freed(tree) == [3]
    for query, num_tokens in (([2, 3, 5, 6], 3), ([2, 3, 6], 2), ([2, 3, 7, 1], 3), ([2, 4], 1), ([2, 9, 9], 2),
                              ([4], 0), ([0], 0), ([3], 1), ([2, 2, 2, 2], 3)):
        assert found(tree, query) == num_tokens, query


def test_tail_at_the_root_is_found_and_its_eviction_leaves_no_root() -> None:
    tree, namespace = RadixTree(16), Namespace(salt="a")
    assert tree.insert_tail([1, 2, 3], np.array([4]), namespace)
    match = tree.match([1, 2, 3, 4, 5], namespace)
    assert (match.num_tokens, match.partial.num_tokens, tree.match([1, 2, 3]).partial) == (0, 3, None)
    assert match.node is tree.roots[namespace]
    assert tree.evict(5).tolist() == [[4]] and not tree.roots
    tree.check_invariants()


@pytest.mark.parametrize("num_tokens", [0, 4, 5])
def test_insert_tail_of_no_or_too_many_tokens_raises(num_tokens: int) -> None:
    tree = RadixTree(4)
    with pytest.raises(ValueError, match=f"a tail of {num_tokens} tokens: expected fewer than a page of 4"):
        tree.insert_tail(list(range(num_tokens)), np.array([1]))
    assert not tree.roots


def test_insert_tail_two_groups_keep_their_page_ids_apart() -> None:
    tree, page = RadixTree(4, num_groups=2), np.array([3, 8])
    assert tree.insert_tail([1, 2], page)
    page[:] = 0
    assert tree.match([1, 2, 3]).partial.node.pages.tolist() == [[3], [8]]
    assert tree.insert_tail([1, 2, 3], np.array([4, 9]))
    assert [ids.tolist() for ids in tree.freed_pages] == [[[3], [8]]]


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 64])
def test_match_random_pages_and_tails_finds_every_token(page_size: int) -> None:
    """Against a trie of single tokens that forgets nothing; each page id stays in one place."""
    rng, tree = random.Random(page_size), RadixTree(page_size)
    trie: dict[int, dict] = {}
    handles: list[Node] = []
    owned: set[int] = set()
    histories: list[list[int]] = [[]]
    num_refused = num_replaced = 0

    def num_known(tokens: list[int]) -> int:
        node, n = trie, 0
        while n < len(tokens) and tokens[n] in node:
            node, n = node[tokens[n]], n + 1
        return n

    def learn(tokens: list[int]) -> None:
        node = trie
        for token in tokens:
            node = node.setdefault(token, {})

    for now in range(250):
        start = rng.choice(histories)
        tokens = start[:rng.randint(0, len(start))] + [rng.randrange(2) for _ in range(rng.randint(1, page_size + 2))]
        tokens = tokens[:5 * page_size]
        assert found(tree, tokens) == num_known(tokens)
        num_whole = len(tokens) // page_size
        ids = np.arange(10 * now + 1, 10 * now + num_whole + 2, dtype=np.int32)
        inserted = tree.insert(tokens, ids[:num_whole])
        node = tree.lock(inserted.match, is_use=False) if num_whole else None
        owned.update(ids[inserted.num_existing_pages:num_whole].tolist())
        learn(tokens[:num_whole * page_size])
        if rest := tokens[num_whole * page_size:]:
            if tree.insert_tail(rest, ids[num_whole:], below=node):
                owned.add(int(ids[num_whole]))
                assert num_known(tokens) < len(tokens)
                learn(tokens)
                if rng.random() < 0.2:
                    handles.append(tree.lock(tree.match(tokens), with_partial=True))
            else:
                assert num_known(tokens) == len(tokens)
                num_refused += 1
        if node is not None:
            tree.unlock(node)
        if len(handles) > 8:
            tree.unlock(handles.pop(rng.randrange(len(handles))))
        given_up = freed(tree)
        num_replaced += len(given_up)
        assert len(set(given_up)) == len(given_up) and owned.issuperset(given_up)
        owned.difference_update(given_up)
        histories = [*histories[-12:], tokens]
        tree.check_invariants()
    assert sorted(page for node in tree.nodes() for page in node.pages[0].tolist()) == sorted(owned)
    assert page_size == 1 or min(num_refused, num_replaced) > 4


# -- tiers


class Host:
    """Hands out host pages from 101 on, as far as they go; remembers which device page went where."""

    def __init__(self, num_pages: int = 1000):
        self.num_pages = num_pages
        self.came_from: dict[int, int] = {}

    def __call__(self, pages: np.ndarray) -> np.ndarray | None:
        n = pages.shape[1]
        if len(self.came_from) + n > self.num_pages:
            return None
        ids = np.arange(101 + len(self.came_from), 101 + len(self.came_from) + n, dtype=np.int32)[None]
        self.came_from.update(zip(ids[0].tolist(), pages[0].tolist()))
        return ids


def tiers(tree: RadixTree) -> list[tuple[str, int]]:
    """Tier and pages of every node, those that are gone included, parents first."""
    tree.check_invariants()
    return [(node.tier.name, node.num_pages) for node in tree.nodes(gone=True)]


def test_evict_with_spill_moves_the_end_of_an_edge_to_the_host() -> None:
    tree, host = RadixTree(2), Host()
    insert(tree, range(8))
    assert tree.evict(1, spill=host).tolist() == [[4]] and host.came_from == {101: 4}
    match = tree.match(range(9), touch=False)
    assert (match.pages.tolist(), match.num_tokens, match.num_host_pages) == ([[1, 2, 3]], 6, 1)
    assert match.node.tier is Tier.HOST and match.num_node_pages == 1
    assert (tree.num_evictable_pages, tree.num_host_pages) == (3, 1)
    assert tiers(tree) == [("DEVICE", 3), ("HOST", 1)]


def test_evict_with_spill_page_by_page_leaves_one_long_host_edge() -> None:
    tree, host = RadixTree(2), Host()
    insert(tree, range(8))
    for _ in range(4):
        tree.evict(1, spill=host)
        tree.check_invariants()
    assert tiers(tree) == [("HOST", 4)]
    node, = tree.nodes()
    assert [host.came_from[page] for page in node.pages[0].tolist()] == [1, 2, 3, 4]
    assert tree.match(range(8)).num_host_pages == 4


def test_evict_page_by_page_leaves_one_long_gone_edge() -> None:
    tree = RadixTree(2, history_pages=10)
    insert(tree, range(8))
    for _ in range(4):
        tree.evict(1)
    assert tiers(tree) == [("GONE", 4)]
    assert (tree.match(range(9)).num_gone_tokens, tree.match(range(5)).num_gone_tokens) == (8, 4)


def test_merge_stops_where_a_path_parts_or_a_tail_begins() -> None:
    tree, host = RadixTree(2), Host()
    insert(tree, [0, 1, 2, 3, 4, 5])
    insert(tree, [0, 1, 2, 3, 6, 7], first_page=11)
    tail_parent = tree.match([0, 1, 2, 3, 4, 5], touch=False).node
    assert tree.insert_tail([8], np.array([20]), below=tail_parent)
    tree.evict(100, spill=host)
    assert sorted(tiers(tree)) == [("HOST", 1), ("HOST", 1), ("HOST", 1), ("HOST", 2)]
    match = tree.match([0, 1, 2, 3, 4, 5, 8, 9])
    assert match.num_host_pages == 3 and match.partial.num_tokens == 1 and match.partial.node.tier is Tier.HOST


def test_evict_with_a_full_host_loses_the_kv() -> None:
    tree, host = RadixTree(2, history_pages=10), Host(num_pages=1)
    insert(tree, range(4))
    insert(tree, range(10, 14), first_page=5)
    assert tree.evict(1, spill=host).tolist() == [[2]]
    assert tree.evict(3, spill=host).tolist() == [[1, 5, 6]]
    assert tree.num_host_pages == 0 and tree.num_gone_pages == 4
    assert [page.tolist() for page in tree.freed_host_pages] == [[[101]]]      # it stood below what was lost
    assert sorted(tiers(tree)) == [("GONE", 2), ("GONE", 2)]


def test_load_brings_host_pages_back_and_gives_up_their_host_pages() -> None:
    tree, host = RadixTree(2), Host()
    insert(tree, range(8))
    tree.evict(2, spill=host)
    handle = tree.lock(tree.match(range(8)))
    assert handle.tier is Tier.HOST and (tree.num_locked_pages, tree.num_host_pages) == (2, 2)
    assert tree.load(handle, np.array([[8, 9]], np.int32)).tolist() == [[101, 102]]
    tree.check_invariants()
    assert (tree.num_locked_pages, tree.num_evictable_pages, tree.num_host_pages) == (4, 0, 0)
    match = tree.match(range(8))
    assert match.pages.tolist() == [[1, 2, 8, 9]] and match.num_host_pages == 0
    tree.unlock(handle)
    assert tree.evict(9).tolist() == [[8, 9, 1, 2]]


def test_load_below_a_host_node_asserts() -> None:
    tree, host = RadixTree(2), Host()
    insert(tree, [0, 1, 2, 3])
    insert(tree, [0, 1, 4, 5], first_page=11)
    tree.evict(100, spill=host)
    leaf = tree.match([0, 1, 4, 5]).node
    with pytest.raises(AssertionError, match="only a host node below a device node"):
        tree.load(leaf, np.array([[7]], np.int32))


def test_insert_over_host_and_gone_pages_puts_them_on_the_device() -> None:
    tree, host = RadixTree(2, history_pages=10), Host(num_pages=2)
    insert(tree, range(8))
    tree.evict(2, spill=host)
    tree.evict_host(1)
    assert tiers(tree) == [("DEVICE", 2), ("HOST", 1), ("GONE", 1)]
    inserted = tree.insert(range(8), [11, 12, 13, 14])
    assert inserted.num_existing_pages == 2 and inserted.match.pages.tolist() == [[1, 2, 13, 14]]
    assert [page.tolist() for page in tree.freed_host_pages] == [[[101]]]
    assert (tree.num_host_pages, tree.num_gone_pages, tree.num_evictable_pages) == (0, 0, 4)
    assert tree.match(range(8)).num_tokens == 8
    tree.check_invariants()


def test_evict_host_takes_leaves_unused_for_longest_and_not_what_is_locked() -> None:
    tree, host = RadixTree(1), Host()
    for page, tokens in enumerate(([1, 2], [3, 4], [5, 6])):
        insert(tree, tokens, first_page=2 * page + 1)
    tree.evict(6, spill=host)
    tree.match([1, 2])
    handle = tree.lock(tree.match([3, 4], touch=False), is_use=False)
    assert [host.came_from[page] for page in tree.evict_host(1)[0].tolist()] == [6]
    assert [host.came_from[page] for page in tree.evict_host(10)[0].tolist()] == [5, 1, 2]
    assert tree.num_host_pages == 2
    tree.unlock(handle)
    assert tree.evict_host(10).shape == (1, 2) and tree.num_host_pages == 0
    tree.check_invariants()


def test_gone_node_that_is_inserted_again_keeps_its_uses() -> None:
    """What is known of a prefix outlives its KV, so that a policy need not start from nothing."""
    tree = RadixTree(2, history_pages=10)
    insert(tree, range(8))
    for _ in range(5):
        tree.match(range(8))
    tree.evict(4)
    node, = tree.nodes(gone=True)
    assert (node.tier, node.hits, node.evicted_by, node.pages.shape) == (Tier.GONE, 5, "lru", (1, 0))
    insert(tree, range(8), first_page=11)
    assert [(n.tier, n.hits, n.pages.tolist()) for n in tree.nodes()] == [(Tier.DEVICE, 5, [[11, 12, 13, 14]])]
    tree.match(range(8))
    assert node.hits == 6


def test_gone_edge_inserted_in_part_stays_gone_behind() -> None:
    tree = RadixTree(2, history_pages=10)
    insert(tree, range(8))
    tree.match(range(8))
    tree.evict(4)
    insert(tree, range(4), first_page=11)
    assert tiers(tree) == [("DEVICE", 2), ("GONE", 2)]
    assert {node.hits for node in tree.nodes(gone=True)} == {1}
    match = tree.match(range(8))
    assert (match.num_tokens, match.num_gone_tokens) == (4, 4)


def test_history_is_bounded_and_forgets_the_oldest_first() -> None:
    tree = RadixTree(1, history_pages=4)
    for start in range(0, 40, 10):
        insert(tree, range(start, start + 2), first_page=start + 1)
    for num_evicted in range(2, 9, 2):
        tree.evict(2)
        tree.check_invariants()
        assert tree.num_gone_pages == min(num_evicted, 4)
    assert [tree.match(range(start, start + 2)).num_gone_tokens for start in range(0, 40, 10)] == [0, 0, 2, 2]
    assert len(tree.roots[Namespace()].gone) == 2


def test_history_of_no_pages_remembers_nothing() -> None:
    tree = RadixTree(1)
    insert(tree, range(4))
    tree.evict(2)
    assert tiers(tree) == [("DEVICE", 2)] and tree.match(range(4)).num_gone_tokens == 0


def test_history_under_steady_eviction_keeps_its_own_size() -> None:
    """The record of the order does not grow with the number of evictions."""
    tree = RadixTree(1, history_pages=8)
    for start in range(6000):
        tree.insert([start], [1])
        tree.evict(1)
    assert tree.num_gone_pages == 8 and len(tree._history) <= 1100
    tree.check_invariants()


def test_gone_tokens_leave_out_what_the_user_evicted() -> None:
    tree = RadixTree(1, history_pages=10)
    insert(tree, range(4))
    tree.forget(range(4))
    assert tree.num_gone_pages == 4 and tree.match(range(4)).num_gone_tokens == 0
    insert(tree, range(4))
    tree.evict(4)
    assert tree.match(range(4)).num_gone_tokens == 4


def test_gone_tokens_below_what_was_evicted_later_leave_out_what_the_user_evicted() -> None:
    tree = RadixTree(1, history_pages=10)
    insert(tree, range(4))
    handle = tree.lock(tree.match(range(2)))
    tree.forget(range(4))
    tree.unlock(handle)
    tree.evict(2)
    assert tree.num_gone_pages == 4 and tree.match(range(4)).num_gone_tokens == 2


def test_gone_tail_that_is_inserted_again_is_forgotten_as_gone() -> None:
    tree = RadixTree(4, history_pages=10)
    node = whole_page(tree, [1, 2, 3, 4])
    add_tail(tree, [5, 6], 8, node)
    tree.evict(1)
    assert tiers(tree) == [("DEVICE", 1), ("GONE", 1)]
    assert add_tail(tree, [5, 6], 9, node)
    assert tiers(tree) == [("DEVICE", 1), ("DEVICE", 1)] and tree.num_gone_pages == 0


# -- forgetting


def forget(tree: RadixTree, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Device and host pages that `forget` gave back, sorted."""
    pages, host_pages = tree.forget(tokens)
    tree.check_invariants()
    return sorted(pages[0].tolist()), sorted(host_pages[0].tolist())


@pytest.mark.parametrize("tokens, pages", [
    ([], [1, 2, 3]), ([0], [1, 2, 3]), (range(3), [1, 2, 3]), (range(4), [1, 2, 3]), (range(5), [1, 2, 3]),
    (range(12), [1, 2, 3]), (range(13), []), ([1], []), ([0, 9], []), ([0, 1, 2, 3, 9], []), ([*range(8), 9], [])])
def test_forget_one_edge_takes_all_of_it_or_nothing(tokens: Sequence[int], pages: list[int]) -> None:
    """Wherever in the edge or in a page the tokens end: its path is its own."""
    tree = RadixTree(4)
    insert(tree, range(12))
    assert forget(tree, tokens) == (pages, [])
    assert tree.num_evictable_pages == 3 - len(pages) and bool(tree.roots) == (not pages)


def test_forget_keeps_the_path_that_others_share() -> None:
    tree = RadixTree(2)
    insert(tree, [0, 1, 2, 3, 4, 5])
    insert(tree, [0, 1, 2, 3, 6, 7], first_page=11)
    tree.insert_tail([8], np.array([20]), below=tree.match([0, 1, 2, 3, 6, 7]).node)
    assert forget(tree, [0, 1, 2, 3, 4]) == ([3], [])
    assert found(tree, [0, 1, 2, 3, 6, 7, 8]) == 7
    assert forget(tree, [0, 1, 2, 3, 6, 7, 8, 9]) == ([], [])
    assert forget(tree, [0, 1, 2, 3, 6]) == ([1, 2, 13, 20], [])
    assert not list(tree.nodes())


def test_forget_inside_a_page_takes_every_child_that_begins_so() -> None:
    tree = RadixTree(4)
    node = whole_page(tree, [0, 1, 2, 3])
    for page, tokens in enumerate(([5], [5, 6, 7], [5, 6, 8], [5, 7])):
        add_tail(tree, tokens, 11 + page, node)
    tree.insert([0, 1, 2, 3, 5, 6, 9, 9], [1, 20])
    assert freed(tree) == [11]
    assert forget(tree, [0, 1, 2, 3, 5, 6]) == ([12, 13, 20], [])
    assert found(tree, [0, 1, 2, 3, 5, 7]) == 6


def test_forget_leaves_what_is_locked_and_its_path() -> None:
    tree = RadixTree(1)
    insert(tree, range(6))
    insert(tree, [0, 1, 7, 8], first_page=11)
    handle = tree.lock(tree.match(range(4)))
    assert forget(tree, [0]) == ([5, 6, 13, 14], [])
    assert tree.match(range(6)).num_tokens == 4
    assert forget(tree, range(2)) == ([], [])
    tree.unlock(handle)
    assert forget(tree, range(4)) == ([1, 2, 3, 4], [])


def test_forget_inside_a_locked_edge_changes_nothing() -> None:
    tree = RadixTree(1)
    insert(tree, range(6))
    handle = tree.lock(tree.match(range(6)))
    before = structure(tree)
    assert forget(tree, range(3)) == ([], []) and structure(tree) == before
    tree.unlock(handle)


def test_forget_gives_back_host_pages_apart() -> None:
    tree, host = RadixTree(2, history_pages=9), Host()
    insert(tree, range(8))
    tree.evict(2, spill=host)
    assert forget(tree, range(3)) == ([1, 2], [101, 102])
    assert tree.num_host_pages == 0 and not tree.freed_host_pages


def test_forget_other_namespace_or_what_is_gone_finds_nothing() -> None:
    tree = RadixTree(2, history_pages=9)
    insert(tree, range(8))
    tree.evict(2)
    assert tree.forget(range(4), Namespace(salt="a"))[0].shape == (1, 0)
    assert forget(tree, range(6)) == ([], [])
    assert forget(tree, range(4)) == ([1, 2], [])


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
