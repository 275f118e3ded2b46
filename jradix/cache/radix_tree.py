"""The radix tree: token sequences to KV pages. It owns the pages of its nodes; it never touches their content.

An edge holds a slice of tokens, a whole number of pages, and the ids of their pages:

    root -- [system prompt: 40 pages] --+-- [question A: 3 pages]
                                        +-- [agent 1: 9 pages] --+-- [turn 2 ...]
                                                                 +-- [turn 2' ...]

Tokens are kept as big-endian bytes, so that comparing bytes compares token sequences in order: whole edges with one
memory comparison. Children are kept in the order of their first page's tokens and found by these tokens themselves, so
that two different prefixes can never be taken for one another.
"""
from __future__ import annotations

from itertools import count
from typing import Iterator, NamedTuple, Sequence

import numpy as np
from sortedcontainers import SortedDict

from jradix.cache.eviction import LruQueue

_TOKEN_BYTES = 4


class Namespace(NamedTuple):
    """What must be equal beside the tokens before KV may be shared. Fields are never joined into one string."""
    model: str = ""
    weights_version: int = 0
    adapter: str | None = None
    salt: str | None = None


class Node:
    """One edge and the point it leads to.

    Invariants: every node but a root has at least one page; a locked node's ancestors are locked;
    `last_used` of a node is not older than that of its children.
    """
    __slots__ = ("key", "pages", "parent", "children", "lock_count", "last_used", "serial", "is_queued")

    def __init__(self, key: bytes, pages: np.ndarray, parent: Node | None, serial: int, last_used: int):
        self.key = key                        # tokens of the edge, big-endian
        self.pages = pages                    # int32[G, n]
        self.parent = parent                  # None: a root, or no longer in the tree
        self.children: SortedDict | None = None    # first page's tokens -> Node; None for a leaf
        self.lock_count = 0
        self.last_used = last_used
        self.serial = serial
        self.is_queued = False

    @property
    def num_pages(self) -> int:
        return self.pages.shape[1]

    def add_child(self, first: bytes, child: Node) -> None:
        if self.children is None:
            self.children = SortedDict()
        self.children[first] = child

    def remove_child(self, first: bytes) -> None:
        del self.children[first]
        if not self.children:
            self.children = None


class Match(NamedTuple):
    """The longest cached prefix, in whole pages.

    Attributes:
      node: the last node on the path, None when the namespace is unknown.
      num_node_pages: how many of that node's pages belong to the match.
      pages: int32[G, n], the match's pages in order.
      num_tokens: n * page_size.
      namespace: the namespace that was searched.
    """
    node: Node | None
    num_node_pages: int
    pages: np.ndarray
    num_tokens: int
    namespace: Namespace


class Inserted(NamedTuple):
    """What an insertion did.

    Attributes:
      match: the inserted sequence as a match that `lock` takes; its pages are those from `below` on.
      num_existing_pages: leading pages that the tree held already; the caller still owns its own copies of these.
    """
    match: Match
    num_existing_pages: int


