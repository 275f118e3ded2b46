"""The eviction queues against a naive choice over all members, and their policies on the real tree."""
from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Callable

import numpy as np
import pytest

from jradix.cache.eviction import EVICTION_POLICIES, FIRST_PROTECTED_SHARE, EvictionQueue, make_queue
from jradix.cache.radix_tree import RadixTree


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class FakeNode:
    serial: int
    last_used: int = 0
    used_s: float = 0.0
    hits: int = 0
    num_pages: int = 1
    is_protected: bool = False
    evicted_s: float = 0.0
    evicted_by: str = ""
    queue: object | None = None
    parent: FakeNode | None = None
    is_free: bool = field(default=True)


def is_free(node: FakeNode) -> bool:
    return node.is_free


class Naive:
    """The same policies by looking at every node each time."""

    def __init__(self, policy: str, num_pages: int, min_ttl_s: float, clock: FakeClock):
        self.policy, self.min_ttl_s, self.clock = policy, min_ttl_s, clock
        self.max_protected_pages = FIRST_PROTECTED_SHARE * num_pages
        self.queued: set[FakeNode] = set()
        self.protected: set[FakeNode] = set()

    def unprotect_oldest(self, *, only_old: bool) -> bool:
        oldest = min(self.protected, key=lambda node: node.last_used, default=None)
        if oldest is None or (only_old and self.is_young(oldest)):
            return False
        self.protected.remove(oldest)
        return True

    def is_young(self, node: FakeNode) -> bool:
        return self.min_ttl_s > 0 and node.used_s > self.clock() - self.min_ttl_s

    def pop(self, allow_young: bool) -> FakeNode | None:
        while sum(node.num_pages for node in self.protected) > self.max_protected_pages:
            self.unprotect_oldest(only_old=False)
        free = {node for node in self.queued if node.is_free}
        victim = None
        while victim is None:
            old = [node for node in free if not self.is_young(node) and node not in self.protected]
            order = (lambda node: (node.hits, node.last_used)) if self.policy == "lfu" else lambda node: node.last_used
            victim = min(old, key=order, default=None)
            if victim is None and not self.unprotect_oldest(only_old=True):
                break
        if victim is None and allow_young:
            victim = min(free, key=lambda node: node.last_used, default=None)
        self.queued.discard(victim)
        self.protected.discard(victim)
        return victim


@pytest.mark.parametrize("min_ttl_s", (0.0, 60.0))
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_pop_random_operations_gives_the_naive_choice(policy: str, min_ttl_s: float) -> None:
    """Uses, locks, nodes that leave and come back, splits: the victim is always the one that a full scan finds."""
    for seed in range(12):
        rng = random.Random(seed)
        clock, num_early, num_victims, tick = FakeClock(), 0, 0, 25
        nodes = [FakeNode(serial, last_used=serial, num_pages=rng.randint(1, 5)) for serial in range(25)]
        queue = make_queue(policy, num_pages=30, min_ttl_s=min_ttl_s, clock=clock)
        naive = Naive(policy, 30, min_ttl_s, clock)
        for _ in range(500):
            node = rng.choice(nodes)
            what = rng.choice(("use", "use", "lock", "remove", "split", "pop", "pop"))
            clock.now += rng.choice((0.0, 0.5, 1.0))
            if what == "use":
                tick += 1
                node.last_used, node.used_s = tick, clock.now
                if rng.random() < 0.7:
                    node.hits += 1
                    if policy == "slru":
                        naive.protected.add(node)
                    if queue.tracks_uses:
                        queue.used(node)
            elif what == "lock":
                node.is_free = not node.is_free
                if node.is_free:
                    queue.add(node)
                    naive.queued.add(node)
            elif what == "remove" and node.queue is queue:
                queue.removed(node)
                naive.queued.discard(node)
                naive.protected.discard(node)
            elif what == "split" and node.num_pages > 1:
                upper = FakeNode(len(nodes), hits=node.hits, is_protected=node.is_protected, is_free=False)
                upper.last_used = node.last_used
                node.num_pages -= 1
                queue.split(node, upper)
                if node in naive.protected:
                    naive.protected.add(upper)
                tick += 1
                upper.last_used, upper.used_s = tick, clock.now
                nodes.append(upper)
            elif what == "pop":
                allow_young = rng.random() < 0.5
                victim = queue.pop(is_free, allow_young=allow_young)
                assert victim is naive.pop(allow_young), (seed, num_victims)
                num_victims += victim is not None
                if victim is not None:
                    assert victim.queue is None and not victim.is_protected
                    num_early += naive.is_young(victim)
            for node in nodes:     # as the tree does: a node that is an unlocked leaf is queued
                if node.is_free and node.queue is None and rng.random() < 0.3:
                    queue.add(node)
                    naive.queued.add(node)
        assert num_victims > 50 and queue.num_early == num_early
        assert (num_early > 0) == (min_ttl_s > 0)


