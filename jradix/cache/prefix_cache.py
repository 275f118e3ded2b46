"""The prefix cache: the tree and the pools together, handed out as leases. It owns every page id of every group.

Every page id is in exactly one of {free list, tree, one lease}; `check_invariants` recomputes that by walking.
The pages of a lease as a ruler:

    [0, committed)          owned by the tree, locked by this lease
    [committed, num_pages)  owned by this lease: first those with KV, then those still empty
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jradix.cache.pages import SCRATCH_PAGE, PagePool
from jradix.cache.radix_tree import Namespace, Node, RadixTree
from jradix.errors import OutOfPages


@dataclass(slots=True, eq=False)
class Lease:
    """A request's hold on pages.

    Attributes:
      namespace: where its tokens live in the tree.
      page_table: int32[G, M]; the first `num_pages` columns are valid, the rest name the scratch page.
      num_pages: pages held, shared and own.
      num_committed: leading pages that the tree owns.
      num_cached_tokens: tokens that were found in the tree when it was acquired.
      node: the locked node; None once released.
    """
    namespace: Namespace
    page_table: np.ndarray
    num_pages: int = 0
    num_committed: int = 0
    num_cached_tokens: int = 0
    node: Node | None = None
    is_released: bool = False


@dataclass(slots=True)
class CacheCounters:
    """Totals since the start, in tokens unless named otherwise."""
    num_lookups: int = 0
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_pages: int = 0


@dataclass(slots=True)
class PrefixCache:
    """Leases of pages with shared prefixes.

    Args:
      tree: the radix tree; its page size and groups hold for all.
      pools: one page pool per KV group.
      max_pages: M, the longest page table.
      enabled: False never shares anything.
    """
    tree: RadixTree
    pools: tuple[PagePool, ...]
    max_pages: int
    enabled: bool = True
    counters: CacheCounters = field(default_factory=CacheCounters)
    _leases: set[Lease] = field(default_factory=set)

    @classmethod
    def create(cls, *, page_size: int, num_pages: int, max_pages: int, num_groups: int = 1,
               enabled: bool = True) -> PrefixCache:
        return cls(RadixTree(page_size, num_groups), tuple(PagePool(num_pages) for _ in range(num_groups)), max_pages,
                   enabled)

    @property
    def page_size(self) -> int:
        return self.tree.page_size

    @property
    def num_pages(self) -> int:
        """Pages of the smallest pool."""
        return min(pool.num_pages for pool in self.pools)

    @property
    def num_available_pages(self) -> int:
        """Pages that an extend can get: free, and evictable ones in the tree."""
        return min(pool.num_free for pool in self.pools) + self.tree.num_evictable_pages

    def num_matching_tokens(self, tokens: np.ndarray, namespace: Namespace, *, max_cached_tokens: int | None = None
                            ) -> int:
        """Tokens an `acquire` would find, without counting as a use."""
        if not self.enabled:
            return 0
        cap = _cap(tokens, max_cached_tokens)
        return self.tree.match(tokens[:cap], namespace, touch=False).num_tokens

    def acquire(self, tokens: np.ndarray, namespace: Namespace = Namespace(), *, max_cached_tokens: int | None = None,
                is_resumed: bool = False) -> Lease:
        """Locks the longest cached prefix of a prompt and returns a lease that holds it.

        At most `len(tokens) - 1` tokens are taken, in whole pages: the last prompt token is always run for its logits.

        Args:
          tokens: int32[k], k >= 1.
          max_cached_tokens: a lower cap, for requests that need the logits of earlier tokens.
          is_resumed: a preempted request comes back; kept out of the hit rate.
        """
        lease = Lease(namespace, np.full((len(self.pools), self.max_pages), SCRATCH_PAGE, np.int32))
        if self.enabled:
            match = self.tree.match(tokens[:_cap(tokens, max_cached_tokens)], namespace, touch=False)
            lease.node = self.tree.lock(match)
            lease.num_pages = lease.num_committed = match.pages.shape[1]
            lease.page_table[:, :lease.num_pages] = match.pages
            lease.num_cached_tokens = match.num_tokens
        if not is_resumed:
            self.counters.num_lookups += 1
            self.counters.num_lookup_tokens += len(tokens)
            self.counters.num_hit_tokens += lease.num_cached_tokens
        self._leases.add(lease)
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> None:
        """Makes room for `num_tokens` tokens in all, evicting unlocked leaves where the pool is short.

        Raises:
          OutOfPages: free and evictable pages together do not suffice; nothing was changed.
        """
        assert not lease.is_released, "extend of a released lease"
        missing = -(-num_tokens // self.page_size) - lease.num_pages
        if missing <= 0:
            return
        if lease.num_pages + missing > self.max_pages:
            raise OutOfPages(f"{num_tokens} tokens need {lease.num_pages + missing} pages, a request has at most "
                             f"{self.max_pages}")
        if missing > self.num_available_pages:
            raise OutOfPages(f"{missing} pages wanted, {self.num_available_pages} free or evictable")
        self._reclaim(missing)
        for row, pool in zip(lease.page_table, self.pools):
            row[lease.num_pages:lease.num_pages + missing] = pool.alloc(missing)
        lease.num_pages += missing

    def truncate(self, lease: Lease, num_tokens: int) -> None:
        """Gives back the lease's own pages that lie wholly beyond `num_tokens` tokens."""
        keep = max(-(-num_tokens // self.page_size), lease.num_committed)
        if keep >= lease.num_pages:
            return
        for row, pool in zip(lease.page_table, self.pools):
            pool.free(row[keep:lease.num_pages])
        lease.page_table[:, keep:lease.num_pages] = SCRATCH_PAGE
        lease.num_pages = keep

    def commit(self, lease: Lease, tokens: np.ndarray) -> None:
        """Hands the full pages of `tokens` to the tree; the lease keeps them locked.

        Where the tree has the same tokens already, its pages win: ours are freed and the lease's page table is
        rewritten, so that no page table names a free page.

        Args:
          tokens: int32[k], the request's tokens whose KV is written (or will be by a step already dispatched).
        """
        done, full = lease.num_committed, len(tokens) // self.page_size
        if not self.enabled or full <= done:
            return
        assert full <= lease.num_pages, f"{full} pages of tokens committed, the lease holds {lease.num_pages}"
        new_tokens = tokens[done * self.page_size:full * self.page_size]
        inserted = self.tree.insert(new_tokens, lease.page_table[:, done:full], lease.namespace, below=lease.node)
        twins = inserted.num_existing_pages
        if twins:
            for row, pool, theirs in zip(lease.page_table, self.pools, inserted.match.pages):
                pool.free(row[done:done + twins])
                row[done:done + twins] = theirs[:twins]
        node = self.tree.lock(inserted.match)
        self.tree.unlock(lease.node)
        lease.node, lease.num_committed = node, full

    def release(self, lease: Lease, tokens: np.ndarray | None = None) -> None:
        """Ends a lease: commits `tokens` if given, frees its own pages, unlocks its path. A second call does nothing."""
        if lease.is_released:
            return
        if tokens is not None:
            self.commit(lease, tokens)
        for row, pool in zip(lease.page_table, self.pools):
            pool.free(row[lease.num_committed:lease.num_pages])
        lease.page_table[:] = SCRATCH_PAGE
        if lease.node is not None:
            self.tree.unlock(lease.node)
        lease.node, lease.num_pages, lease.num_committed, lease.is_released = None, 0, 0, True
        self._leases.remove(lease)

    def clear(self) -> int:
        """Evicts all that no lease holds; returns the number of pages freed per group."""
        num_pages = self.tree.num_evictable_pages
        self._evict(num_pages)
        return num_pages

    def check_invariants(self) -> None:
        """Walks free lists, tree and leases; raises AssertionError unless each page id is in exactly one of them."""
        self.tree.check_invariants()
        for pool in self.pools:
            pool.check_invariants()
        locks = 0
        for g, pool in enumerate(self.pools):
            owned = [pool.free_pages(), *(node.pages[g] for node in self.tree.nodes())]
            for lease in self._leases:
                owned.append(lease.page_table[g, lease.num_committed:lease.num_pages])
                assert (lease.page_table[g, lease.num_pages:] == SCRATCH_PAGE).all(), "page table beyond the lease"
            ids = np.sort(np.concatenate(owned))
            assert np.array_equal(ids, np.arange(1, pool.num_pages + 1)), (
                f"group {g}: {len(ids)} page ids owned, {len(np.unique(ids))} distinct, pool of {pool.num_pages}")
        for lease in self._leases:
            node, path = lease.node, []
            while node is not None:
                assert node.lock_count > 0, "a lease's path is not locked"
                path.append(node.pages)
                node = node.parent
            shared = np.concatenate(path[::-1], axis=1) if path else np.empty((len(self.pools), 0), np.int32)
            assert np.array_equal(shared, lease.page_table[:, :lease.num_committed]), "a lease and its path differ"
            locks += lease.node is not None
        roots = self.tree.root_locks()
        assert roots == locks, f"{roots} locks at the roots, {locks} leases hold one"

    def _reclaim(self, num_pages: int) -> None:
        short = num_pages - min(pool.num_free for pool in self.pools)
        if short > 0:
            self._evict(short)

    def _evict(self, num_pages: int) -> None:
        for pool, pages in zip(self.pools, self.tree.evict(num_pages)):
            pool.free(pages)
            self.counters.num_evicted_pages += len(pages)


def _cap(tokens: np.ndarray, max_cached_tokens: int | None) -> int:
    longest = len(tokens) - 1
    return max(longest if max_cached_tokens is None else min(longest, max_cached_tokens), 0)