class RadixTree:
    """Prefix tree over pages of tokens, one root per namespace.

    `num_evictable_pages` and `num_locked_pages` are kept up to date by every operation; `check_invariants` recomputes
    them by walking.
    """

    def __init__(self, page_size: int, num_groups: int = 1):
        self.page_size = page_size
        self.num_groups = num_groups
        self.num_evictable_pages = 0
        self.num_locked_pages = 0
        self._roots: dict[Namespace, Node] = {}
        self._queue = LruQueue()
        self._clock = count(1)
        self._serial = count()
        self._page_bytes = page_size * _TOKEN_BYTES

    def match(self, tokens: Sequence[int] | np.ndarray, namespace: Namespace = Namespace(), *,
              touch: bool = True) -> Match:
        """Finds the longest cached prefix of `tokens` in whole pages. Changes no structure.

        Args:
          tokens: token ids, int32[k].
          touch: count this as a use for the eviction order.
        """
        root = self._roots.get(namespace)
        if root is None:
            return Match(None, 0, self._no_pages(), 0, namespace)
        query = _token_bytes(tokens)
        node, num_node_pages, path = self._walk(root, query)
        if touch:
            self._touch(node)
        pages = [n.pages for n in path]
        if path:
            pages[-1] = pages[-1][:, :num_node_pages]
        pages = np.concatenate(pages, axis=1) if pages else self._no_pages()
        return Match(node, num_node_pages, pages, pages.shape[1] * self.page_size, namespace)

    def lock(self, match: Match) -> Node:
        """Protects the match from eviction and returns the node to unlock later; splits its last edge if needed."""
        node = match.node
        if node is None:
            node = self._root(match.namespace)
        elif 0 < match.num_node_pages < node.num_pages:
            node = self._split(node, match.num_node_pages)
        self._touch(node)
        locked = node
        while node is not None:
            node.lock_count += 1
            if node.lock_count == 1:
                self.num_evictable_pages -= node.num_pages
                self.num_locked_pages += node.num_pages
            node = node.parent
        return locked

    def unlock(self, node: Node) -> None:
        """Takes back one `lock`."""
        if not node.children and node.lock_count == 1 and node.parent is not None:
            self._queue.add(node)
        while node is not None:
            assert node.lock_count > 0, "unlock without lock"
            node.lock_count -= 1
            if node.lock_count == 0:
                self.num_locked_pages -= node.num_pages
                self.num_evictable_pages += node.num_pages
            node = node.parent

    def insert(self, tokens: Sequence[int] | np.ndarray, pages: np.ndarray, namespace: Namespace = Namespace(), *,
               below: Node | None = None) -> Inserted:
        """Adds the whole pages of `tokens`; a remainder shorter than a page is left out.

        The leading pages that the tree has already stay as they are and the caller keeps its own for them; from there
        on the tree owns `pages`.

        Args:
          tokens: token ids, int32[k].
          pages: int32[G, k // page_size], or int32[k // page_size] for one group.
          below: a locked node that `tokens` continue, instead of the root.
        """
        pages = np.atleast_2d(np.asarray(pages, np.int32))
        query = _token_bytes(tokens)
        num_pages = len(query) // self._page_bytes
        if pages.shape != (self.num_groups, num_pages):
            raise ValueError(f"{len(tokens)} tokens hold {num_pages} whole pages of {self.page_size}; "
                             f"got page ids of shape {pages.shape}")
        if num_pages == 0:
            return Inserted(Match(below, below.num_pages if below else 0, self._no_pages(), 0, namespace), 0)
        query = query[:num_pages * self._page_bytes]
        start = below if below is not None else self._root(namespace)
        node, num_node_pages, path = self._walk(start, query)
        existing = [n.pages for n in path]
        if path:
            existing[-1] = existing[-1][:, :num_node_pages]
        num_existing = sum(p.shape[1] for p in existing)
        if num_existing < num_pages:
            if path and num_node_pages < node.num_pages:
                node = self._split(node, num_node_pages)
            node = self._add_leaf(node, query[num_existing * self._page_bytes:], pages[:, num_existing:].copy())
            num_node_pages = node.num_pages
            self._touch(node)
            self._queue.add(node)
        else:
            self._touch(node)
        whole = np.concatenate([*existing, pages[:, num_existing:]], axis=1)
        return Inserted(Match(node, num_node_pages, whole, num_pages * self.page_size, namespace), num_existing)

    def evict(self, num_pages: int) -> np.ndarray:
        """Removes up to `num_pages` unlocked pages, least recently used leaves first, each from its end.

        Returns:
          int32[G, k] page ids that the caller owns now, k <= num_pages.
        """
        evicted: list[np.ndarray] = []
        missing = num_pages
        while missing > 0:
            node = self._queue.pop(_is_unlocked_leaf)
            if node is None:
                break
            n = min(missing, node.num_pages)
            missing -= n
            self.num_evictable_pages -= n
            if n == node.num_pages:
                evicted.append(node.pages)
                self._remove(node)
            else:
                evicted.append(node.pages[:, node.num_pages - n:])
                node.pages = node.pages[:, :node.num_pages - n].copy()
                node.key = node.key[:node.num_pages * self._page_bytes]
                self._queue.add(node)
        if len(evicted) == 1:
            return evicted[0]
        return np.concatenate(evicted, axis=1) if evicted else self._no_pages()

    def nodes(self) -> Iterator[Node]:
        """All nodes with pages, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack += node.children.values() if node.children else ()

    def root_locks(self) -> int:
        """Locks held, over all namespaces."""
        return sum(root.lock_count for root in self._roots.values())

    def check_invariants(self) -> None:
        """Recomputes every count and property by walking; raises AssertionError with what differs."""
        evictable = locked = 0
        for root in self._roots.values():
            assert root.parent is None and root.num_pages == 0, "a root has pages"
        for node in self.nodes():
            assert node.num_pages > 0 and len(node.key) == node.num_pages * self._page_bytes, "key and pages differ"
            children = list(node.children.values()) if node.children else []
            first_pages = [c.key[:self._page_bytes] for c in children]
            assert first_pages == (list(node.children) if children else []), "child keys are stale"
            assert first_pages == sorted(set(first_pages)), "children out of order"
            assert all(c.parent is node for c in children), "a child has another parent"
            children_locks = sum(c.lock_count for c in children)
            assert node.lock_count >= children_locks, "a locked node below an unlocked one"
            assert node.last_used >= max((c.last_used for c in children), default=0), "child used after parent"
            assert node.is_queued or children or node.lock_count, "an unlocked leaf is not queued"
            evictable += 0 if node.lock_count else node.num_pages
            locked += node.num_pages if node.lock_count else 0
        assert (evictable, locked) == (self.num_evictable_pages, self.num_locked_pages), (
            f"counted {self.num_evictable_pages} evictable and {self.num_locked_pages} locked pages, "
            f"walked {evictable} and {locked}")

    def _walk(self, node: Node, query: bytes) -> tuple[Node, int, list[Node]]:
        """Follows `query` below `node`: the last node reached, its pages used, and the nodes on the way."""
        width = self._page_bytes
        position, end = 0, len(query) - len(query) % width
        path: list[Node] = []
        num_node_pages = node.num_pages
        while position < end:
            child = node.children.get(query[position:position + width]) if node.children else None
            if child is None:
                break
            node = child
            path.append(node)
            num_node_pages = node.num_pages
            if not query.startswith(node.key, position):
                num_node_pages = _common_tokens(node.key, query, position) // self.page_size
                break
            position += len(node.key)
        return node, num_node_pages, path

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(b"", self._no_pages(), None, next(self._serial), 0)
        return root

    def _touch(self, node: Node | None) -> None:
        now = next(self._clock)
        while node is not None:
            node.last_used = now
            node = node.parent

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cuts an edge after `num_pages` pages; returns the new upper node. The lower one keeps its identity."""
        parent, cut = node.parent, num_pages * self._page_bytes
        upper = Node(node.key[:cut], node.pages[:, :num_pages].copy(), parent, next(self._serial), node.last_used)
        upper.lock_count = node.lock_count
        parent.children[node.key[:self._page_bytes]] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages[:, num_pages:].copy(), upper
        upper.add_child(node.key[:self._page_bytes], node)
        return upper

    def _add_leaf(self, parent: Node, key: bytes, pages: np.ndarray) -> Node:
        node = Node(key, pages, parent, next(self._serial), parent.last_used)
        parent.add_child(key[:self._page_bytes], node)
        self.num_evictable_pages += node.num_pages
        return node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        parent.remove_child(node.key[:self._page_bytes])
        node.parent = None
        if _is_unlocked_leaf(parent):
            self._queue.add(parent)

    def _no_pages(self) -> np.ndarray:
        return np.empty((self.num_groups, 0), np.int32)


def _is_unlocked_leaf(node: Node) -> bool:
    return node.lock_count == 0 and not node.children and node.parent is not None


def _token_bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(tokens, np.int32).astype(">i4").tobytes()


def _common_tokens(key: bytes, query: bytes, position: int) -> int:
    """Leading tokens that `key` and `query[position:]` share."""
    n = min(len(key), len(query) - position) // _TOKEN_BYTES
    a = np.frombuffer(key, np.uint32, n)
    b = np.frombuffer(query, np.uint32, n, position)
    differs = a != b
    first = int(differs.argmax())
    return first if n and differs[first] else n