def fill(queue: EvictionQueue, count: int, clock: FakeClock) -> list[FakeNode]:
    nodes = []
    for serial in range(count):
        clock.now += 1.0
        nodes.append(FakeNode(serial, last_used=serial + 1, used_s=clock.now))
        queue.add(nodes[-1])
    return nodes


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_add_twice_queues_once(policy: str) -> None:
    clock = FakeClock()
    queue = make_queue(policy, num_pages=8, clock=clock)
    node, = fill(queue, 1, clock)
    queue.add(node)
    assert node.queue is queue and queue.pop(is_free) is node and node.queue is None and queue.pop(is_free) is None


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_removed_nodes_that_come_and_go_leave_few_entries_and_come_out_once(policy: str) -> None:
    clock = FakeClock()
    queue = make_queue(policy, num_pages=100, clock=clock)
    other = make_queue("lru", num_pages=100, clock=clock)
    nodes = fill(queue, 10, clock)
    for tick in range(11, 3000):
        node = nodes[tick % 10]
        queue.removed(node)
        other.add(node)
        node.last_used, node.hits = tick, node.hits + 1
        queue.used(node)
        other.removed(node)
        queue.add(node)
    assert sum(len(order) for order in queue._orders()) < 300
    assert sum(len(order) for order in other._orders()) < 300
    victims = [queue.pop(is_free) for _ in range(11)]
    assert victims == [*sorted(nodes, key=lambda node: node.last_used), None]


def test_pop_locked_nodes_are_dropped_until_added_again() -> None:
    clock = FakeClock()
    queue = make_queue("lru", num_pages=8, clock=clock)
    first, second = fill(queue, 2, clock)
    first.is_free = False
    assert queue.pop(is_free) is second and first.queue is None
    first.is_free = True
    assert queue.pop(is_free) is None
    queue.add(first)
    assert queue.pop(is_free) is first


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("allow_young", (False, True))
def test_pop_many_young_nodes_looks_at_few_of_them_per_call(policy: str, allow_young: bool) -> None:
    """A minimal age costs no walk over all that are younger, nor do nodes that were all used again."""
    clock, calls = FakeClock(), 0
    queue = make_queue(policy, num_pages=1000, min_ttl_s=1500.0, clock=clock)
    nodes = fill(queue, 1000, clock)
    for node in nodes:
        node.last_used, node.hits, node.used_s = node.last_used + 1000, 1, clock.now
        queue.used(node)

    def counted(node: FakeNode) -> bool:
        nonlocal calls
        calls += 1
        return True

    found = sum(queue.pop(counted, allow_young=allow_young) is not None for _ in range(500))
    assert found == (500 if allow_young else 0) and queue.num_early == found
    assert calls < 1000 + 500 * 4


def test_pop_nodes_grown_old_go_before_young_ones_in_the_order_of_the_policy() -> None:
    clock = FakeClock()
    queue = make_queue("lfu", num_pages=8, min_ttl_s=2.5, clock=clock)
    nodes = fill(queue, 5, clock)              # used at 1, 2, 3, 4, 5
    nodes[0].hits = 3
    assert [queue.pop(is_free, allow_young=False) for _ in range(3)] == [nodes[1], nodes[0], None]
    assert queue.num_early == 0
    assert queue.pop(is_free) is nodes[2] and queue.num_early == 1
    clock.now = 6.5
    assert queue.pop(is_free, allow_young=False) is nodes[3]


@pytest.mark.parametrize("arguments, named", (
    (dict(policy="mru"), "'mru' is unknown; choose one of lru, lfu, slru"),
    (dict(policy="lru", min_ttl_s=-1.0), "min_ttl_s is -1.0"),
    (dict(policy="lru", min_ttl_s=math.nan), "min_ttl_s is nan")))
