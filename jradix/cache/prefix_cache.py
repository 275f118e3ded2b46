"""The prefix cache: the tree and the pools together, handed out as leases. It owns every page id of every group.

Every device page id is in exactly one of {free list, tree, one lease}, every host page id in one of {free list, tree};
`check_invariants` recomputes that by walking. The pages of a lease as a ruler:

    [0, committed)          owned by the tree, locked by this lease
    [committed, num_pages)  owned by this lease: first those with KV, then those still empty

What has to be copied before the next step (a page that is used in part, pages that go to the host or come back) is
noted as moves, in order; the owner of the device takes them with `take_moves` and carries them out before anything else
touches the KV. So a page may be handed on at once: who reads the old content stands before who writes the new one.
"""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

import numpy as np

from jradix.batch import MoveKind, PageMove
from jradix.cache.node import Match, Namespace, Node, Tier
from jradix.cache.pages import SCRATCH_PAGE, PagePool
from jradix.cache.pins import Pin, Pins
from jradix.cache.radix_tree import RadixTree, common_prefix
from jradix.errors import OutOfPages, PagesTooYoung

HISTORY_POOLS = 8     # evicted pages are remembered up to this many times the pool


@dataclass(slots=True, eq=False)
class Lease:
    """A request's hold on pages.

    Attributes:
      namespace: where its tokens live in the tree; None: it shares nothing.
      page_table: int32[G, M]; the first `num_pages` columns are valid, the rest name the scratch page.
      num_pages: pages held, shared and own.
      num_committed: leading pages that the tree owns.
      num_cached_tokens: tokens whose KV it found when it was acquired.
      num_host_tokens: of these, tokens that came back from the host.
      num_copied_tokens: of these, tokens in a page that was copied for their sake.
      num_evicted_tokens: further tokens whose KV had been here and was evicted.
      node: the locked node; None once released.
      tail: tokens after the committed pages whose KV this lease has written, fewer than a page.
    """
    namespace: Namespace | None
    page_table: np.ndarray
    num_pages: int = 0
    num_committed: int = 0
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_copied_tokens: int = 0
    num_evicted_tokens: int = 0
    node: Node | None = None
    tail: np.ndarray | None = None
    is_released: bool = False


@dataclass(slots=True)
class CacheCounters:
    """Totals since the start, in tokens unless named otherwise."""
    num_lookups: int = 0
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_copied_tokens: int = 0
    num_recomputed_tokens: int = 0     # looked up after their KV had been evicted
    num_evicted_pages: int = 0         # off the device, lost or to the host
    num_spilled_pages: int = 0         # of these, to the host
    num_early_evictions: int = 0       # nodes evicted younger than min_ttl_s


