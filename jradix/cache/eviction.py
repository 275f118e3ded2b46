"""Which unlocked leaf goes next: one queue per tier and three policies. The tree removes nodes; this only orders them.

| policy | next victim | for |
|---|---|---|
| lru | unused for longest | the default: conversations, agents, anything whose recent past predicts its future |
| lfu | fewest uses, then unused for longest | a fixed set of prefixes of very different popularity |
| slru | unused for longest; what was used again is spared up to a share of the pages | one-shot prompts beside hot |

Under every policy a node used less than `min_ttl_s` seconds ago goes only when nothing older is left.
"""
from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from typing import Callable, Protocol

from jradix.config import EVICTION_POLICIES

FIRST_PROTECTED_SHARE = 0.7      # of a tier's pages under slru, before it has learned anything
PROTECTED_SHARES = 0.1, 0.9      # the least and the most it learns; all three measured with benchmarks/cache_trace.py
_MIN_STALE_ENTRIES = 64


class Evictable(Protocol):
    """What the queues read and write of a tree node. `hits` and `used_s` change only together with `last_used`."""
    last_used: int
    used_s: float
    hits: int
    serial: int
    num_pages: int
    is_protected: bool
    evicted_s: float
    evicted_by: str
    queue: object | None

    @property
    def parent(self) -> Evictable | None: ...


IsEvictable = Callable[[Evictable], bool]


def make_queue(policy: str, *, num_pages: int, min_ttl_s: float = 0.0, clock: Callable[[], float]) -> EvictionQueue:
    """The queue of one tier.

    Args:
      policy: one of `EVICTION_POLICIES`.
      num_pages: pages of the tier.
      min_ttl_s: seconds since its last use for which a node is spared while anything older can go.
      clock: seconds; the clock that `used_s` is read from.

    Raises:
      ValueError: an unknown policy or a negative time.
    """
    if policy not in EVICTION_POLICIES:
        raise ValueError(f"eviction policy {policy!r} is unknown; choose one of {', '.join(EVICTION_POLICIES)}")
    if not min_ttl_s >= 0:
        raise ValueError(f"min_ttl_s is {min_ttl_s}; give seconds, 0 or more (0 spares nothing)")
    queue = {"lru": LruQueue, "lfu": LfuQueue, "slru": SlruQueue}[policy]
    return queue(num_pages, min_ttl_s, clock)


class _Order:
    """Nodes by the tick of their last use when they came in, earliest first.

    Most nodes are queued right after a use and so arrive in order: those stand in a plain queue, O(1) each. The others,
    such as parents that have lost their last child, stand in a heap, O(log n) each.
    """
    __slots__ = ("_in_order", "_heap")

    def __init__(self) -> None:
        self._in_order: deque[tuple[int, Evictable]] = deque()
        self._heap: list[tuple[int, int, Evictable]] = []

    def __len__(self) -> int:
        return len(self._in_order) + len(self._heap)

    def push(self, node: Evictable) -> None:
        if not self._in_order or node.last_used >= self._in_order[-1][0]:
            self._in_order.append((node.last_used, node))
        else:
            heapq.heappush(self._heap, (node.last_used, node.serial, node))

    def pop(self) -> tuple[int, Evictable]:
        """Takes out the first entry: the tick it was queued with and the node."""
        in_order, heap = self._in_order, self._heap
        if in_order and (not heap or in_order[0][0] <= heap[0][0]):
            return in_order.popleft()
        tick, _, node = heapq.heappop(heap)
        return tick, node

    def keep(self, is_kept: Callable[[Evictable], bool]) -> None:
        """Drops the entries for which `is_kept` does not hold. O(n)."""
        self._in_order = deque(entry for entry in self._in_order if is_kept(entry[1]))
        self._heap = [entry for entry in self._heap if is_kept(entry[2])]
        heapq.heapify(self._heap)