def test_make_queue_wrong_arguments_say_what_is_possible(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_queue(num_pages=8, clock=FakeClock(), **arguments)


# -- on the real tree, one token per page

Put = Callable[[list[int]], None]


def make_tree(policy: str, num_pages: int, **options: object) -> tuple[RadixTree, Put]:
    """A tree and a function that puts a prompt into it, evicting what a pool of `num_pages` needs."""
    tree = RadixTree(1, policy=policy, num_pages=num_pages, **options)

    def put(tokens: list[int]) -> None:
        cached = tree.match(tokens, touch=False).num_tokens
        used = tree.num_evictable_pages + tree.num_locked_pages
        tree.evict(max(used + len(tokens) - cached - num_pages, 0))
        tree.insert(tokens, np.arange(len(tokens)))
        tree.check_invariants()

    return tree, put


def found(tree: RadixTree, tokens: list[int]) -> int:
    return tree.match(tokens, touch=False).num_tokens


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_evict_a_used_prompt_outlives_a_later_one(policy: str) -> None:
    """E01: eviction goes by use, not by insertion."""
    tree, put = make_tree(policy, 8)
    put([1, 2, 3, 4])
    put([11, 12, 13, 14])
    tree.match([1, 2, 3, 4])
    assert tree.evict(4).shape == (1, 4)
    assert found(tree, [1, 2, 3, 4]) == 4 and found(tree, [11, 12, 13, 14]) == 0


@pytest.mark.parametrize("policy, kept", (("lru", 0), ("lfu", 16), ("slru", 16)))
def test_evict_one_shot_prompts_flush_a_hot_prefix_under_lru_only(policy: str, kept: int) -> None:
    """E03: thirty prompts that never come again against a prefix used five times."""
    tree, put = make_tree(policy, 64)
    hot = list(range(16))
    put(hot)
    for _ in range(5):
        tree.match(hot)
    assert [node.hits for node in tree.nodes()] == [5]
    for i in range(30):
        put(list(range(100 + 8 * i, 108 + 8 * i)))
    assert found(tree, hot) == kept
    assert tree.queue.policy == policy


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_evict_a_path_goes_from_its_end(policy: str) -> None:
    """E07: children before parents whatever the policy, and what is left can still be found."""
    tree, put = make_tree(policy, 12)
    path = list(range(12))
    for end in (4, 8, 12):
        put(path[:end])
    for node in tree.nodes():
        node.hits = 12 - len(tree.tokens_of(node))      # the parents have the fewest or the most uses, as one likes
    for left in (8, 4, 0):
        tree.evict(4)
        tree.check_invariants()
        assert found(tree, path) == left == sum(node.num_pages for node in tree.nodes())


def test_evict_slru_conversations_beyond_the_share_go_by_last_use() -> None:
    """Nothing but paths used twice: the share cannot hold them all, and those unused for longest go."""
    tree, put = make_tree("slru", 40)
    for i in range(10):
        turn = list(range(100 * i, 100 * i + 4))
        put(turn)
        tree.match(turn)
    tree.evict(20)
    assert [found(tree, list(range(100 * i, 100 * i + 4))) for i in range(10)] == [0] * 5 + [4] * 5


def test_evict_slru_an_edge_cut_short_stays_next() -> None:
    tree, put = make_tree("slru", 40)
    once, twice = list(range(10)), list(range(50, 60))
    put(once)
    put(twice)
    tree.match(twice)
    for left in range(9, -1, -1):
        tree.evict(1)
        assert found(tree, once) == left and found(tree, twice) == 10
    tree.evict(1)
    assert found(tree, twice) == 9


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_evict_young_nodes_are_spared_until_nothing_else_is_left(policy: str) -> None:
    clock = FakeClock()
    tree, put = make_tree(policy, 12, min_ttl_s=10.0, clock=clock)
    for i in range(3):
        clock.now = 5.0 * i
        put(list(range(10 * i, 10 * i + 4)))      # used at 0, 5, 10
    clock.now = 12.0
    assert tree.evict(12, allow_young=False).shape == (1, 4) and found(tree, [0, 1, 2, 3]) == 0
    assert tree.queue.num_early == 0
    assert tree.evict(4).shape == (1, 4) and found(tree, [10, 11, 12, 13]) == 0
    assert tree.queue.num_early == 1
    clock.now = 20.0
    assert tree.evict(4, allow_young=False).shape == (1, 4) and tree.queue.num_early == 1


def test_evict_slru_a_prompt_back_soon_after_its_eviction_is_spared_then() -> None:
    tree, put = make_tree("slru", 20, history_pages=100)
    hot = [1, 2, 3, 4]
    put(hot)
    for i in range(1, 6):
        put(list(range(100 * i, 100 * i + 4)))
    assert found(tree, hot) == 0
    put(hot)                                       # with its tokens still remembered: the second use
    for i in range(6, 16):
        put(list(range(100 * i, 100 * i + 4)))
    assert found(tree, hot) == 4


def test_evict_slru_an_edge_taken_page_by_page_counts_each_page_once() -> None:
    """A prompt is back soon as long as less than a pool was evicted after it, however small the pieces."""
    tree, put = make_tree("slru", 40, history_pages=1000)
    first, second = [1, 2, 3, 4], list(range(100, 116))
    put(first)
    put(second)
    tree.evict(4)
    for _ in range(16):
        tree.evict(1)
    assert found(tree, first) == found(tree, second) == 0
    put(first)
    put(list(range(200, 236)))
    tree.evict(36)
    assert found(tree, first) == 4