@dataclass(slots=True)
class PrefixCache:
    """Leases of pages with shared prefixes.

    Args:
      tree: the radix tree; its page size and groups hold for all.
      pools: one page pool per KV group.
      max_pages: M, the longest page table.
      enabled: False never shares anything.
      host_pools: one pool of host pages per KV group; empty: no host tier.
      max_pinned_fraction: share of the pool that pins may hold.
      clock: seconds.
      granularity: hits are multiples of this many tokens, a multiple of the page size; 1: they are exact.

    Attributes:
      pins: what is protected on the user's wish.
    """
    tree: RadixTree
    pools: tuple[PagePool, ...]
    max_pages: int
    enabled: bool = True
    host_pools: tuple[PagePool, ...] = ()
    max_pinned_fraction: float = 0.5
    clock: Callable[[], float] = time.monotonic
    granularity: int = 1
    counters: CacheCounters = field(default_factory=CacheCounters)
    _leases: set[Lease] = field(default_factory=set)
    _writers: dict[Node, list[Lease]] = field(default_factory=dict)     # leases with a tail, by their node
    _moves: list[PageMove] = field(default_factory=list)
    pins: Pins = field(init=False)

    def __post_init__(self) -> None:
        self.pins = Pins(self.tree, int(self.max_pinned_fraction * self.num_pages), self.clock)

    @classmethod
    def create(cls, *, page_size: int, num_pages: int, max_pages: int, num_groups: int = 1, enabled: bool = True,
               num_host_pages: int = 0, eviction_policy: str = "lru", min_ttl_s: float = 0.0,
               max_pinned_fraction: float = 0.5, clock: Callable[[], float] = time.monotonic,
               granularity: int = 1) -> PrefixCache:
        """Tree and pools of these sizes; `eviction_policy` and `min_ttl_s` as in `jradix.cache.eviction`."""
        tree = RadixTree(page_size, num_groups, policy=eviction_policy, num_pages=num_pages, min_ttl_s=min_ttl_s,
                         clock=clock, history_pages=HISTORY_POOLS * num_pages)
        host_pools = tuple(PagePool(num_host_pages) for _ in range(num_groups)) if num_host_pages else ()
        return cls(tree, tuple(PagePool(num_pages) for _ in range(num_groups)), max_pages, enabled, host_pools,
                   max_pinned_fraction, clock, granularity)

    @property
    def page_size(self) -> int:
        return self.tree.page_size

    @property
    def num_pages(self) -> int:
        """Pages of the smallest pool."""
        return min(pool.num_pages for pool in self.pools)

    @property
    def num_free_pages(self) -> int:
        return min(pool.num_free for pool in self.pools)

    @property
    def num_available_pages(self) -> int:
        """Pages that an extend can get: free, and evictable ones in the tree."""
        return self.num_free_pages + self.tree.num_evictable_pages

    @property
    def num_host_pages(self) -> int:
        """Pages of the host tier."""
        return min((pool.num_pages for pool in self.host_pools), default=0)

    # -- leases

    def num_matching_tokens(self, tokens: np.ndarray, namespace: Namespace | None, *,
                            max_cached_tokens: int | None = None) -> int:
        """Tokens an `acquire` would find, without counting as a use."""
        if not self.enabled or namespace is None:
            return 0
        known = tokens[:_cap(tokens, max_cached_tokens)]
        match = self._match(known, namespace)
        return self._num_whole(match) + self._best_partial(match, known).num_tokens

    def acquire(self, tokens: np.ndarray, namespace: Namespace | None = Namespace(), *,
                max_cached_tokens: int | None = None, is_resumed: bool = False, num_wanted_tokens: int = 0,
                num_reserved_pages: int = 0, allow_young: bool = True) -> Lease:
        """Locks the longest cached prefix of a prompt and returns a lease that holds it.

        At most `len(tokens) - 1` tokens are taken: the last prompt token is always run for its logits. Whole pages are
        shared; the page in which the prefix ends is copied, pages on the host are brought back.

        Args:
          tokens: int32[k], k >= 1.
          namespace: None: nothing is shared, and nothing will be.
          max_cached_tokens: a lower cap, for requests that need the logits of earlier tokens.
          is_resumed: a preempted request comes back; kept out of the hit rate.
          num_wanted_tokens: room that must remain available for the request, these tokens included; 0: not checked.
          num_reserved_pages: available pages that are promised to others.
          allow_young: evict nodes younger than min_ttl_s where nothing older is left.

        Raises:
          OutOfPages: what is wanted is not available; nothing was changed.
          PagesTooYoung: it would be, but for nodes younger than min_ttl_s; older ones may have been evicted.
        """
        lease = Lease(namespace, np.full((len(self.pools), self.max_pages), SCRATCH_PAGE, np.int32))
        if not self.enabled or namespace is None:
            lease.namespace = None
            self._require(num_wanted_tokens, 0, num_reserved_pages)
            self._require_old(len(tokens), 0, allow_young)
        else:
            known = tokens[:_cap(tokens, max_cached_tokens)]
            match = self._match(known, namespace)
            partial = self._best_partial(match, known)
            lease.node = self.tree.lock(match, is_use=False)
            if partial.host_node is not None:
                self.tree.lock_node(partial.host_node)      # so that making room does not take its host page
            num_shared = match.pages.shape[1]
            try:
                self._require(num_wanted_tokens, num_shared, num_reserved_pages)
                self._require_old(len(tokens), num_shared, allow_young)
                self._bring_in(lease, match, partial, known)
            except OutOfPages:
                self.tree.unlock(lease.node)
                raise
            finally:
                if partial.host_node is not None:
                    self.tree.unlock(partial.host_node)
            self.tree.use(lease.node, match.partial)
            self.pins.refresh(tokens, namespace)
        if not is_resumed:
            self._count_lookup(lease, len(tokens))
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
        self.pins.expire()
        if missing > self.num_available_pages:
            raise OutOfPages(f"{missing} pages wanted, {self.num_available_pages} free or evictable")
        self._reclaim(missing)
        self._take_pages(lease, missing)

    def truncate(self, lease: Lease, num_tokens: int) -> None:
        """Gives back the lease's own pages that lie wholly beyond `num_tokens` tokens."""
        self._cut_tail(lease, num_tokens)
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
        rewritten, so that no page table names a free page. Tokens after the last full page stay with the lease, and
        others may copy them from it.

        Args:
          tokens: int32[k], the request's tokens whose KV is written (or will be by a step already dispatched).
        """
        if not self.enabled or lease.namespace is None:
            return
        done, full = lease.num_committed, len(tokens) // self.page_size
        self._forget_writer(lease)
        if full > done:
            assert full <= lease.num_pages, f"{full} pages of tokens committed, the lease holds {lease.num_pages}"
            new_tokens = tokens[done * self.page_size:full * self.page_size]
            inserted = self.tree.insert(new_tokens, lease.page_table[:, done:full], lease.namespace, below=lease.node)
            twins = inserted.num_existing_pages
            if twins:
                for row, pool, theirs in zip(lease.page_table, self.pools, inserted.match.pages):
                    pool.free(row[done:done + twins])
                    row[done:done + twins] = theirs[:twins]
            node = self.tree.lock(inserted.match, is_use=False)
            self.tree.unlock(lease.node)
            lease.node, lease.num_committed = node, full
            self._collect_freed()
        tail = tokens[lease.num_committed * self.page_size:]
        if len(tail) and lease.num_pages > lease.num_committed:
            lease.tail = tail.copy()
            self._writers.setdefault(lease.node, []).append(lease)

    def release(self, lease: Lease, tokens: np.ndarray | None = None) -> None:
        """Ends a lease: commits `tokens` if given, frees its own pages, unlocks its path. A second call does nothing.

        The last page goes to the tree as well, as a tail, when `tokens` end inside it.
        """
        if lease.is_released:
            return
        first_own = lease.num_committed
        if tokens is not None:
            self.commit(lease, tokens)
            first_own = lease.num_committed
            if lease.tail is not None and self.tree.insert_tail(
                    lease.tail, lease.page_table[:, first_own], lease.namespace, below=lease.node):
                first_own += 1
            self._collect_freed()
        self._forget_writer(lease)
        for row, pool in zip(lease.page_table, self.pools):
            pool.free(row[first_own:lease.num_pages])
        lease.page_table[:] = SCRATCH_PAGE
        if lease.node is not None:
            self.tree.unlock(lease.node)
        lease.node, lease.num_pages, lease.num_committed, lease.is_released = None, 0, 0, True
        self._leases.remove(lease)

    # -- moves

    def take_moves(self) -> list[PageMove]:
        """The moves noted since the last call, in the order in which they must happen."""
        moves, self._moves = self._moves, []
        return moves

    # -- the user's hand

    def pin(self, tokens: np.ndarray, namespace: Namespace = Namespace(), *, ttl_s: float | None = None,
            owner: object = None) -> Pin:
        """Protects `tokens` from eviction, the page they end in included; whole chunks of them with a `granularity`.

        Raises:
          PinError: as `Pins.add`.
        """
        num_shared = len(tokens) - len(tokens) % self.granularity
        return self.pins.add(tokens, self.tree.match(tokens[:num_shared], namespace), num_shared, ttl_s=ttl_s,
                             owner=owner)

    def evict(self, tokens: np.ndarray, namespace: Namespace = Namespace()) -> int:
        """Forgets all that begins with `tokens`, and the part of their own path that nothing else shares.

        What runs or is pinned stays.

        Returns:
          Device and host pages freed, per group.
        """
        pages, host_pages = self.tree.forget(tokens, namespace)
        self._free(self.pools, pages)
        self._free(self.host_pools, host_pages)
        self._collect_freed()
        return pages.shape[1] + host_pages.shape[1]

    def clear(self, *, unpin: bool = False) -> int:
        """Forgets all that no lease and no pin holds; returns the device and host pages freed, per group.

        Args:
          unpin: drop all pins first.
        """
        if unpin:
            self.pins.clear()
        num_freed = 0
        for namespace in list(self.tree.roots):
            num_freed += self.evict(np.empty(0, np.int32), namespace)
        return num_freed

    # -- checks

    def check_invariants(self) -> None:
        """Walks free lists, tree and leases; raises AssertionError unless each page id is in exactly one of them."""
        self.tree.check_invariants()
        assert not self.tree.freed_pages and not self.tree.freed_host_pages, "pages the tree gave up were not collected"
        nodes = list(self.tree.nodes())
        for pools, tier in ((self.pools, Tier.DEVICE), (self.host_pools, Tier.HOST)):
            for g, pool in enumerate(pools):
                pool.check_invariants()
                owned = [pool.free_pages(), *(node.pages[g] for node in nodes if node.tier is tier)]
                if tier is Tier.DEVICE:
                    owned += [lease.page_table[g, lease.num_committed:lease.num_pages] for lease in self._leases]
                ids = np.sort(np.concatenate(owned))
                assert np.array_equal(ids, np.arange(1, pool.num_pages + 1)), (
                    f"{tier.name} group {g}: {len(ids)} page ids owned, {len(np.unique(ids))} distinct, pool of "
                    f"{pool.num_pages}")
        assert self.pins.num_pages <= self.pins.max_pages, "more is pinned than allowed"
        locks = len(self.pins)
        for lease in self._leases:
            assert (lease.page_table[:, lease.num_pages:] == SCRATCH_PAGE).all(), "page table beyond the lease"
            node, path = lease.node, []
            while node is not None:
                assert node.lock_count > 0 and node.tier is Tier.DEVICE, "a lease's path is not locked on the device"
                path.append(node.pages)
                node = node.parent
            shared = np.concatenate(path[::-1], axis=1) if path else np.empty((len(self.pools), 0), np.int32)
            assert np.array_equal(shared, lease.page_table[:, :lease.num_committed]), "a lease and its path differ"
            locks += lease.node is not None
        roots = self.tree.root_locks()
        assert roots == locks, f"{roots} locks at the roots, {locks} leases and pins hold one"
        writers = [lease for leases in self._writers.values() for lease in leases]
        assert all(lease in self._leases and lease.tail is not None and lease in self._writers[lease.node]
                   for lease in writers), "a writer without lease or tail"
        assert len(writers) == sum(lease.tail is not None for lease in self._leases), "a tail without its writer"

    # -- parts of acquire

    def _match(self, known: np.ndarray, namespace: Namespace) -> Match:
        """The longest match that may be used. It is not counted as a use."""
        match = self.tree.match(known, namespace, touch=False)
        num_whole = self._num_whole(match)
        num_unused = num_whole % self.granularity
        if num_unused:
            num_gone = match.num_gone_tokens and match.num_gone_tokens + num_unused
            match = self.tree.match(known[:num_whole - num_unused], namespace, touch=False)
            match = match._replace(num_gone_tokens=num_gone)
        return match

    def _num_whole(self, match: Match) -> int:
        return match.num_tokens + match.num_host_pages * self.page_size

    def _best_partial(self, match: Match, known: np.ndarray) -> _PartialPage:
        """Where the page after a match can be copied from: a node of the tree, or a lease that is still writing it."""
        n, pages, host_node = 0, None, None
        if self.granularity > 1:
            return _PartialPage(n, pages, host_node)
        if match.partial is not None:
            node, index, n = match.partial
            pages = node.pages[:, index].copy()
            host_node = node if node.tier is Tier.HOST else None
        if match.node is not None and match.num_node_pages == match.node.num_pages:
            rest = known[self._num_whole(match):][:self.page_size]
            for lease in self._writers.get(match.node, ()):
                theirs = common_prefix(lease.tail, rest)
                if theirs > n:
                    n, pages, host_node = theirs, lease.page_table[:, lease.num_committed].copy(), None
        return _PartialPage(n, pages, host_node)

    def _require(self, num_wanted_tokens: int, num_shared: int, num_reserved_pages: int) -> None:
        """Raises OutOfPages unless the wanted tokens find room beside what is reserved. For a lease already locked."""
        if not num_wanted_tokens:
            return
        self.pins.expire()
        wanted = -(-num_wanted_tokens // self.page_size) - num_shared
        left = self.num_available_pages - num_reserved_pages
        if wanted > left:
            raise OutOfPages(f"{wanted} pages wanted, {left} free or evictable and not promised to others")

    def _require_old(self, num_tokens: int, num_shared: int, allow_young: bool) -> None:
        """Evicts for a prompt what it will need, old nodes only. Raises PagesTooYoung when they do not suffice."""
        if allow_young:
            return
        missing = -(-num_tokens // self.page_size) - num_shared
        self._reclaim(missing, allow_young=False)
        if missing > self.num_free_pages and missing <= self.num_available_pages:
            raise PagesTooYoung(f"{missing} pages wanted, {self.num_free_pages} free, and all others were used less "
                                "than min_ttl_s ago")

    def _bring_in(self, lease: Lease, match: Match, partial: _PartialPage, known: np.ndarray) -> None:
        """Brings what a locked match has on the host, and the page it ends in, to pages of the device.

        As far as the pool has room. The partial page is noted first: making room may have evicted its source, which
        nothing has overwritten until then.
        """
        known_once = self._num_whole(match) + match.num_gone_tokens
        known_once -= known_once % self.granularity
        num_host, room = match.num_host_pages, self.num_available_pages
        if room < num_host:
            self.tree.unlock(lease.node)
            end = match.num_tokens + room * self.page_size
            match = self._match(known[:end], lease.namespace)
            num_host = match.num_host_pages
            lease.node = self.tree.lock(match, is_use=False)
        lease.num_pages = match.pages.shape[1]
        lease.page_table[:, :lease.num_pages] = match.pages
        has_partial = partial.num_tokens > 0 and num_host < room and lease.num_pages + num_host < self.max_pages
        self._reclaim(num_host + has_partial)
        if has_partial:
            target = np.stack([pool.alloc(1) for pool in self.pools])
            kind = MoveKind.COPY if partial.host_node is None else MoveKind.IN
            self._moves.append(PageMove(kind, partial.pages[:, None], target))
        nodes, node = [], lease.node
        while node.tier is Tier.HOST:
            nodes.append(node)
            node = node.parent
        for node in reversed(nodes):
            first = lease.num_pages
            self._take_pages(lease, node.num_pages)
            pages = lease.page_table[:, first:lease.num_pages].copy()
            host_pages = self.tree.load(node, pages)
            self._moves.append(PageMove(MoveKind.IN, host_pages, pages))
            self._free(self.host_pools, host_pages)
        lease.num_committed = lease.num_pages
        lease.num_host_tokens = num_host * self.page_size
        lease.num_cached_tokens = lease.num_pages * self.page_size
        if has_partial:
            lease.page_table[:, lease.num_pages:lease.num_pages + 1] = target
            lease.num_pages += 1
            lease.num_copied_tokens = partial.num_tokens
            lease.num_cached_tokens += partial.num_tokens
        lease.num_evicted_tokens = max(known_once - lease.num_cached_tokens, 0)

    def _count_lookup(self, lease: Lease, num_tokens: int) -> None:
        counters = self.counters
        counters.num_lookups += 1
        counters.num_lookup_tokens += num_tokens
        counters.num_hit_tokens += lease.num_cached_tokens
        counters.num_host_hit_tokens += lease.num_host_tokens
        counters.num_copied_tokens += lease.num_copied_tokens
        counters.num_recomputed_tokens += lease.num_evicted_tokens

    # -- pages in and out

    def _take_pages(self, lease: Lease, n: int) -> None:
        for row, pool in zip(lease.page_table, self.pools):
            row[lease.num_pages:lease.num_pages + n] = pool.alloc(n)
        lease.num_pages += n

    def _reclaim(self, num_pages: int, *, allow_young: bool = True) -> None:
        """Evicts until `num_pages` pages are free, as far as possible."""
        short = num_pages - self.num_free_pages
        if short <= 0:
            return
        pages = self.tree.evict(short, spill=self._spill if self.host_pools else None, allow_young=allow_young)
        self._free(self.pools, pages)
        self._collect_freed()
        self.counters.num_evicted_pages += pages.shape[1]
        self.counters.num_early_evictions = self.tree.queue.num_early

    def _spill(self, pages: np.ndarray) -> np.ndarray | None:
        """Host pages for device pages that are being evicted; None when the host tier has no room for them."""
        n = pages.shape[1]
        free = min(pool.num_free for pool in self.host_pools)
        if free < n:
            self._free(self.host_pools, self.tree.evict_host(n - free))
            self._collect_freed()
            if min(pool.num_free for pool in self.host_pools) < n:
                return None
        host_pages = np.stack([pool.alloc(n) for pool in self.host_pools])
        self._moves.append(PageMove(MoveKind.OUT, pages.copy(), host_pages))
        self.counters.num_spilled_pages += n
        return host_pages

    def _collect_freed(self) -> None:
        """Takes over the pages that the tree gave up on its own."""
        if not self.tree.freed_pages and not self.tree.freed_host_pages:
            return
        for freed, pools in ((self.tree.freed_pages, self.pools), (self.tree.freed_host_pages, self.host_pools)):
            for pages in freed:
                self._free(pools, pages)
            freed.clear()

    def _forget_writer(self, lease: Lease) -> None:
        if lease.tail is not None:
            leases = self._writers[lease.node]
            leases.remove(lease)
            if not leases:
                del self._writers[lease.node]
            lease.tail = None

    def _cut_tail(self, lease: Lease, num_tokens: int) -> None:
        """Tokens beyond `num_tokens` will be written anew: nobody may copy them any more."""
        if lease.tail is not None:
            lease.tail = lease.tail[:max(num_tokens - lease.num_committed * self.page_size, 0)]
            if len(lease.tail) == 0:
                self._forget_writer(lease)

    @staticmethod
    def _free(pools: tuple[PagePool, ...], pages: np.ndarray) -> None:
        for pool, ids in zip(pools, pages):
            pool.free(ids)


class _PartialPage(NamedTuple):
    """A page that can be copied for its first tokens.

    Attributes:
      num_tokens: how many; 0: there is no such page.
      pages: int32[G] ids, on the device unless `host_node` is set.
      host_node: the node that has it on the host.
    """
    num_tokens: int
    pages: np.ndarray | None
    host_node: Node | None


def _cap(tokens: np.ndarray, max_cached_tokens: int | None) -> int:
    longest = len(tokens) - 1
    return max(longest if max_cached_tokens is None else min(longest, max_cached_tokens), 0)