class EvictionQueue(ABC):
    """Unlocked leaves of one tier in the order they are to go.

    Invariant: a node with `node.queue is self` has at least one entry here; entries of other nodes mean nothing.

    Entries are lazy. A use costs nothing here: an entry made before it is put back in its new place when it surfaces. A
    node that leaves keeps its entry until it surfaces or such entries are the greater part; one that comes back may
    then have two, of which the first to surface counts.

    Young nodes wait apart, in the order of their last use, so that none is met twice before it has grown old.

    Attributes:
      policy: the name of the policy.
      tracks_uses: whether `used` wants to be called.
      num_early: victims that were younger than `min_ttl_s`.
    """
    policy: str
    tracks_uses = False

    def __init__(self, num_pages: int, min_ttl_s: float, clock: Callable[[], float]):
        self.num_early = 0
        self._num_pages = num_pages
        self._min_ttl_s = min_ttl_s
        self._clock = clock
        self._young = _Order()
        self._num_stale = 0

    def add(self, node: Evictable) -> None:
        """Queues a node that has become an unlocked leaf of this tier; nothing when it is queued already."""
        if node.queue is self:
            return
        assert node.queue is None, "a node is added while another queue holds it"
        node.queue = self
        if self._min_ttl_s:
            self._young.push(node)
        else:
            self._place(node)

    def used(self, node: Evictable) -> None:
        """Takes note of a use of a node of this tier, be it queued, locked or inner."""

    def split(self, lower: Evictable, upper: Evictable) -> None:
        """Takes note that the leading pages of `lower` have become its new parent `upper`."""

    def removed(self, node: Evictable) -> None:
        """Forgets a node that has left this tier by other ways than `pop`."""
        if node.queue is not self:
            return
        node.queue = None
        self._left(node)
        self._num_stale += 1
        if self._num_stale > _MIN_STALE_ENTRIES + sum(map(len, self._orders())) // 2:
            self._compact()
            self._num_stale = 0

    def pop(self, is_evictable: IsEvictable, *, allow_young: bool = True) -> Evictable | None:
        """Takes out the next victim, O(log n) at most beside what earlier uses have saved.

        Nodes met for which `is_evictable` does not hold are dropped: they are to be added again when they become
        unlocked leaves.

        Args:
          allow_young: when only nodes younger than `min_ttl_s` are left, give the one unused for longest, not None.
        """
        young_after = math.inf
        if self._min_ttl_s:
            young_after = self._clock() - self._min_ttl_s
            while (node := self._first(self._young, is_evictable, math.inf)) is not None:
                if node.used_s > young_after:
                    self._young.push(node)
                    break
                self._place(node)
        node = self._pop_old(is_evictable, young_after)
        if node is None and allow_young and self._young:
            node = self._first(self._young, is_evictable, math.inf)
            self.num_early += node is not None
        if node is not None:
            node.queue = None
            self._left(node)
        return node

    def _compact(self) -> None:
        """Leaves one entry of each node that is queued, and none of the others."""
        is_kept = _first_of_each(lambda node: node.queue is self)
        for order in self._orders():
            order.keep(is_kept)

    @abstractmethod
    def _orders(self) -> list[_Order]:
        """All that hold entries."""

    @abstractmethod
    def _place(self, node: Evictable) -> None:
        """Makes the entry of a live node at its place in the policy's own order."""

    @abstractmethod
    def _pop_old(self, is_evictable: IsEvictable, young_after: float) -> Evictable | None:
        """Takes out the policy's victim among the nodes not used after `young_after`; None when there is none."""

    def _left(self, node: Evictable) -> None:
        """Drops what the policy knows of a node that has left the tier."""

    def _first(self, order: _Order, is_evictable: IsEvictable, young_after: float) -> Evictable | None:
        """Takes the entry of the first node out that is evictable, not used since it was queued, and not young."""
        while order:
            tick, node = order.pop()
            if node.queue is not self:
                continue
            if not is_evictable(node):
                node.queue = None
            elif node.used_s > young_after:
                self._young.push(node)
            elif node.last_used == tick:
                return node
            elif order is self._young:
                order.push(node)
            else:
                self._place(node)
        return None


