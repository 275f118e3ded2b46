"""The radix tree: token sequences to KV pages. It owns the pages of its nodes; it never touches their content.

An edge holds a slice of tokens, a whole number of pages, and the ids of their pages:

    root -- [system prompt: 40 pages] --+-- [question A: 3 pages] -- [5 tokens: a tail]
                                        +-- [agent 1: 9 pages] --+-- [turn 2 ...]
                                                                 +-- [turn 2' ...]

Tokens are kept as big-endian bytes, so that comparing bytes compares token sequences in order: whole edges with one
memory comparison. Children are kept in the order of their first page's tokens and found by these tokens themselves, so
that two different prefixes can never be taken for one another, and the child with the longest common part of a page is
one of the two neighbours of the place where that page would stand.

A *tail* is a leaf of one page that is not full. A node's *tier* says where its KV is: on the device, in host memory, or
gone (evicted; its tokens are remembered for a while). Evicting takes the lowest device nodes first, so the device nodes
form the top of the tree, the host nodes come below them, the gone ones last.
"""
from __future__ import annotations

import time
from collections import deque
from itertools import count, takewhile
from typing import Callable, Iterator, Sequence

import numpy as np
from sortedcontainers import SortedDict

from jradix.cache.eviction import make_queue
from jradix.cache.node import DEVICE, GONE, HOST, TOKEN_BYTES, USER, Inserted, Match, Namespace, Node, Partial, Tier

Spill = Callable[[np.ndarray], "np.ndarray | None"]


