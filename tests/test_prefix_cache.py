"""The prefix cache: what leases hold, share and give back, against an ownership oracle that remembers page contents."""
from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from jradix.cache.pages import SCRATCH_PAGE
from jradix.cache.prefix_cache import Lease, PrefixCache
from jradix.cache.radix_tree import Namespace
from jradix.errors import OutOfPages


def make_cache(page_size: int = 2, num_pages: int = 32, max_pages: int = 16, num_groups: int = 1,
               enabled: bool = True) -> PrefixCache:
    return PrefixCache.create(page_size=page_size, num_pages=num_pages, max_pages=max_pages, num_groups=num_groups,
                              enabled=enabled)


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


@pytest.mark.parametrize("num_tokens, num_cached", [(12, 8), (13, 12), (1, 0), (4, 0), (5, 4)])
def test_acquire_whole_prompt_cached_leaves_the_last_token(num_tokens: int, num_cached: int) -> None:
    """R16: at most len - 1 tokens, in whole pages, so that a forward pass is never empty."""
    cache, tokens = make_cache(page_size=4), np.arange(num_tokens, dtype=np.int32)
    cache.release(fill(cache, tokens), tokens)
    assert cache.num_matching_tokens(tokens, Namespace()) == num_cached
    lease = cache.acquire(tokens)
    assert lease.num_cached_tokens == num_cached and lease.num_pages == lease.num_committed == num_cached // 4
    cache.check_invariants()


@pytest.mark.parametrize("cap, num_cached", [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (100, 8), (None, 8)])
def test_acquire_lower_cap_limits_the_match(cap: int | None, num_cached: int) -> None:
    cache, tokens = make_cache(page_size=4), np.arange(12, dtype=np.int32)
    cache.release(fill(cache, tokens))
    assert cache.num_matching_tokens(tokens, Namespace(), max_cached_tokens=cap) == num_cached
    assert cache.acquire(tokens, max_cached_tokens=cap).num_cached_tokens == num_cached
    cache.check_invariants()


def test_acquire_other_namespace_finds_nothing() -> None:
    """R11 at the level of the cache."""
    cache, tokens = make_cache(), np.arange(8, dtype=np.int32)
    cache.release(fill(cache, tokens, Namespace(adapter="s")))
    assert cache.acquire(tokens, Namespace(salt="s")).num_cached_tokens == 0
    assert cache.acquire(tokens, Namespace()).num_cached_tokens == 0
    assert cache.acquire(tokens, Namespace(adapter="s")).num_cached_tokens == 6


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
    cache, tokens = make_cache(num_pages=6, num_groups=num_groups), np.arange(6, dtype=np.int32)
    cache.release(fill(cache, tokens), tokens)
    held, lease = cache.acquire(tokens), cache.acquire(tokens_of(7))
    cache.extend(lease, 2)
    before = state(cache, held, lease)
    with pytest.raises(OutOfPages, match="4 pages wanted, 3 free or evictable"):
        cache.extend(lease, 10)
    assert state(cache, held, lease) == before
    cache.check_invariants()
    cache.extend(lease, 8)
    assert pages_in_use(cache) == 6


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
    assert (counters.num_lookups, counters.num_lookup_tokens, counters.num_hit_tokens) == (2, 24, 8)


# -- random operations


@dataclass(eq=False)
class Writer:
    """A lease as its user sees it: tokens, and how many of them have KV."""
    lease: Lease
    namespace: Namespace
    tokens: np.ndarray
    num_written: int


@pytest.mark.parametrize("page_size, num_pages, num_groups, enabled",
                         [(1, 12, 1, True), (2, 16, 2, True), (4, 20, 1, True), (2, 9, 1, False)])
def test_cache_random_operations_never_mix_contents(page_size: int, num_pages: int, num_groups: int,
                                                    enabled: bool) -> None:
    rng = random.Random(num_pages)
    cache = make_cache(page_size, num_pages, max_pages=12, num_groups=num_groups, enabled=enabled)
    namespaces = (Namespace(), Namespace(salt="x"))
    content: dict[tuple[int, int], tuple[Namespace, tuple[int, ...]]] = {}     # (group, page) -> prefix up to its end
    writers: list[Writer] = []
    seen: dict[str, int] = {}

    def write(w: Writer, num_tokens: int) -> None:
        first = w.num_written // page_size
        for i in range(first, -(-num_tokens // page_size)):
            prefix = tuple(w.tokens[:min((i + 1) * page_size, num_tokens)])
            for g in range(num_groups):
                content[g, w.lease.page_table[g, i]] = w.namespace, prefix
        w.num_written = num_tokens

    def note(event: str) -> None:
        seen[event] = seen.get(event, 0) + 1

    for _ in range(2000):
        operation = rng.choice(["acquire", "acquire", "extend", "extend", "commit", "truncate", "release", "clear"])
        w = rng.choice(writers) if writers else None
        if w is None or operation == "acquire" and len(writers) < 7:
            tokens = np.array([rng.random() < 0.06 for _ in range(rng.randrange(1, 12 * page_size + 1))], np.int32)
            namespace = rng.choice(namespaces)
            lease = cache.acquire(tokens, namespace)
            writers.append(Writer(lease, namespace, tokens, lease.num_cached_tokens))
            assert lease.num_cached_tokens < len(tokens) and lease.num_cached_tokens == lease.num_committed * page_size
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