class LruQueue(EvictionQueue):
    """Least recently used first."""
    policy = "lru"

    def __init__(self, num_pages: int, min_ttl_s: float, clock: Callable[[], float]):
        super().__init__(num_pages, min_ttl_s, clock)
        self._order = _Order()

    def _orders(self) -> list[_Order]:
        return [self._young, self._order]

    def _place(self, node: Evictable) -> None:
        self._order.push(node)

    def _pop_old(self, is_evictable: IsEvictable, young_after: float) -> Evictable | None:
        return self._first(self._order, is_evictable, young_after)


class LfuQueue(EvictionQueue):
    """Fewest uses first, among equals the least recently used.

    One order per number of uses; a heap finds the smallest of these numbers. What was popular once stays: where
    popularity moves, `slru` is the better choice.
    """
    policy = "lfu"

    def __init__(self, num_pages: int, min_ttl_s: float, clock: Callable[[], float]):
        super().__init__(num_pages, min_ttl_s, clock)
        self._by_hits: dict[int, _Order] = {}
        self._fewest: list[int] = []      # heap of the keys of `_by_hits`

    def _orders(self) -> list[_Order]:
        return [self._young, *self._by_hits.values()]

    def _place(self, node: Evictable) -> None:
        order = self._by_hits.get(node.hits)
        if order is None:
            order = self._by_hits[node.hits] = _Order()
            heapq.heappush(self._fewest, node.hits)
        order.push(node)

    def _pop_old(self, is_evictable: IsEvictable, young_after: float) -> Evictable | None:
        while self._fewest:
            hits = self._fewest[0]
            order = self._by_hits[hits]
            if not order:
                heapq.heappop(self._fewest)
                del self._by_hits[hits]
                continue
            node = self._first(order, is_evictable, young_after)
            if node is not None:
                if node.hits == hits:
                    return node
                self._place(node)
        return None


