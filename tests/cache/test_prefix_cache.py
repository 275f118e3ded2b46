"""The prefix cache: what leases hold, share and give back, against an ownership oracle that remembers page contents."""
from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from jradix.batch import MoveKind
from jradix.cache.node import Namespace, Tier
from jradix.cache.pages import SCRATCH_PAGE
from jradix.cache.prefix_cache import Lease, PrefixCache
from jradix.errors import OutOfPages, PagesTooYoung


def make_cache(page_size: int = 2, num_pages: int = 32, max_pages: int = 16, num_groups: int = 1,
               enabled: bool = True, **options: object) -> PrefixCache:
    return PrefixCache.create(page_size=page_size, num_pages=num_pages, max_pages=max_pages, num_groups=num_groups,
                              enabled=enabled, **options)


def tokens_of(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def fill(cache: PrefixCache, tokens: np.ndarray, namespace: Namespace = Namespace()) -> Lease:
    """A lease whose tokens are all computed and committed."""
    lease = cache.acquire(tokens, namespace)
    cache.extend(lease, len(tokens))
    cache.commit(lease, tokens)
    return lease


def state(cache: PrefixCache, *leases: Lease) -> list[object]:
    return [[pool.free_pages().tolist() for pool in cache.pools],
            [(node.key, node.pages.tolist(), node.lock_count) for node in cache.tree.nodes()],
            [(lease.page_table.tolist(), lease.num_pages, lease.num_committed, lease.node) for lease in leases]]


def moves(cache: PrefixCache) -> list[tuple[str, list[int], list[int]]]:
    """The moves noted since the last call, for one group."""
    return [(move.kind.name, *(ids[0].tolist() for ids in (move.source, move.target))) for move in cache.take_moves()]


def pages_in_use(cache: PrefixCache) -> int:
    """Pages that nobody can get: counted by walking."""
    return cache.num_pages - cache.num_available_pages


# -- one lease


def test_acquire_empty_cache_holds_nothing() -> None:
    cache = make_cache()
    lease = cache.acquire(tokens_of(1, 2, 3))
    assert (lease.num_pages, lease.num_cached_tokens, lease.num_committed) == (0, 0, 0)
    assert (lease.page_table == SCRATCH_PAGE).all() and lease.page_table.shape == (1, 16)
    cache.check_invariants()


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 6, 7, 12, 13])
def test_acquire_whole_prompt_cached_leaves_the_last_token(num_tokens: int) -> None:
    """R16: len - 1 tokens, so that a forward pass is never empty; the page they end in is copied, never shared."""
    cache, tokens = make_cache(page_size=4), np.arange(num_tokens, dtype=np.int32)
    cache.release(fill(cache, tokens), tokens)
    num_cached, source = num_tokens - 1, cache.tree.match(tokens, touch=False).partial
    assert cache.num_matching_tokens(tokens, Namespace()) == num_cached
    shared = [page for node in cache.tree.nodes() for page in node.pages[0].tolist()]
    lease = cache.acquire(tokens)
    assert (lease.num_cached_tokens, lease.num_copied_tokens) == (num_cached, num_cached % 4)
    assert (lease.num_committed, lease.num_pages) == (num_cached // 4, -(-num_cached // 4))
    own = lease.page_table[0, lease.num_committed:lease.num_pages].tolist()
    assert not set(own) & set(shared)
    assert moves(cache) == ([("COPY", [shared[num_cached // 4]], own)] if num_cached % 4 else [])
    assert source is None or num_tokens % 4
    cache.check_invariants()


@pytest.mark.parametrize("cap, num_cached", [(0, 0), (3, 3), (4, 4), (7, 7), (8, 8), (100, 11), (None, 11)])
def test_acquire_lower_cap_limits_the_match(cap: int | None, num_cached: int) -> None:
    cache, tokens = make_cache(page_size=4), np.arange(12, dtype=np.int32)
    cache.release(fill(cache, tokens))
    assert cache.num_matching_tokens(tokens, Namespace(), max_cached_tokens=cap) == num_cached
    lease = cache.acquire(tokens, max_cached_tokens=cap)
    assert (lease.num_cached_tokens, lease.num_copied_tokens) == (num_cached, num_cached % 4)
    assert [(kind, len(target)) for kind, _, target in moves(cache)] == [("COPY", 1)] * (num_cached % 4 > 0)
    cache.check_invariants()


def test_acquire_other_namespace_finds_nothing() -> None:
    """R11 at the level of the cache."""
    cache, tokens = make_cache(), np.arange(8, dtype=np.int32)
    cache.release(fill(cache, tokens, Namespace(adapter="s")))
    assert cache.acquire(tokens, Namespace(salt="s")).num_cached_tokens == 0
    assert cache.acquire(tokens, Namespace()).num_cached_tokens == 0
    assert cache.take_moves() == []
    assert cache.acquire(tokens, Namespace(adapter="s")).num_cached_tokens == 7


def test_extend_takes_only_the_missing_pages() -> None:
    cache = make_cache(page_size=4)
    lease = cache.acquire(tokens_of(1))
    for num_tokens, num_pages in ((1, 1), (4, 1), (5, 2), (3, 2), (16, 4)):
        cache.extend(lease, num_tokens)
        assert lease.num_pages == num_pages == np.count_nonzero(lease.page_table)
        cache.check_invariants()


def test_extend_evicts_what_nobody_holds() -> None:
    cache, tokens = make_cache(num_pages=4), np.arange(6, dtype=np.int32)
    cache.release(fill(cache, tokens))
    lease = cache.acquire(tokens_of(9))
    cache.extend(lease, 5)
    assert lease.num_pages == 3 and cache.counters.num_evicted_pages == 2
    assert cache.num_matching_tokens(tokens, Namespace()) == 2
    cache.check_invariants()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_extend_short_of_pages_raises_and_changes_nothing(num_groups: int) -> None:
    cache, tokens = make_cache(num_pages=7, num_groups=num_groups), np.arange(6, dtype=np.int32)
    cache.release(fill(cache, tokens), tokens)
    held, lease = cache.acquire(tokens), cache.acquire(tokens_of(7))
    cache.extend(lease, 2)
    before = state(cache, held, lease)
    with pytest.raises(OutOfPages, match="4 pages wanted, 3 free or evictable"):
        cache.extend(lease, 10)
    assert state(cache, held, lease) == before
    cache.check_invariants()
    cache.extend(lease, 8)
    assert pages_in_use(cache) == 7


def test_extend_beyond_the_longest_request_raises_and_changes_nothing() -> None:
    cache = make_cache(max_pages=3)
    lease = cache.acquire(tokens_of(7))
    before = state(cache, lease)
    with pytest.raises(OutOfPages, match="7 tokens need 4 pages, a request has at most 3"):
        cache.extend(lease, 7)
    assert state(cache, lease) == before
    cache.extend(lease, 6)


@pytest.mark.parametrize("num_tokens, num_left", [(0, 2), (4, 2), (5, 3), (6, 3), (8, 4), (99, 5)])
def test_truncate_gives_back_own_pages_only(num_tokens: int, num_left: int) -> None:
    cache, tokens = make_cache(), np.arange(4, dtype=np.int32)
    lease = fill(cache, tokens)
    cache.extend(lease, 10)
    cache.truncate(lease, num_tokens)
    assert lease.num_pages == num_left and pages_in_use(cache) == num_left
    assert lease.page_table[0, :2].tolist() == cache.tree.match(tokens).pages[0].tolist()
    cache.check_invariants()


def test_commit_whole_pages_only_and_keeps_the_rest_private() -> None:
    cache, tokens = make_cache(), np.arange(7, dtype=np.int32)
    lease = fill(cache, tokens)
    assert (lease.num_committed, lease.num_pages, cache.tree.num_locked_pages) == (3, 4, 3)
    assert cache.tree.match(tokens).num_tokens == 6
    cache.commit(lease, tokens[:5])
    assert lease.num_committed == 3
    cache.check_invariants()


def test_commit_chunk_by_chunk_equals_one_commit() -> None:
    cache, tokens = make_cache(), np.arange(9, dtype=np.int32)
    lease = cache.acquire(tokens)
    for end in (1, 4, 5, 9):
        cache.extend(lease, end)
        cache.commit(lease, tokens[:end])
        assert lease.num_committed == end // 2
        cache.check_invariants()
    assert cache.tree.match(tokens).pages[0].tolist() == lease.page_table[0, :4].tolist()


def test_commit_beyond_the_allocated_pages_asserts() -> None:
    cache, tokens = make_cache(), np.arange(8, dtype=np.int32)
    lease = cache.acquire(tokens)
    cache.extend(lease, 4)
    with pytest.raises(AssertionError, match="4 pages of tokens"):
        cache.commit(lease, tokens)
    cache.check_invariants()


def test_release_second_call_does_nothing() -> None:
    """R01: no page id is freed twice."""
    cache, tokens = make_cache(), np.arange(7, dtype=np.int32)
    lease = fill(cache, tokens)
    cache.release(lease, tokens)
    before = state(cache)
    cache.release(lease, tokens)
    cache.release(lease)
    assert state(cache) == before and lease.is_released
    assert cache.pools[0].num_free + cache.tree.num_evictable_pages == 32
    cache.check_invariants()


def test_extend_and_commit_after_release_assert() -> None:
    cache, tokens = make_cache(), np.arange(7, dtype=np.int32)
    lease = fill(cache, tokens)
    cache.release(lease)
    before = state(cache)
    with pytest.raises(AssertionError):
        cache.extend(lease, 2)
    with pytest.raises(AssertionError):
        cache.commit(lease, tokens)
    assert state(cache) == before
    cache.check_invariants()


@pytest.mark.parametrize("page_size, num_tokens", [(4, 7), (4, 3), (16, 15), (16, 33), (64, 70)])
def test_release_hands_the_last_page_over_as_a_tail(page_size: int, num_tokens: int) -> None:
    """A later prompt finds every token, and pages the request had in reserve are free again."""
    cache, tokens = make_cache(page_size=page_size), np.arange(num_tokens, dtype=np.int32)
    lease = fill(cache, tokens)
    cache.extend(lease, num_tokens + 2 * page_size)
    last = lease.page_table[0, num_tokens // page_size]
    cache.release(lease, tokens)
    num_pages = -(-num_tokens // page_size)
    assert (cache.tree.num_evictable_pages, cache.num_free_pages) == (num_pages, 32 - num_pages)
    longer = np.concatenate([tokens, tokens_of(900, 901)])
    again = cache.acquire(longer)
    assert (again.num_cached_tokens, again.num_copied_tokens) == (num_tokens, num_tokens % page_size)
    assert moves(cache) == [("COPY", [last], [again.page_table[0, num_tokens // page_size]])]
    cache.check_invariants()


def test_release_of_a_tail_the_tree_has_frees_the_page() -> None:
    cache, tokens = make_cache(page_size=4), np.arange(6, dtype=np.int32)
    first, second = fill(cache, tokens), fill(cache, tokens)
    cache.release(first, tokens)
    cache.release(second, tokens)
    assert cache.num_free_pages == 30
    longer = np.arange(7, dtype=np.int32)
    cache.release(fill(cache, longer), longer)
    assert cache.num_free_pages == 30 and cache.num_matching_tokens(np.arange(9, dtype=np.int32), Namespace()) == 7
    cache.check_invariants()


def test_release_without_tokens_drops_uncommitted_pages() -> None:
    cache, tokens = make_cache(), np.arange(8, dtype=np.int32)
    lease = fill(cache, tokens[:4])
    cache.extend(lease, 8)
    cache.release(lease)
    assert cache.num_matching_tokens(np.arange(20, dtype=np.int32), Namespace()) == 4
    assert cache.pools[0].num_free == 30
    cache.check_invariants()


# -- several leases


def test_commit_twins_loser_uses_the_winners_pages() -> None:
    """R02: both computed the same prefix; the loser's page table is rewritten and its pages are free."""
    cache, tokens = make_cache(), np.arange(8, dtype=np.int32)
    first, second = cache.acquire(tokens), cache.acquire(tokens)
    for lease in (first, second):
        cache.extend(lease, 9)
    lost = second.page_table[0, :4].tolist()
    cache.commit(first, tokens)
    cache.commit(second, tokens)
    free = cache.pools[0].free_pages().tolist()
    assert second.page_table[0, :4].tolist() == first.page_table[0, :4].tolist()
    assert second.page_table[0, 4] != first.page_table[0, 4]
    assert set(lost) <= set(free)
    assert not {*first.page_table[0, :5].tolist(), *second.page_table[0, :5].tolist()} & set(free)
    assert cache.tree.num_locked_pages == 4
    cache.check_invariants()
    cache.release(first)
    assert cache.tree.num_locked_pages == 4
    cache.release(second)
    assert cache.tree.num_evictable_pages == 4
    cache.check_invariants()


def test_commit_partial_twin_rewrites_the_common_part_only() -> None:
    cache = make_cache()
    ours, theirs = tokens_of(1, 2, 3, 4, 5, 6), tokens_of(1, 2, 3, 4, 7, 8)
    first, second = cache.acquire(ours), cache.acquire(theirs)
    cache.extend(first, 6)
    cache.extend(second, 6)
    own = second.page_table[0, 2]
    cache.commit(first, ours)
    cache.commit(second, theirs)
    assert second.page_table[0, :3].tolist() == [*first.page_table[0, :2].tolist(), own]
    assert second.num_committed == 3
    cache.check_invariants()


def test_commit_twin_inside_a_longer_edge_locks_only_its_part() -> None:
    cache, tokens = make_cache(), np.arange(8, dtype=np.int32)
    second = cache.acquire(tokens[:4])
    cache.extend(second, 4)
    cache.release(fill(cache, tokens))
    cache.commit(second, tokens[:4])
    assert (cache.tree.num_locked_pages, cache.tree.num_evictable_pages) == (2, 2)
    assert cache.clear() == 2
    cache.check_invariants()


@pytest.mark.parametrize("num_shared", [1, 3, 4, 5, 6])
def test_acquire_copies_the_page_another_lease_is_writing(num_shared: int) -> None:
    """Token by token: what is committed can be had while its request still runs."""
    cache = make_cache(page_size=4)
    first = fill(cache, tokens_of(1, 2, 3, 4, 5, 6))
    prompt = np.array([1, 2, 3, 4, 5, 6][:num_shared] + [90, 91, 92], np.int32)
    second = cache.acquire(prompt)
    assert second.num_cached_tokens == num_shared
    own = second.page_table[0, second.num_committed:second.num_pages].tolist()
    if num_shared % 4:
        assert moves(cache) == [("COPY", [first.page_table[0, num_shared // 4]], own)]
    cache.extend(second, len(prompt))
    cache.commit(second, prompt)
    cache.check_invariants()
    assert first.page_table[0, :2].tolist() != second.page_table[0, :2].tolist()


def test_acquire_copies_from_the_lease_that_goes_on_longest() -> None:
    cache = make_cache(page_size=8)
    leases = [fill(cache, tokens_of(1, 2, *rest)) for rest in ((), (3, 4, 5), (3, 4), (9,))]
    cache.take_moves()
    late = cache.acquire(tokens_of(1, 2, 3, 4, 5, 6, 7))
    assert late.num_cached_tokens == 5
    assert moves(cache) == [("COPY", [leases[1].page_table[0, 0]], [late.page_table[0, 0]])]
    cache.check_invariants()


def test_acquire_after_an_abort_finds_whole_pages_only() -> None:
    """The page that was being written went with its lease."""
    cache, tokens = make_cache(page_size=4), np.arange(6, dtype=np.int32)
    cache.release(fill(cache, tokens))
    assert cache.acquire(np.arange(9, dtype=np.int32)).num_cached_tokens == 4 and cache.take_moves() == []
    cache.check_invariants()


def test_acquire_after_more_was_committed_finds_it() -> None:
    cache, tokens = make_cache(page_size=4), np.arange(11, dtype=np.int32)
    first = cache.acquire(tokens)
    for end in (1, 2, 3, 4, 6, 9, 11):
        cache.extend(first, end)
        cache.commit(first, tokens[:end])
        assert cache.num_matching_tokens(np.arange(20, dtype=np.int32), Namespace()) == end
        cache.check_invariants()


@pytest.mark.parametrize("num_left", [4, 5])
def test_truncate_takes_back_what_others_could_copy(num_left: int) -> None:
    """The lease may write other tokens there, or the page may be someone else's by then."""
    cache, tokens = make_cache(page_size=4), np.arange(7, dtype=np.int32)
    lease = fill(cache, tokens)
    cache.truncate(lease, num_left)
    other = cache.acquire(np.arange(9, dtype=np.int32))
    assert other.num_cached_tokens == num_left
    assert all(SCRATCH_PAGE not in source for _, source, _ in moves(cache))
    cache.check_invariants()


def test_copy_stands_before_the_page_gets_a_new_owner() -> None:
    """A tail is copied, then evicted for the next page of the same request: all in one list of moves."""
    cache, tokens = make_cache(page_size=4, num_pages=3), np.arange(6, dtype=np.int32)
    cache.release(fill(cache, tokens), tokens)
    assert cache.tree.match(tokens).partial.node.pages.tolist() == [[2]]
    lease = cache.acquire(np.arange(12, dtype=np.int32))
    cache.extend(lease, 12)
    assert lease.num_cached_tokens == 6 and lease.page_table[0, :3].tolist() == [1, 3, 2]
    assert moves(cache) == [("COPY", [2], [3])]
    cache.check_invariants()


def test_copy_whose_room_is_its_own_source_keeps_the_content() -> None:
    cache, tokens = make_cache(page_size=4, num_pages=2), np.arange(6, dtype=np.int32)
    cache.release(fill(cache, tokens), tokens)
    lease = cache.acquire(np.arange(8, dtype=np.int32))
    assert lease.num_cached_tokens == 6 and lease.page_table[0, :2].tolist() == [1, 2]
    assert [(kind, source) for kind, source, target in moves(cache) if source != target] == []
    cache.check_invariants()


def test_partial_page_without_room_for_its_copy_is_left_out() -> None:
    """All pages are held: whole pages are shared, and nothing fails."""
    cache, tokens = make_cache(page_size=4, num_pages=2), np.arange(6, dtype=np.int32)
    first = fill(cache, tokens)
    lease = cache.acquire(tokens)
    assert (lease.num_cached_tokens, lease.num_pages) == (4, 1) and cache.take_moves() == []
    cache.release(first)
    assert cache.acquire(tokens).num_cached_tokens == 4
    cache.check_invariants()


def test_partial_page_beyond_the_longest_request_is_left_out() -> None:
    cache, tokens = make_cache(page_size=4, max_pages=1), np.arange(6, dtype=np.int32)
    cache.tree.insert(tokens[:4], [20])
    cache.pools[0].alloc(32)
    cache.pools[0].free(np.array([p for p in range(1, 33) if p not in (20, 21)]))
    cache.tree.insert_tail(tokens[4:], np.array([21]), below=cache.tree.match(tokens).node)
    lease = cache.acquire(tokens)
    assert (lease.num_cached_tokens, lease.num_pages) == (4, 1)
    cache.check_invariants()


# -- refusals


def refused_state(cache: PrefixCache) -> list[object]:
    return [state(cache), [node.hits for node in cache.tree.nodes()], cache.counters.num_lookups]


def test_acquire_short_of_wanted_pages_raises_and_changes_nothing() -> None:
    """Asked again at every step while it waits: this must not look like so many uses."""
    cache, tokens = make_cache(page_size=4, num_pages=6), np.arange(8, dtype=np.int32)
    cache.release(fill(cache, tokens), tokens)
    handle = cache.acquire(tokens_of(70))
    cache.extend(handle, 12)
    before = refused_state(cache)
    for _ in range(3):
        with pytest.raises(OutOfPages, match="2 pages wanted, 1 free or evictable and not promised to others"):
            cache.acquire(np.arange(14, dtype=np.int32), num_wanted_tokens=16, num_reserved_pages=0)
    assert refused_state(cache) == before and cache.take_moves() == []
    cache.check_invariants()


def test_acquire_of_reserved_pages_raises() -> None:
    cache = make_cache(page_size=4, num_pages=6)
    with pytest.raises(OutOfPages, match="4 pages wanted, 3 free"):
        cache.acquire(tokens_of(1), num_wanted_tokens=16, num_reserved_pages=3)
    assert cache.acquire(tokens_of(1), num_wanted_tokens=12, num_reserved_pages=3).num_pages == 0
    cache.check_invariants()


def test_acquire_that_would_evict_young_pages_raises_unless_allowed() -> None:
    now = [100.0]
    cache = make_cache(page_size=4, num_pages=4, min_ttl_s=10.0, clock=lambda: now[0])
    for first in (0, 50):
        tokens = np.arange(first, first + 8, dtype=np.int32)
        cache.release(fill(cache, tokens), tokens)
        now[0] += 5
    wanted = np.arange(100, 107, dtype=np.int32)
    now[0] = 109.0
    for _ in range(2):
        with pytest.raises(PagesTooYoung, match="2 pages wanted, 0 free, and all others were used less than min_ttl_s"):
            cache.acquire(wanted, allow_young=False)
    assert cache.tree.root_locks() == 0 and cache.tree.num_evictable_pages == 4
    now[0] = 111.0
    cache.release(cache.acquire(wanted, allow_young=False))
    assert cache.counters.num_evicted_pages == 2 and cache.counters.num_early_evictions == 0
    assert cache.num_matching_tokens(np.arange(50, 59, dtype=np.int32), Namespace()) == 8
    lease = cache.acquire(np.arange(100, 113, dtype=np.int32))
    cache.extend(lease, 13)
    assert cache.counters.num_early_evictions == 1
    cache.check_invariants()


# -- the host tier


def test_host_pages_are_brought_back_before_their_copy_and_whole_ones_shared() -> None:
    cache, tokens = make_cache(page_size=4, num_pages=4, num_host_pages=8), np.arange(10, dtype=np.int32)
    cache.release(fill(cache, tokens), tokens)
    other = cache.acquire(tokens_of(70))
    cache.extend(other, 16)
    assert cache.counters.num_spilled_pages == 3 and cache.tree.num_host_pages == 3
    spilled = dict(zip(*(np.concatenate([np.array(ids) for ids in sides]).tolist() for sides in zip(
        *((source, target) for kind, source, target in moves(cache) if kind == "OUT")))))
    assert sorted(spilled) == [1, 2, 3]
    cache.release(other)
    assert cache.num_matching_tokens(np.arange(12, dtype=np.int32), Namespace()) == 10
    lease = cache.acquire(np.arange(12, dtype=np.int32))
    assert (lease.num_cached_tokens, lease.num_host_tokens, lease.num_copied_tokens) == (10, 8, 2)
    brought = moves(cache)
    assert {kind for kind, _, _ in brought} == {"IN"}
    came = {target: source for _, sources, targets in brought for source, target in zip(sources, targets)}
    assert [came[page] for page in lease.page_table[0, :3].tolist()] == [spilled[1], spilled[2], spilled[3]]
    assert (lease.num_committed, cache.tree.num_host_pages) == (2, 1)      # the tail itself stays on the host
    assert (cache.counters.num_host_hit_tokens, cache.counters.num_recomputed_tokens) == (8, 0)
    cache.check_invariants()


def test_host_pages_come_back_as_far_as_there_is_room() -> None:
    cache, tokens = make_cache(page_size=4, num_pages=4, num_host_pages=8), np.arange(12, dtype=np.int32)
    cache.release(fill(cache, tokens), tokens)
    other = cache.acquire(tokens_of(70))
    cache.extend(other, 16)
    cache.truncate(other, 8)
    assert cache.num_free_pages == 2 and cache.tree.num_host_pages == 3
    lease = cache.acquire(np.arange(14, dtype=np.int32))
    assert (lease.num_cached_tokens, lease.num_host_tokens, lease.num_pages) == (8, 8, 2)
    assert cache.tree.num_host_pages == 1
    cache.check_invariants()


def test_full_host_gives_way_to_what_was_used_later() -> None:
    cache = make_cache(page_size=4, num_pages=2, num_host_pages=2)
    for first in (0, 20, 40, 60):
        tokens = np.arange(first, first + 8, dtype=np.int32)
        cache.release(fill(cache, tokens), tokens)
        cache.check_invariants()
    found = [cache.num_matching_tokens(np.arange(first, first + 9, dtype=np.int32), Namespace())
             for first in (0, 20, 40, 60)]
    assert found == [0, 0, 8, 8]
    assert [node.tier for node in cache.tree.nodes()].count(Tier.HOST) == 1


def test_evicted_tokens_are_counted_when_they_come_again() -> None:
    cache = make_cache(page_size=4, num_pages=2)
    for first in (0, 20):
        tokens = np.arange(first, first + 8, dtype=np.int32)
        cache.release(fill(cache, tokens), tokens)
    lease = cache.acquire(np.arange(12, dtype=np.int32))
    assert (lease.num_cached_tokens, lease.num_evicted_tokens) == (0, 8)
    assert cache.counters.num_recomputed_tokens == 8
    cache.check_invariants()


# -- the user's hand


def test_evict_tells_the_pages_of_both_tiers_and_leaves_what_runs() -> None:
    cache, tokens = make_cache(page_size=4, num_pages=4, num_host_pages=8), np.arange(14, dtype=np.int32)
    cache.release(fill(cache, tokens), tokens)
    other = cache.acquire(tokens_of(70))
    cache.extend(other, 5)
    assert cache.tree.num_host_pages == 2
    lease = cache.acquire(tokens[:5])
    cache.take_moves()
    assert lease.num_cached_tokens == 4
    assert cache.evict(tokens[:2]) == 3
    assert cache.num_matching_tokens(np.arange(20, dtype=np.int32), Namespace()) == 4
    assert cache.tree.num_host_pages == 0 and cache.host_pools[0].num_free == 8
    assert cache.evict(tokens[:2]) == 0 and cache.evict(tokens_of(5)) == 0
    cache.check_invariants()
    cache.release(lease)
    assert cache.evict(tokens[:2]) == 1
    cache.check_invariants()


def test_clear_takes_every_namespace_and_leaves_live_pages_to_be_copied() -> None:
    cache, tokens = make_cache(page_size=4), np.arange(6, dtype=np.int32)
    cache.release(fill(cache, tokens, Namespace(salt="a")), tokens)
    running = fill(cache, tokens)
    assert cache.clear() == 2 and [cache.tree.namespace_of(node) for node in cache.tree.nodes()] == [Namespace()]
    assert cache.acquire(np.arange(9, dtype=np.int32)).num_cached_tokens == 6
    assert running.num_pages == 2
    cache.check_invariants()


def test_lease_survives_eviction_of_everything_else() -> None:
    cache, tokens = make_cache(num_pages=8), np.arange(8, dtype=np.int32)
    cache.release(fill(cache, tokens))
    lease = cache.acquire(tokens[:5])
    held = lease.page_table[0, :2].tolist()
    assert cache.clear() == 2 and cache.pools[0].num_free == 6
    assert not set(held) & set(cache.pools[0].free_pages().tolist())
    cache.check_invariants()
    cache.release(lease)
    assert cache.clear() == 2 and cache.pools[0].num_free == 8
    cache.check_invariants()


def test_disabled_cache_shares_nothing_and_returns_everything() -> None:
    cache, tokens = make_cache(enabled=False), np.arange(8, dtype=np.int32)
    for _ in range(2):
        lease = fill(cache, tokens)
        assert lease.num_cached_tokens == 0 and lease.num_committed == 0
        assert cache.num_matching_tokens(tokens, Namespace()) == 0
        cache.check_invariants()
        cache.release(lease, tokens)
        assert cache.pools[0].num_free == 32
    assert cache.counters.num_hit_tokens == 0


def test_two_groups_keep_a_page_table_each() -> None:
    cache, tokens = make_cache(num_groups=2, num_pages=8), np.arange(8, dtype=np.int32)
    cache.pools[1].free(cache.pools[1].alloc(3))     # now on top in reverse: the groups' ids differ from here on
    odd = cache.acquire(tokens_of(50, 51, 52))
    cache.extend(odd, 3)
    cache.truncate(odd, 1)
    lease = fill(cache, tokens)
    assert lease.page_table[0, :4].tolist() != lease.page_table[1, :4].tolist()
    again = cache.acquire(tokens)
    assert again.page_table[:, :3].tolist() == lease.page_table[:, :3].tolist()
    cache.check_invariants()
    for held in (odd, lease, again):
        cache.release(held)
    assert cache.clear() == 4 and [pool.num_free for pool in cache.pools] == [8, 8]
    cache.check_invariants()


def test_counters_leave_out_resumed_requests() -> None:
    """S12: coming back after preemption is not a look-up of the user's."""
    cache, tokens = make_cache(page_size=4), np.arange(12, dtype=np.int32)
    cache.release(fill(cache, tokens))
    cache.acquire(tokens)
    cache.acquire(tokens, is_resumed=True)
    counters = cache.counters
    assert (counters.num_lookups, counters.num_lookup_tokens, counters.num_hit_tokens) == (2, 24, 11)
    assert (counters.num_copied_tokens, counters.num_host_hit_tokens) == (3, 0)


# -- random operations


@dataclass(eq=False)
class Writer:
    """A lease as its user sees it: tokens, and how many of them have KV."""
    lease: Lease
    namespace: Namespace
    tokens: np.ndarray
    num_written: int


@pytest.mark.parametrize("page_size, num_pages, num_groups, enabled, num_host_pages", [
    (1, 12, 1, True, 0), (2, 16, 2, True, 0), (4, 20, 1, True, 0), (4, 20, 2, True, 15), (2, 9, 1, False, 0)])
def test_cache_random_operations_never_mix_contents(page_size: int, num_pages: int, num_groups: int,
                                                    enabled: bool, num_host_pages: int) -> None:
    rng = random.Random(num_pages)
    cache = make_cache(page_size, num_pages, max_pages=12, num_groups=num_groups, enabled=enabled,
                       num_host_pages=num_host_pages)
    namespaces = (Namespace(), Namespace(salt="x"))
    content: dict[tuple[int, int], tuple[Namespace, tuple[int, ...]]] = {}     # (group, page) -> prefix up to its end
    host_content: dict[tuple[int, int], tuple[Namespace, tuple[int, ...]]] = {}
    writers: list[Writer] = []
    seen: dict[str, int] = {}

    def write(w: Writer, num_tokens: int) -> None:
        first = w.num_written // page_size
        for i in range(first, -(-num_tokens // page_size)):
            prefix = tuple(w.tokens[:min((i + 1) * page_size, num_tokens)])
            for g in range(num_groups):
                content[g, w.lease.page_table[g, i]] = w.namespace, prefix
        w.num_written = num_tokens

    def carry_out_moves() -> None:
        for kind, sources, targets in cache.take_moves():
            read = host_content if kind is MoveKind.IN else content
            written = host_content if kind is MoveKind.OUT else content
            for g in range(num_groups):
                for source, target in zip(sources[g].tolist(), targets[g].tolist()):
                    written[g, target] = read[g, source]
            note(kind.name)

    def note(event: str) -> None:
        seen[event] = seen.get(event, 0) + 1

    for _ in range(2000):
        operation = rng.choice(["acquire", "acquire", "extend", "extend", "commit", "truncate", "release", "clear"])
        w = rng.choice(writers) if writers else None
        if w is None or operation == "acquire" and len(writers) < 7:
            tokens = np.array([rng.random() < 0.06 for _ in range(rng.randrange(1, 12 * page_size + 1))], np.int32)
            namespace = rng.choice(namespaces)
            promised = cache.num_matching_tokens(tokens, namespace)
            has_room = cache.num_available_pages > len(tokens) // page_size
            lease = cache.acquire(tokens, namespace)
            carry_out_moves()
            writers.append(Writer(lease, namespace, tokens, lease.num_cached_tokens))
            assert lease.num_cached_tokens == promised if has_room else lease.num_cached_tokens <= promised
            assert lease.num_cached_tokens < len(tokens)
            assert lease.num_cached_tokens == lease.num_committed * page_size + lease.num_copied_tokens
            note("hit" if lease.num_cached_tokens else "miss")
        elif operation == "extend":
            wanted = min(w.num_written + rng.randrange(3 * page_size + 1), len(w.tokens))
            before = state(cache, w.lease)
            try:
                cache.extend(w.lease, wanted)
            except OutOfPages:
                assert state(cache, w.lease) == before
                assert wanted - w.lease.num_pages * page_size > cache.num_available_pages * page_size - page_size
                note("refused")
            else:
                carry_out_moves()
                write(w, wanted)
        elif operation == "commit":
            before = w.lease.page_table.tolist()
            cache.commit(w.lease, w.tokens[:w.num_written])
            note("commit" if w.lease.page_table.tolist() == before else "twin")
        elif operation == "truncate" and rng.random() < 0.3:
            keep = rng.randrange(w.num_written + 1)
            cache.truncate(w.lease, keep)
            w.num_written = min(w.num_written, max(keep, w.lease.num_committed * page_size))
        elif operation == "release" and rng.random() < 0.7:
            cache.release(w.lease, w.tokens[:w.num_written] if rng.random() < 0.7 else None)
            writers.remove(w)
            note("release")
        elif operation == "clear" and rng.random() < 0.1:
            cache.clear()
            assert cache.tree.num_evictable_pages == 0
        cache.check_invariants()
        for w in writers:
            for i in range(-(-w.num_written // page_size)):
                expected = w.namespace, tuple(w.tokens[:min((i + 1) * page_size, w.num_written)])
                for g in range(num_groups):
                    held = content[g, w.lease.page_table[g, i]]
                    assert held[0] == expected[0] and held[1][:len(expected[1])] == expected[1]
    for w in writers:
        cache.release(w.lease, w.tokens[:w.num_written])
    cache.check_invariants()
    assert cache.num_available_pages == num_pages and cache.tree.num_locked_pages == 0
    assert seen["refused"] > 5 and seen["release"] > 20 and (not enabled or min(seen["hit"], seen["twin"]) > 5), seen
    assert (seen.get("COPY", 0) > 20) == (enabled and page_size > 1), seen
    assert (seen.get("IN", 0) > 5) == (num_host_pages > 0), seen
