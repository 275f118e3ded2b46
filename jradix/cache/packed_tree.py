"""The tree as plain arrays: what a snapshot keeps of a prefix cache, and how it becomes part of a cache again.

Edges are numbered parents before children. Their pages are numbered as *rows*, which is how their content is stored:
first those of all device nodes, then those of all host nodes. Left out: what is gone, pins, and what requests hold.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from jradix.cache.node import Inserted, Namespace, Node, Tier
from jradix.cache.pages import PagePool
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.radix_tree import RadixTree


@dataclass(frozen=True, slots=True)
class PackedTree:
    """A tree of n edges with R pages and T tokens on its edges.

    Attributes:
      namespaces: of the roots.
      tokens: int32[T], edge after edge.
      num_tokens, num_pages: int64[n], of each edge. A tail has one page and fewer tokens than it holds.
      first_row: int64[n]; the rows of an edge are `first_row` to `first_row + num_pages`.
      parent: int64[n], -1 for a root.
      namespace: int64[n], index into `namespaces`.
      last_used: int64[n], order of the last uses; of a parent not smaller than that of its children.
      hits: int64[n].
      used_ago_s, created_ago_s: float64[n], seconds before the packing.
      is_protected: bool[n], the eviction policy's mark.
    """
    namespaces: tuple[Namespace, ...]
    tokens: np.ndarray
    num_tokens: np.ndarray
    num_pages: np.ndarray
    first_row: np.ndarray
    parent: np.ndarray
    namespace: np.ndarray
    last_used: np.ndarray
    hits: np.ndarray
    used_ago_s: np.ndarray
    created_ago_s: np.ndarray
    is_protected: np.ndarray

    @property
    def num_rows(self) -> int:
        """R, pages per group."""
        return int(self.num_pages.sum())

    def arrays(self) -> dict[str, np.ndarray]:
        """All but the namespaces, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "namespaces"}


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What became of the pages of a packed tree.

    Attributes:
      num_loaded_pages: put into the cache.
      num_existing_pages: the cache had them already.
      num_left_out_pages: the pool had no room for them.
    """
    num_loaded_pages: int
    num_existing_pages: int
    num_left_out_pages: int


def pack(cache: PrefixCache) -> tuple[PackedTree, np.ndarray, np.ndarray]:
    """Packs all that the cache has, on the device and on the host.

    Moves that the cache has noted must have been carried out before the pages are read.

    Returns:
      (the tree, int32[G, d] device page ids of the rows 0 to d, int32[G, h] host page ids of the rows d to R).
    """
    tree, now = cache.tree, cache.clock()
    place = {root: (-1, index) for index, root in enumerate(tree.roots.values())}    # node -> its index, its namespace
    nodes = list(tree.nodes())
    columns = np.empty((6, len(nodes)), np.int64)
    ages = np.empty((2, len(nodes)))
    for index, node in enumerate(nodes):
        parent, namespace = place[node.parent]
        place[node] = index, namespace
        columns[:, index] = len(node.key) // 4, node.num_pages, parent, namespace, node.last_used, node.hits
        ages[:, index] = now - node.used_s, now - node.created_s
    num_tokens, num_pages, parent, namespace, last_used, hits = columns
    first_row = np.empty(len(nodes), np.int64)
    pages, num_rows = [], 0
    for tier in (Tier.DEVICE, Tier.HOST):
        chosen = [index for index, node in enumerate(nodes) if node.tier is tier]
        first_row[chosen] = num_rows + _starts(num_pages[chosen])
        num_rows += int(num_pages[chosen].sum())
        none = np.empty((tree.num_groups, 0), np.int32)
        pages.append(np.concatenate([none, *(nodes[index].pages for index in chosen)], axis=1))
    tokens = np.frombuffer(b"".join(node.key for node in nodes), ">i4").astype(np.int32)
    packed = PackedTree(tuple(tree.roots), tokens, num_tokens, num_pages, first_row, parent, namespace, last_used, hits,
                        ages[0], ages[1], np.array([node.is_protected for node in nodes], bool))
    return packed, *pages


def unpack(cache: PrefixCache, packed: PackedTree, fill: Callable[[np.ndarray, np.ndarray], None]) -> Unpacked:
    """Puts a packed tree into a cache, empty or not, on free pages; nothing is evicted for it.

    Where the free pages do not suffice, the most recently used paths go first. What the cache has already stays as it
    is. The pages count as used after everything in the cache, among themselves in their old order.

    Args:
      fill: called once with (int64[k] rows, int32[G, k] free device pages): brings the content of the rows into the
        pages. When it raises, cache and tree are as they were.
    """
    existing = _existing_pages(cache, packed)
    taken = _choose(packed, existing, cache.num_free_pages, cache.page_size)
    chosen = np.flatnonzero(taken)
    starts, counts = packed.first_row[chosen] + existing[chosen], taken[chosen]
    rows = np.repeat(starts - _starts(counts), counts) + np.arange(counts.sum())
    pages = np.stack([pool.alloc(len(rows)) for pool in cache.pools])
    try:
        fill(rows, pages)
    except BaseException:
        _free(cache.pools, pages)
        raise
    _insert(cache, packed, existing, taken, pages)
    return Unpacked(len(rows), int(existing.sum()), packed.num_rows - len(rows) - int(existing.sum()))


def _existing_pages(cache: PrefixCache, packed: PackedTree) -> np.ndarray:
    """Leading pages of each edge that the cache has on the device: int64[n]."""
    existing = np.zeros(len(packed.parent), np.int64)
    if not any(root.children for root in cache.tree.roots.values()):
        return existing
    first_token, parents = _starts(packed.num_tokens), packed.parent.tolist()
    is_leaf = np.ones(len(packed.parent), bool)
    is_leaf[packed.parent[packed.parent >= 0]] = False
    for leaf in np.flatnonzero(is_leaf).tolist():
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        path.reverse()
        parts = [packed.tokens[first_token[i]:first_token[i] + packed.num_tokens[i]] for i in path]
        match = cache.tree.match(np.concatenate(parts), packed.namespaces[packed.namespace[leaf]], touch=False)
        left = match.num_tokens
        for index, part in zip(path, parts):
            existing[index] = min(left, len(part)) // cache.page_size
            left -= int(existing[index]) * cache.page_size
        partial = match.partial
        if (len(parts[-1]) < cache.page_size and partial is not None and partial.node.tier is Tier.DEVICE
                and match.num_tokens + partial.num_tokens == sum(map(len, parts))):
            existing[leaf] = 1
    return existing


def _choose(packed: PackedTree, existing: np.ndarray, num_free: int, page_size: int) -> np.ndarray:
    """Pages of each edge to load after its existing ones, so that they fit: int64[n]."""
    missing = packed.num_pages - existing
    order = np.argsort(-packed.last_used, kind="stable")      # a parent never stands behind its children
    ends = np.cumsum(missing[order])
    num_whole = int(np.searchsorted(ends, num_free, side="right"))
    taken = np.zeros_like(missing)
    taken[order[:num_whole]] = missing[order[:num_whole]]
    if num_whole < len(order):
        cut = order[num_whole]
        taken[cut] = num_free - taken.sum()
    return taken


def _insert(cache: PrefixCache, packed: PackedTree, existing: np.ndarray, taken: np.ndarray, pages: np.ndarray) -> None:
    """Hands the pages to the tree: those of edge i are the next `taken[i]` columns of `pages`."""
    tree, page_size = cache.tree, cache.page_size
    is_wanted, is_parent = taken > 0, np.zeros(len(taken), bool)
    for index in range(len(taken) - 1, -1, -1):
        if is_wanted[index] and packed.parent[index] >= 0:
            is_wanted[packed.parent[index]] = is_parent[packed.parent[index]] = True
    first_token, first_page = _starts(packed.num_tokens), _starts(taken)
    ends: dict[int, Node] = {}                   # edge -> where it ends in the tree
    loaded: list[tuple[int, Node]] = []
    first_tick: int | None = None
    for index in np.flatnonzero(is_wanted).tolist():
        namespace = packed.namespaces[packed.namespace[index]]
        below = ends.get(int(packed.parent[index]))
        tokens = packed.tokens[first_token[index]:first_token[index] + packed.num_tokens[index]]
        num_new = int(taken[index])
        new = pages[:, first_page[index]:first_page[index] + num_new]
        if len(tokens) < page_size:
            if tree.insert_tail(tokens, new[:, 0], namespace, below=below):
                node = (below or tree.roots[namespace]).children[tokens.astype(">i4").tobytes()]
                loaded.append((index, node))
            else:
                _free(cache.pools, new)
                continue
        else:
            num_pages = int(existing[index]) + num_new
            whole = np.concatenate([np.zeros((len(new), int(existing[index])), np.int32), new], axis=1)
            inserted = tree.insert(tokens[:num_pages * page_size], whole, namespace, below=below)
            assert inserted.num_existing_pages == existing[index], "the tree changed while pages were loaded"
            node = ends[index] = _end(tree, inserted, is_split=bool(is_parent[index]))
            if num_new:
                loaded += ((index, piece) for piece in _last_pieces(node, num_new))
        if first_tick is None:
            first_tick = node.last_used
    if loaded:
        _restore_uses(cache, packed, loaded, first_tick)
    for freed, pools in ((tree.freed_pages, cache.pools), (tree.freed_host_pages, cache.host_pools)):
        for given_up in freed:
            _free(pools, given_up)
        freed.clear()


def _end(tree: RadixTree, inserted: Inserted, *, is_split: bool) -> Node:
    """The node in which an insertion ended, cut there if more is to go below."""
    if not is_split or inserted.match.num_node_pages == inserted.match.node.num_pages:
        return inserted.match.node
    node = tree.lock(inserted.match, is_use=False)
    tree.unlock(node)
    return node


def _last_pieces(node: Node, num_pages: int) -> list[Node]:
    """The nodes that hold the last `num_pages` pages up to the end of `node`: one, or more where some had been gone."""
    pieces = []
    while num_pages > 0:
        pieces.append(node)
        num_pages -= node.num_pages
        node = node.parent
    return pieces


def _restore_uses(cache: PrefixCache, packed: PackedTree, loaded: list[tuple[int, Node]], first_tick: int) -> None:
    """Gives loaded nodes the uses they had. Every one of them has cost the tree's clock a tick since `first_tick`;
    these ticks are dealt out anew, in the order of the uses.
    """
    queue, now = cache.tree.queue, cache.clock()
    queued = [node for _, node in loaded if node.queue is queue]
    for node in queued:              # an entry must not be older than the node's last use
        queue.removed(node)
    indices = np.unique([index for index, _ in loaded])
    by_use = indices[np.lexsort((-indices, packed.last_used[indices]))]        # parents after children
    ticks = {int(index): first_tick + rank for rank, index in enumerate(by_use)}
    for index, node in loaded:
        node.last_used = ticks[index]
        node.used_s = now - float(packed.used_ago_s[index])
        node.created_s = now - float(packed.created_ago_s[index])
        node.hits = int(packed.hits[index])
        node.is_protected = bool(packed.is_protected[index])
    for _, node in loaded:
        parent = node.parent
        while parent is not None and parent.last_used < node.last_used:
            parent.last_used = node.last_used
            parent = parent.parent
    for node in sorted(queued, key=lambda node: node.last_used):
        if node.num_device_children == 0:
            queue.add(node)


def _free(pools: tuple[PagePool, ...], pages: np.ndarray) -> None:
    for pool, ids in zip(pools, pages):
        pool.free(ids)


def _starts(counts: np.ndarray) -> np.ndarray:
    """Where each of several runs begins when they are laid end to end."""
    return np.cumsum(counts) - counts