class SlruQueue(EvictionQueue):
    """Segmented LRU with a share that adapts: what was used again is spared while it fits in a share of the pages.

    A node used again is *protected* from then on, be it a leaf, an inner node or locked, and counts against the share
    with all its pages. When the share is exceeded, the protected nodes unused for longest lose their protection. The
    others are on *probation*: those of them that are queued are the victims, unused for longest first. A node that has
    lost its protection stands there by its last use, so that beyond the share this is LRU.

    The share learns from evictions that were mistakes, as in ARC (Megiddo and Modha, 2003). A node inserted again while
    no more than about a tier of pages was evicted after it would still be here with more pages on probation if it had
    never been used, and with more protected pages if it had. It moves the share by its pages, and by as many times more
    as its kind is rarer among the victims; and, used twice by now, it is protected. This needs a tree that remembers
    evicted nodes; without one the share stays where it began.
    """
    policy = "slru"
    tracks_uses = True

    def __init__(self, num_pages: int, min_ttl_s: float, clock: Callable[[], float]):
        super().__init__(num_pages, min_ttl_s, clock)
        self._max_protected_pages = FIRST_PROTECTED_SHARE * num_pages
        self._probation = _Order()
        self._protected = _Order()
        self._pages_of: dict[Evictable, int] = {}     # who is protected, with its pages
        self._num_protected_pages = 0                 # their sum
        self._unprotected_until = -1                  # latest use of the nodes that have lost their protection
        self._num_evicted_pages = [1.0, 1.0]          # lately, of nodes never used again, and of others
        self._victim: Evictable | None = None         # the last one, not counted yet: the tree may keep a part of it
        self._num_victim_pages = 0
        self._half_tiers_s = deque([-math.inf] * 2, 2)    # when the last halves of a tier's pages had been evicted

    def add(self, node: Evictable) -> None:
        if node.queue is self:
            return
        if node.is_protected:
            self.used(node)
        self._note_returns(node)
        super().add(node)

    def used(self, node: Evictable) -> None:
        if node not in self._pages_of:
            self._pages_of[node] = node.num_pages
            self._num_protected_pages += node.num_pages
            self._protected.push(node)
            node.is_protected = True

    def split(self, lower: Evictable, upper: Evictable) -> None:
        if lower in self._pages_of:
            self._pages_of[lower] -= upper.num_pages
            self._num_protected_pages -= upper.num_pages
            self.used(upper)
        elif lower is self._victim:
            self._num_victim_pages = max(self._num_victim_pages - upper.num_pages, 0)

    def _orders(self) -> list[_Order]:
        return [self._young, self._probation, self._protected]

    def _compact(self) -> None:
        is_kept = _first_of_each(lambda node: node.queue is self)
        self._young.keep(is_kept)
        self._probation.keep(is_kept)
        self._protected.keep(_first_of_each(lambda node: node in self._pages_of))

    def _place(self, node: Evictable) -> None:
        if node not in self._pages_of:
            self._probation.push(node)

    def _left(self, node: Evictable) -> None:
        if node in self._pages_of:
            self._num_protected_pages -= self._pages_of.pop(node)
            self._unprotected_until = max(self._unprotected_until, node.last_used)
            node.is_protected = False

    def _pop_old(self, is_evictable: IsEvictable, young_after: float) -> Evictable | None:
        while True:
            while self._num_protected_pages > self._max_protected_pages and self._unprotect(math.inf):
                pass
            node = self._first(self._probation, is_evictable, young_after)
            if node is None:
                if not self._unprotect(young_after):
                    return None
            elif node not in self._pages_of:
                self._count_victim()
                self._victim, self._num_victim_pages = node, node.num_pages
                return node

    def _unprotect(self, young_after: float) -> bool:
        """Ends the protection of the node unused for longest, unless it was used after `young_after`."""
        while self._protected:
            tick, node = self._protected.pop()
            if node not in self._pages_of:
                continue
            if node.last_used != tick:
                self._protected.push(node)
            elif node.used_s > young_after:
                self._protected.push(node)
                return False
            else:
                self._left(node)
                if node.queue is self:
                    self._probation.push(node)
                return True
        return False

    def _count_victim(self) -> None:
        if self._victim is None:
            return
        self._num_evicted_pages[self._victim.hits > 0] += self._num_victim_pages
        if sum(self._num_evicted_pages) > self._num_pages + 2:
            self._num_evicted_pages = [pages / 2 for pages in self._num_evicted_pages]
            self._half_tiers_s.append(self._clock())

    def _note_returns(self, node: Evictable) -> None:
        """Protects those at the end of a path that are back soon after their eviction, and moves the share.

        A returned node counts once: from then on it is protected, or is one of those that have lost their protection.
        """
        once, again = self._num_evicted_pages
        least, most = (share * self._num_pages for share in PROTECTED_SHARES)
        returned = node if node.evicted_by else node.parent      # a new leaf may stand below returned nodes
        while returned is not None and self._is_back_soon(returned):
            moved = returned.num_pages * (max(once / again, 1) if returned.hits else -max(again / once, 1))
            self._max_protected_pages = min(max(self._max_protected_pages + moved, least), most)
            self.used(returned)
            returned = returned.parent

    def _is_back_soon(self, node: Evictable) -> bool:
        return (node.evicted_by not in ("", "user") and node.evicted_s >= self._half_tiers_s[0]
                and node.last_used > self._unprotected_until and node not in self._pages_of)


def _first_of_each(is_kept: IsEvictable) -> IsEvictable:
    """`is_kept`, but true only once for each node."""
    seen: set[Evictable] = set()

    def is_first(node: Evictable) -> bool:
        if node in seen or not is_kept(node):
            return False
        seen.add(node)
        return True

    return is_first