class RadixTree:
    """Prefix tree over pages of tokens, one root per namespace.

    The counts of pages are kept up to date by every operation; `check_invariants` recomputes them by walking.

    Args:
      page_size: tokens per page.
      num_groups: KV groups; a page has an id in each.
      policy: eviction policy, see `jradix.cache.eviction`.
      num_pages: size of the pool, which the policy's shares refer to.
      min_ttl_s: age since the last use below which a node is spared while an older one exists.
      clock: seconds.
      history_pages: pages whose tokens are remembered after eviction.

    Attributes:
      num_evictable_pages, num_locked_pages: device pages without and with a lock on their node.
      num_host_pages, num_gone_pages: pages of the other tiers.
      freed_pages, freed_host_pages: int32[G, n] arrays of ids that the tree gave up on its own, for the owner of the
        pools to collect: tails that a longer page replaced, host pages that became needless.
    """

    def __init__(self, page_size: int, num_groups: int = 1, *, policy: str = "lru", num_pages: int = 0,
                 min_ttl_s: float = 0.0, clock: Callable[[], float] = time.monotonic, history_pages: int = 0):
        self.page_size = page_size
        self.num_groups = num_groups
        self.num_evictable_pages = 0
        self.num_locked_pages = 0
        self.num_host_pages = 0
        self.num_gone_pages = 0
        self.roots: dict[Namespace, Node] = {}
        self.freed_pages: list[np.ndarray] = []
        self.freed_host_pages: list[np.ndarray] = []
        self.queue = make_queue(policy, num_pages=num_pages, min_ttl_s=min_ttl_s, clock=clock)
        self._host_queue = make_queue("lru", num_pages=num_pages, clock=clock)
        self._history_pages = history_pages
        self._history: deque[tuple[int, Node]] = deque()     # as they went: number of the going, node
        self._going = count()
        self._num_gone = 0
        self._nothing = np.empty((num_groups, 0), np.int32)
        self._seconds = clock
        self._clock = count(1)
        self._serial = count()
        self._page_bytes = page_size * TOKEN_BYTES

    # -- finding and locking

    def match(self, tokens: Sequence[int] | np.ndarray, namespace: Namespace = Namespace(), *,
              touch: bool = True) -> Match:
        """Finds the longest cached prefix of `tokens`. Changes no structure.

        Args:
          tokens: token ids, int32[k].
          touch: count this as a use.
        """
        root = self.roots.get(namespace)
        if root is None:
            return Match(None, 0, self._no_pages(), 0, namespace)
        query = _token_bytes(tokens)
        path, num_last_pages = self._walk(root, query)
        node, num_node_pages = root, 0
        num_host = num_gone = 0
        pages: list[np.ndarray] = []
        for i, step in enumerate(path):
            n = num_last_pages if i == len(path) - 1 else step.num_pages
            if step.tier is GONE:
                num_gone += n if step.evicted_by != USER else 0
                continue
            node, num_node_pages = step, n
            if step.tier is DEVICE:
                pages.append(step.pages[:, :n])
            else:
                num_host += n
        found = pages[0] if len(pages) == 1 else np.concatenate(pages, axis=1) if pages else self._no_pages()
        num_pages = found.shape[1] + num_host
        partial = self._partial(node, num_node_pages, query, num_pages * self._page_bytes)
        if touch:
            self.use(node, partial)
        return Match(node, num_node_pages, found, found.shape[1] * self.page_size, namespace, num_host, partial,
                     num_gone * self.page_size)

    def lock(self, match: Match, *, is_use: bool = True, with_partial: bool = False) -> Node:
        """Protects the whole pages of a match from eviction and returns the node to unlock later.

        Splits the last edge if needed.

        Args:
          is_use: count this as a use; False leaves the order of eviction as it is.
          with_partial: protect the page of `match.partial` as well.
        """
        node, n = match.node, match.num_node_pages
        if with_partial and match.partial:
            node, n = match.partial.node, match.partial.page_index + 1
        if node is None:
            node = self._root(match.namespace)
        elif 0 < n < node.num_pages:
            node = self._split(node, n)
        elif n == 0 and node.parent is not None:
            node = node.parent
        if is_use:
            self.use(node, match.partial)
        self.lock_node(node)
        return node

    def use(self, node: Node, partial: Partial | None = None) -> None:
        """Counts a use of a path, and of the tail it goes on with."""
        if partial and self._is_tail(partial.node) and partial.node.parent is node:
            node = partial.node
        self._touch(node, 1)

    def lock_node(self, node: Node) -> None:
        """Protects a node and its path; not a use."""
        while node is not None:
            node.lock_count += 1
            if node.lock_count == 1 and node.tier is DEVICE:
                self.num_evictable_pages -= node.num_pages
                self.num_locked_pages += node.num_pages
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Takes back one lock."""
        while node is not None:
            assert node.lock_count > 0, "unlock without lock"
            node.lock_count -= 1
            if node.lock_count == 0:
                if node.tier is DEVICE:
                    self.num_locked_pages -= node.num_pages
                    self.num_evictable_pages += node.num_pages
                self._offer(node)
            node = node.parent

    # -- putting in

    def insert(self, tokens: Sequence[int] | np.ndarray, pages: np.ndarray, namespace: Namespace = Namespace(), *,
               below: Node | None = None) -> Inserted:
        """Adds the whole pages of `tokens`; a remainder shorter than a page is left out.

        The leading pages that the device has already stay as they are and the caller keeps its own for them; from there
        on the tree owns `pages`.

        Args:
          tokens: token ids, int32[k].
          pages: int32[G, k // page_size], or int32[k // page_size] for one group.
          below: a locked node that `tokens` continue, instead of the root.
        """
        pages = np.asarray(pages, np.int32)
        if pages.ndim == 1:
            pages = pages[None]
        query = _token_bytes(tokens)
        num_pages = len(query) // self._page_bytes
        if pages.shape != (self.num_groups, num_pages):
            raise ValueError(f"{len(tokens)} tokens hold {num_pages} whole pages of {self.page_size}; "
                             f"got page ids of shape {pages.shape}")
        if num_pages == 0:
            return Inserted(Match(below, below.num_pages if below else 0, self._no_pages(), 0, namespace), 0)
        query = query[:num_pages * self._page_bytes]
        node = below if below is not None else self._root(namespace)
        path, num_last_pages = self._walk(node, query)
        num_node_pages, existing, position = node.num_pages, [], 0
        for i, step in enumerate(path):
            n = num_last_pages if i == len(path) - 1 else step.num_pages
            is_end = i == len(path) - 1 and position + n == num_pages
            if step.tier is DEVICE:
                if n < step.num_pages and not is_end:
                    step = self._split(step, n)
                existing.append(step.pages[:, :n])
            else:
                if n < step.num_pages:
                    step = self._split(step, n)
                self._revive(step, pages[:, position:position + n].copy())
            node, num_node_pages, position = step, n, position + n
        if position < num_pages:
            node = self._add_leaf(node, query[position * self._page_bytes:], pages[:, position:].copy())
            num_node_pages = node.num_pages
        self._touch(node, 0)
        self._offer(node)
        num_existing = sum(p.shape[1] for p in existing)
        whole = np.concatenate([*existing, pages[:, num_existing:]], axis=1) if existing else pages
        return Inserted(Match(node, num_node_pages, whole, num_pages * self.page_size, namespace), num_existing)

    def insert_tail(self, tokens: Sequence[int] | np.ndarray, page: np.ndarray, namespace: Namespace = Namespace(), *,
                    below: Node | None = None) -> bool:
        """Adds a page that is not full. True: the tree owns it now; False: a child begins with these tokens already.

        Args:
          tokens: int32[k], 0 < k < page_size.
          page: int32[G].
          below: the node that `tokens` continue, at its end; None: the root.
        """
        key = _token_bytes(tokens)
        if not 0 < len(key) < self._page_bytes:
            raise ValueError(f"a tail of {len(tokens)} tokens: expected fewer than a page of {self.page_size}, and one "
                             "at least")
        parent = below if below is not None else self._root(namespace)
        if parent.children:
            neighbour, n = self._closest(parent.children, key)
            if n * TOKEN_BYTES == len(key):
                self._touch(neighbour if self._is_tail(neighbour) else parent, 0)
                return False
        node = self._add_leaf(parent, key, np.asarray(page, np.int32).reshape(self.num_groups, 1).copy())
        if parent.gone and key in parent.gone:
            self._forget_gone(parent.gone[key])
        self._touch(node, 0)
        self._offer(node)
        return True

    def load(self, node: Node, pages: np.ndarray) -> np.ndarray:
        """Moves a host node below a device node to device pages int32[G, n]; returns its host pages, now unowned."""
        assert node.tier is HOST and node.parent.tier is DEVICE, "only a host node below a device node can be loaded"
        host_pages = node.pages
        self._change_tier(node, DEVICE, pages)
        self._offer(node)
        return host_pages

    # -- taking out

    def evict(self, num_pages: int, *, spill: Spill | None = None, allow_young: bool = True) -> np.ndarray:
        """Takes up to `num_pages` unlocked pages off the device, in the order of the policy, each edge from its end.

        Args:
          spill: is asked for host pages for int32[G, n] device pages; None from it, or no spill: their KV is lost.
          allow_young: also nodes younger than the tree's min_ttl_s, when nothing older is left.

        Returns:
          int32[G, k] device pages that the caller owns now, k <= num_pages.
        """
        evicted: list[np.ndarray] = []
        for node in self._victims(lambda: self.queue.pop(_is_device_leaf, allow_young=allow_young), num_pages):
            evicted.append(node.pages)
            host_pages = spill(node.pages) if spill else None
            if host_pages is None:
                self._drop(node, self.queue.policy)
            else:
                self._change_tier(node, HOST, host_pages)
                self._merge_below(node)
                self._offer(node)
        if len(evicted) == 1:
            return evicted[0]
        return np.concatenate(evicted, axis=1) if evicted else self._no_pages()

    def evict_host(self, num_pages: int) -> np.ndarray:
        """Takes up to `num_pages` unlocked pages off the host, least recently used leaves first: int32[G, k]."""
        evicted: list[np.ndarray] = []
        for node in self._victims(lambda: self._host_queue.pop(_is_host_leaf), num_pages):
            evicted.append(node.pages)
            self._drop(node, "lru")
        return np.concatenate(evicted, axis=1) if evicted else self._no_pages()

    def forget(self, tokens: Sequence[int] | np.ndarray,
               namespace: Namespace = Namespace()) -> tuple[np.ndarray, np.ndarray]:
        """Takes out all that begins with `tokens`, and the part of their own path that nothing else shares.

        What is locked stays.

        Returns:
          int32[G, k] device pages and int32[G, h] host pages that the caller owns now.
        """
        freed: list[list[np.ndarray]] = [[self._no_pages()], [self._no_pages()]]
        root = self.roots.get(namespace)
        query = _token_bytes(tokens)
        if root is not None:
            path, num_last_pages = self._walk(root, query)
            num_pages = sum(step.num_pages for step in path[:-1]) + num_last_pages
            if num_pages == len(query) // self._page_bytes and not any(step.tier is GONE for step in path):
                rest = query[len(query) - len(query) % self._page_bytes:]
                self._forget_below(path[-1] if path else root, num_last_pages, rest, freed)
        return np.concatenate(freed[DEVICE], axis=1), np.concatenate(freed[HOST], axis=1)

    # -- reading

    def nodes(self, *, gone: bool = False) -> Iterator[Node]:
        """All nodes with pages, parents before children.

        Args:
          gone: also those whose KV is gone.
        """
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack += node.children.values() if node.children else ()
            if gone and node.gone:
                stack += node.gone.values()

    def tokens_of(self, node: Node) -> np.ndarray:
        """Tokens from the root to the end of a node: int32[k]."""
        keys = []
        while node is not None:
            keys.append(node.key)
            node = node.parent
        return np.frombuffer(b"".join(reversed(keys)), ">i4").astype(np.int32)

    def namespace_of(self, node: Node) -> Namespace:
        while node.parent is not None:
            node = node.parent
        return next(name for name, root in self.roots.items() if root is node)

    def closest(self, node: Node, tokens: np.ndarray, *, gone: bool = False) -> tuple[Node, int] | None:
        """The child of `node` that goes on with most of `tokens`, and with how many; None without children.

        Args:
          gone: look among those whose KV is gone, instead of those that are here.
        """
        rest = _token_bytes(tokens)[:self._page_bytes]
        if not gone:
            return self._closest(node.children, rest) if node.children else None
        shared = ((child, _common_tokens(key, rest, 0)) for key, child in (node.gone or {}).items())
        return max(shared, key=lambda found: found[1], default=None)

    def root_locks(self) -> int:
        """Locks held, over all namespaces."""
        return sum(root.lock_count for root in self.roots.values())

    def check_invariants(self) -> None:
        """Recomputes every count and property by walking; raises AssertionError with what differs."""
        pages = dict(evictable=0, locked=0, host=0, gone=0)
        for root in self.roots.values():
            assert root.parent is None and root.num_pages == 0 and root.tier is DEVICE, "a root has pages"
            self._check_children(root)
        for node in self.nodes(gone=True):
            size = len(node.key)
            if size < self._page_bytes:
                assert size > 0 and node.num_pages == 1 and not node.children and not node.gone, "not a tail"
            else:
                assert node.num_pages > 0 and size == node.num_pages * self._page_bytes, "key and pages differ"
            assert node.pages.shape == (self.num_groups, 0 if node.tier is GONE else node.num_pages), "pages differ"
            assert node.tier >= node.parent.tier, "a child stands above its parent's tier"
            self._check_children(node)
            if node.tier is GONE:
                assert not node.lock_count and not node.children, "a node that is gone is locked or has children"
                pages["gone"] += node.num_pages
            elif node.tier is HOST:
                assert node.queue is self._host_queue or node.children or node.lock_count, "a host leaf is not queued"
                pages["host"] += node.num_pages
            else:
                assert node.queue is self.queue or node.num_device_children or node.lock_count, "a leaf is not queued"
                pages["locked" if node.lock_count else "evictable"] += node.num_pages
        counted = dict(evictable=self.num_evictable_pages, locked=self.num_locked_pages, host=self.num_host_pages,
                       gone=self.num_gone_pages)
        assert counted == pages, f"pages counted {counted}, walked {pages}"

    def _check_children(self, node: Node) -> None:
        children = list(node.children.values()) if node.children else []
        gone = list(node.gone.values()) if node.gone else []
        for listed, kept in ((children, node.children), (gone, node.gone)):
            firsts = [child.key[:self._page_bytes] for child in listed]
            assert firsts == (list(kept) if listed else []), "child keys are stale"
        assert list(node.children or ()) == sorted(set(node.children or ())), "children out of order"
        assert not set(node.children or ()) & set(node.gone or ()), "a child is here and gone"
        assert all(child.parent is node for child in (*children, *gone)), "a child has another parent"
        assert not any(child.tier is GONE for child in children), "a child that is gone stands among those here"
        assert all(child.tier is GONE for child in gone), "a child that is here stands among those gone"
        assert node.num_device_children == sum(child.tier is DEVICE for child in children), "device children miscounted"
        assert node.lock_count >= sum(child.lock_count for child in children), "a locked node below an unlocked one"
        assert node.last_used >= max((child.last_used for child in children), default=0), "child used after parent"

    # -- the walk

    def _walk(self, node: Node, query: bytes) -> tuple[list[Node], int]:
        """Follows the whole pages of `query` below `node`: nodes met, of any tier, and the last one's pages used."""
        width = self._page_bytes
        position, end = 0, len(query) - len(query) % width
        path: list[Node] = []
        num_last_pages = 0
        while position < end:
            first = query[position:position + width]
            child = node.children.get(first) if node.children else None
            if child is None:
                child = node.gone.get(first) if node.gone else None
                if child is None:
                    break
            node = child
            path.append(node)
            num_last_pages = node.num_pages
            if not query.startswith(node.key, position):
                num_last_pages = min(_common_tokens(node.key, query, position), (end - position) // TOKEN_BYTES)
                num_last_pages //= self.page_size
                break
            position += len(node.key)
        return path, num_last_pages

    def _partial(self, node: Node, num_node_pages: int, query: bytes, position: int) -> Partial | None:
        """The page at the end of a match that goes on with the query longest."""
        rest = query[position:position + self._page_bytes]
        if not rest:
            return None
        if 0 < num_node_pages < node.num_pages:
            start = num_node_pages * self._page_bytes
            n = _common_tokens(node.key[start:start + self._page_bytes], rest, 0)
            return Partial(node, num_node_pages, n) if n else None
        if not node.children:
            return None
        child, n = self._closest(node.children, rest)
        return Partial(child, 0, n) if n else None

    def _closest(self, children: SortedDict, rest: bytes) -> tuple[Node, int]:
        """The child with the longest common part of a page: one of two neighbours in the order of the keys."""
        place, last = (children.bisect_left(rest), len(children) - 1) if len(children) > 1 else (0, 0)
        key, best = children.peekitem(min(place, last))
        most = _common_tokens(key, rest, 0)
        if 0 < place <= last:
            key, child = children.peekitem(place - 1)
            n = _common_tokens(key, rest, 0)
            if n > most:
                best, most = child, n
        return best, most

    def _is_tail(self, node: Node) -> bool:
        return 0 < len(node.key) < self._page_bytes

    # -- changes

    def _root(self, namespace: Namespace) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(b"", self._no_pages(), None, next(self._serial), 0, self._seconds())
        return root

    def _touch(self, node: Node | None, num_hits: int) -> None:
        now, seconds, queue = next(self._clock), self._seconds(), self.queue
        tracks = queue.tracks_uses and num_hits
        while node is not None:
            node.last_used = now
            node.used_s = seconds
            node.hits += num_hits
            if tracks and node.parent is not None:
                queue.used(node)
            node = node.parent

    def _offer(self, node: Node) -> None:
        """Queues a node for eviction if nothing stands below it in its tier and nobody holds it."""
        if node.lock_count == 0 and node.parent is not None:
            if node.tier is DEVICE:
                if node.num_device_children == 0:
                    self.queue.add(node)
            elif node.tier is HOST and not node.children:
                self._host_queue.add(node)

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cuts an edge after `num_pages` pages; returns the new upper node. The lower one keeps its identity."""
        parent, cut = node.parent, num_pages * self._page_bytes
        first = node.key[:self._page_bytes]
        upper = Node(node.key[:cut], node.pages[:, :num_pages].copy(), parent, next(self._serial), node.last_used,
                     node.used_s)
        upper.num_pages = num_pages
        for name in ("tier", "lock_count", "created_s", "hits", "is_protected", "evicted_s", "evicted_by"):
            setattr(upper, name, getattr(node, name))
        (parent.gone if node.tier is GONE else parent.children)[first] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages[:, num_pages:].copy(), upper
        node.num_pages -= num_pages
        upper.add_child(node.key[:self._page_bytes], node)
        if node.tier is DEVICE:
            self.queue.split(node, upper)
        elif node.tier is GONE:
            self._remember(upper)
        return upper

    def _add_leaf(self, parent: Node, key: bytes, pages: np.ndarray) -> Node:
        self._replace_tail(parent, key[:self._page_bytes])
        node = Node(key, pages, parent, next(self._serial), parent.last_used, self._seconds())
        parent.add_child(key[:self._page_bytes], node)
        self.num_evictable_pages += node.num_pages
        return node

    def _replace_tail(self, parent: Node, first: bytes) -> None:
        """Gives up the tail whose tokens the new child `first` begins with: it is the neighbour before it."""
        if not parent.children:
            return
        place = parent.children.bisect_left(first) - 1
        if place < 0:
            return
        key, tail = parent.children.peekitem(place)
        if len(key) < self._page_bytes and first.startswith(key) and tail.lock_count == 0:
            self._remove(tail, (self.freed_pages, self.freed_host_pages)[tail.tier])

    def _remove(self, node: Node, freed: list[np.ndarray]) -> None:
        """Takes a childless, unlocked node that is here out of the tree; its pages go to `freed`."""
        freed.append(node.pages)
        self._count(node, -1)
        node.parent.remove_child(node.key[:self._page_bytes], node)
        if node.queue is not None:
            node.queue.removed(node)
        node.parent = None

    def _victims(self, pop: Callable[[], Node | None], num_pages: int) -> Iterator[Node]:
        """Nodes with `num_pages` pages in all, the last one cut to fit; each is to be gone before the next is asked for."""
        while num_pages > 0 and (node := pop()) is not None:
            if num_pages < node.num_pages:
                self._offer(self._split(node, node.num_pages - num_pages))
            num_pages -= node.num_pages
            yield node

    def _revive(self, node: Node, pages: np.ndarray) -> None:
        """Puts a host or gone node on the device with new pages."""
        if node.tier is HOST:
            self.freed_host_pages.append(node.pages)
        else:
            self._num_gone -= 1
            node.going = -1
            node.created_s = self._seconds()
            self._replace_tail(node.parent, node.key[:self._page_bytes])
        self._change_tier(node, DEVICE, pages)

    def _change_tier(self, node: Node, tier: Tier, pages: np.ndarray) -> None:
        """Moves a node to another tier and other pages, in its parent's lists and in all counts."""
        parent, first = node.parent, node.key[:self._page_bytes]
        if node.queue is not None:
            node.queue.removed(node)
        self._count(node, -1)
        if GONE in (tier, node.tier):
            parent.remove_child(first, node)
            node.tier = tier
            parent.add_child(first, node)
        else:
            parent.num_device_children += (tier is DEVICE) - (node.tier is DEVICE)
            node.tier = tier
        node.pages = pages
        self._count(node, 1)
        if tier is not DEVICE:
            self._offer(parent)

    def _count(self, node: Node, sign: int) -> None:
        n = sign * node.num_pages
        if node.tier is GONE:
            self.num_gone_pages += n
        elif node.tier is HOST:
            self.num_host_pages += n
        elif node.lock_count:
            self.num_locked_pages += n
        else:
            self.num_evictable_pages += n

    def _drop(self, node: Node, by: str) -> None:
        """Makes a node gone that has no device children; what it had on the host below it goes with it."""
        if node.children:
            below: list[list[np.ndarray]] = [[], []]
            for child in list(node.children.values()):
                self._drop_subtree(child, by, below)
            self.freed_host_pages += below[HOST]
        if self._history_pages == 0:
            parent = node.parent
            self._remove(node, [])
            self._offer(parent)
            self._prune(parent)
            return
        node.evicted_s, node.evicted_by = self._seconds(), by
        self._change_tier(node, GONE, self._nothing)
        if node.gone:
            self._merge_below(node)
        self._remember(node)
        while self.num_gone_pages > self._history_pages:
            going, oldest = self._history.popleft()
            if oldest.going == going:
                self._forget_gone(oldest)

    def _drop_subtree(self, top: Node, by: str, freed: list[list[np.ndarray]]) -> None:
        """Makes a subtree gone but for what is locked; its pages go to `freed`, by tier."""
        order = [top]
        for node in order:
            order += node.children.values() if node.children else ()
        for node in reversed(order):
            if node.lock_count == 0 and not node.children:
                freed[node.tier].append(node.pages)
                self._drop(node, by)

    def _forget_below(self, node: Node, num_pages: int, rest: bytes, freed: list[list[np.ndarray]]) -> None:
        """`forget` from the point after `num_pages` pages of `node`, for what goes on there with `rest`."""
        if 0 < num_pages < node.num_pages:
            start = num_pages * self._page_bytes
            if not node.key.startswith(rest, start):
                return
            tops = [node]
            if node.lock_count == 0:
                node = self._split(node, num_pages)
        else:
            keys = node.children.irange(rest) if node.children else ()
            tops = [node.children[key] for key in takewhile(lambda key: key.startswith(rest), keys)]
            if rest and not tops:
                return
        for top in tops:
            self._drop_subtree(top, USER, freed)
        while node.parent is not None and node.lock_count == 0 and not node.children and node.tier is not GONE:
            parent = node.parent
            freed[node.tier].append(node.pages)
            self._drop(node, USER)
            node = parent

    def _merge_below(self, node: Node) -> None:
        """Joins a node that left the device with its only child in the same tier, so that edges stay long."""
        here, gone = node.children or {}, node.gone or {}
        if len(here) + len(gone) != 1:
            return
        child = next(iter((here or gone).values()))
        if child.tier is not node.tier or child.lock_count or self._is_tail(child):
            return
        if node.tier is GONE and child.evicted_by != node.evicted_by:
            return
        if child.queue is not None:
            child.queue.removed(child)
        if child.tier is GONE:
            self._num_gone -= 1
            child.going = -1
        node.key += child.key
        node.pages = np.concatenate([node.pages, child.pages], axis=1)
        node.num_pages += child.num_pages
        node.children, node.gone = child.children, child.gone
        for grandchild in (*(node.children or {}).values(), *(node.gone or {}).values()):
            grandchild.parent = node
        child.parent = None

    # -- what is gone

    def _remember(self, node: Node) -> None:
        """Notes that a node went just now, for the history's order."""
        self._num_gone += node.going < 0
        node.going = going = next(self._going)
        self._history.append((going, node))
        if len(self._history) > 2 * self._num_gone + 1000:
            self._history = deque((going, node) for going, node in self._history if node.going == going)

    def _forget_gone(self, node: Node) -> None:
        """Takes a gone node, and all below it, out of the tree."""
        stack = [node]
        while stack:
            below = stack.pop()
            stack += below.gone.values() if below.gone else ()
            self._num_gone -= 1
            below.going = -1
            self.num_gone_pages -= below.num_pages
        parent = node.parent
        parent.remove_child(node.key[:self._page_bytes], node)
        node.parent = None
        self._prune(parent)

    def _prune(self, node: Node) -> None:
        """Drops a root that leads nowhere."""
        if node.parent is None and not node.children and not node.gone and node.lock_count == 0:
            for namespace, root in self.roots.items():
                if root is node:
                    del self.roots[namespace]
                    return

    def _no_pages(self) -> np.ndarray:
        return self._nothing


def _is_device_leaf(node: Node) -> bool:
    return node.tier is DEVICE and node.lock_count == 0 and node.num_device_children == 0 and node.parent is not None


def _is_host_leaf(node: Node) -> bool:
    return node.tier is HOST and node.lock_count == 0 and not node.children and node.parent is not None


def _token_bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(tokens, np.int32).astype(">i4").tobytes()


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Leading tokens that two int32 arrays share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _common_tokens(key: bytes, query: bytes, position: int) -> int:
    """Leading tokens that `key` and `query[position:]` share."""
    n = min(len(key), len(query) - position) // TOKEN_BYTES
    a = np.frombuffer(key, np.uint32, n)
    b = np.frombuffer(query, np.uint32, n, position)
    differs = a != b
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
