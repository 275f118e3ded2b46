"""Page moves: which of them share a device call, and the programs that carry them out. It holds no state.

A batch reads all its sources before it writes a target. So a page may join the batch that was planned last to read its
target, but not one that writes its source or its target.
"""
from __future__ import annotations

from typing import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jradix.batch import MoveKind, PageMove
from jradix.config import KVGroup
from jradix.ops.kv_cache import KVCache, write_page

PAGES_PER_CALL = 8   # 6 MB of SmolLM2-135M, about 2 ms on two CPU cores; OUT takes that for a single page too

_ON_HOST = {MoveKind.COPY: (False, False), MoveKind.OUT: (False, True), MoveKind.IN: (True, False)}


def check_moves(moves: Sequence[PageMove], *, num_groups: int, num_pages: int, num_host_pages: int) -> None:
    """Refuses page ids that do not exist: the device would clamp them and change another page in silence.

    Raises:
      ValueError: the first id, or shape, that is wrong.
    """
    for kind, source, target in moves:
        if source.shape != target.shape or source.ndim != 2 or len(source) != num_groups:
            raise ValueError(f"{kind.name} of pages {source.shape} to {target.shape}: expected two arrays "
                             f"[{num_groups}, n], page ids by KV group")
        for name, ids, is_host in zip(("source", "target"), (source, target), _ON_HOST[kind]):
            largest = num_host_pages if is_host else num_pages
            if ids.size and (ids.min() < 1 or ids.max() > largest):
                raise ValueError(f"{kind.name}: {name} pages {ids.min()} to {ids.max()}, expected 1 to {largest}, the "
                                 f"pages of the {'host' if is_host else 'device'}")


def batch_moves(moves: Sequence[PageMove], *, pages_per_call: int = PAGES_PER_CALL) -> list[PageMove]:
    """Moves of at most `pages_per_call` pages each that, one after the other, have the effect of `moves`.

    Each page goes into the earliest batch of its kind that keeps this effect, also past batches of other kinds: pages
    evicted one by one with copies between them still leave in few calls. No batch names a target twice or writes one
    of its own sources before it was read.
    """
    kinds: list[MoveKind] = []
    pages: list[list[tuple[Sequence[int], Sequence[int]]]] = []
    last_read: dict[tuple[bool, int, int], int] = {}     # (is on the host, group, page) -> number of a batch
    last_write: dict[tuple[bool, int, int], int] = {}
    with_room: dict[MoveKind, list[int]] = {kind: [] for kind in MoveKind}
    for kind, sources, targets in moves:
        on_host = _ON_HOST[kind]
        for source, target in zip(sources.T.tolist(), targets.T.tolist()):
            read = [(on_host[0], group, page) for group, page in enumerate(source)]
            written = [(on_host[1], group, page) for group, page in enumerate(target)]
            earliest = max(0, *(last_write.get(place, -1) + 1 for place in (*read, *written)),
                           *(last_read.get(place, 0) for place in written))
            number = next((i for i in with_room[kind] if i >= earliest), len(kinds))
            if number == len(kinds):
                kinds.append(kind)
                pages.append([])
                with_room[kind].append(number)
            pages[number].append((source, target))
            if len(pages[number]) == pages_per_call:
                with_room[kind].remove(number)
            for place in read:
                last_read[place] = max(number, last_read.get(place, 0))
            for place in written:
                last_write[place] = number
    return [PageMove(kind, *(np.array(ids, np.int32).T for ids in zip(*batch))) for kind, batch in zip(kinds, pages)]


def padded_ids(ids: np.ndarray, size: int = PAGES_PER_CALL) -> np.ndarray:
    """int32[G, n] -> a fresh int32[G, size], the scratch page at the end."""
    padded = np.zeros((len(ids), size), np.int32)
    padded[:, :ids.shape[1]] = ids
    return padded


def make_copy_pages(group_of_layer: Sequence[int]) -> Callable[[KVCache, Array, Array, Array], KVCache]:
    """`copy_pages(kv, source, target, count)`: int32[G, K] page ids, the first `count` of them, in order.

    A loop over pages and not a gather and a scatter: its time follows `count`, and nothing is padded.
    """

    def copy_pages(kv: KVCache, source: Array, target: Array, count: Array) -> KVCache:
        def copy_one(i: Array, kv: KVCache) -> KVCache:
            def copied(layer: int, pages: Array) -> Array:
                group = group_of_layer[layer]
                page = lax.dynamic_slice_in_dim(pages, source[group, i], 1)
                return write_page(pages, page, target[group, i])

            return KVCache(*(tuple(copied(layer, pages) for layer, pages in enumerate(side)) for side in kv))

        return lax.fori_loop(0, count, copy_one, kv)

    return copy_pages


def make_gather_pages(groups: Sequence[KVGroup]) -> Callable[[KVCache, Array], tuple[Array, ...]]:
    """`gather_pages(kv, source)`: int32[G, K] -> for each group [K, 2 * its layers, page_size, W], keys first."""

    def gather_pages(kv: KVCache, source: Array) -> tuple[Array, ...]:
        return tuple(jnp.stack([side[layer].at[ids].get(mode="clip") for side in kv for layer in group.layers], axis=1)
                     for group, ids in zip(groups, source))

    return gather_pages


def make_scatter_pages(groups: Sequence[KVGroup]) -> Callable[..., KVCache]:
    """`scatter_pages(kv, target, contents, count)`: the inverse of `gather_pages` for the first `count` pages."""

    def scatter_pages(kv: KVCache, target: Array, contents: tuple[Array, ...], count: Array) -> KVCache:
        def write_one(i: Array, kv: KVCache) -> KVCache:
            sides = [list(side) for side in kv]
            for group, ids, content in zip(groups, target, contents):
                page = lax.dynamic_slice_in_dim(content, i, 1)
                places = [(side, layer) for side in sides for layer in group.layers]
                for row, (side, layer) in enumerate(places):
                    side[layer] = write_page(side[layer], page[:, row], ids[i])
            return KVCache(*map(tuple, sides))

        return lax.fori_loop(0, count, write_one, kv)

    return scatter_pages
