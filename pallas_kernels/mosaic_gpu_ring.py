"""The ring of shared memory through which keys and values reach a block of threads on Hopper.

A step of the ring is `kv_tokens` keys and values of one kv head. Each of the two is `kv_tokens / unit` TMA boxes of one
page each, which all arrive at the step's barrier. A slot is refilled when every warpgroup that computes has left it.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA_ROWS = 64


@dataclass(frozen=True)
class Layout:
    """What one block of threads holds.

    Attributes:
      tile_rows: rows of q of one warpgroup, a multiple of 8 up to 64; the product has 64 whatever is used of them.
      tiles: row tiles of a block of threads.
      heads: heads of q of a block of threads, all on one kv head.
      heads_per_kv: heads of q on one kv head, as q lies in memory.
      unit: keys of one TMA box, a page or a whole fraction of one.
      kv_tokens: keys of one step.
      num_stages: steps that the ring holds.
      num_splits: parts that the keys of an item are computed in, side by side.
    """
    tile_rows: int
    tiles: int
    heads: int
    heads_per_kv: int
    head_dim: int
    page_size: int
    unit: int
    kv_tokens: int
    num_stages: int
    num_splits: int
    dtype: np.dtype

    @property
    def num_warpgroups(self) -> int:
        """Warpgroups that compute."""
        return self.tiles * self.heads

    @property
    def has_loader(self) -> bool:
        """Whether one more warpgroup loads. A lone one loads for itself, so that more blocks fit a multiprocessor."""
        return self.num_warpgroups > 1

    @property
    def swizzle(self) -> int:
        """Bytes of a row of a tile of keys or values."""
        return plgpu.find_swizzle(self.head_dim * self.dtype.itemsize * 8)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block of threads, barriers included; the result takes the place of the ring."""
        rows = self.num_warpgroups * WGMMA_ROWS
        queries = rows * self.head_dim * self.dtype.itemsize
        ring = 2 * self.num_stages * self.kv_tokens * self.head_dim * self.dtype.itemsize
        result = rows * self.head_dim * 4 + -(-rows * 4 // 1024) * 1024
        barriers = 8 * (self.num_warpgroups + 3 * self.num_stages + 1)
        return queries + max(ring, result) + barriers


class Items(NamedTuple):
    """What tiles walk, int32[I] each: item i is the keys of one row for the queries of one tile.

    Keys [first, end) are read, and no others reach a result. All queries of the tile see all keys of
    [full_first, full_end); elsewhere the mask decides. In ragged walks the query in flat row t stands at position
    `position + t`, and belongs to the item's row where first_token <= t < end_token.
    """
    row: Array
    first: Array
    end: Array
    full_first: Array
    full_end: Array
    position: Array
    first_token: Array
    end_token: Array


class Span(NamedTuple):
    """The steps of an item that one split takes: [begin, stop), all keys seen by all in [clear, blur).

    Step j holds the keys from `start + j * kv_tokens` on.
    """
    item: Items
    start: Array
    begin: Array
    clear: Array
    blur: Array
    stop: Array


class Ring(NamedTuple):
    """The refs of the ring. `k_ref, v_ref` [N * page_size, Hkv, D] and `table_ref` [S, M] are in global memory."""
    k_ref: Any
    v_ref: Any
    table_ref: Any
    k_smem: Any
    v_smem: Any
    k_ready: Any
    v_ready: Any
    is_free: Any

    def locate(self, span: Span, j: Array, layout: Layout) -> list[Array]:
        """First slot of each box of step j. Pages past the row's last are the table's padding: masked, but readable."""
        boxes, parts = layout.kv_tokens // layout.unit, layout.page_size // layout.unit
        first = span.start // layout.unit + j * boxes
        last_column = self.table_ref.shape[1] - 1
        pages = [self.table_ref[span.item.row, jnp.minimum((first + i) // parts, last_column)] for i in range(boxes)]
        return [pl.multiple_of(page * layout.page_size + (first + i) % parts * layout.unit, layout.unit)
                for i, page in enumerate(pages)]

    def load(self, boxes: list[Array], kv_head: Array, count: Array, layout: Layout) -> None:
        """Starts the copies of the step that is `count` in this block of threads, once its slot is free."""
        slot = slot_of(count, layout)
        pl.when(count >= layout.num_stages)(lambda: plgpu.barrier_wait(self.is_free.at[slot]))
        for ref, smem, barrier in ((self.k_ref, self.k_smem, self.k_ready), (self.v_ref, self.v_smem, self.v_ready)):
            for i, first in enumerate(boxes):
                plgpu.copy_gmem_to_smem(ref.at[pl.ds(first, layout.unit), kv_head],
                                        smem.at[slot, pl.ds(i * layout.unit, layout.unit)], barrier.at[slot])


def slot_of(count: Array, layout: Layout) -> Array:
    return lax.rem(count, jnp.int32(layout.num_stages))


def read_span(items_ref: Any, i: Array, split: Array, layout: Layout) -> Span:
    """Item i of int32[I, 8], and the steps of it that `split` takes."""
    item = Items(*(items_ref[i, field] for field in range(len(Items._fields))))
    keys = layout.kv_tokens
    start = item.first // layout.unit * layout.unit
    steps = jnp.maximum(item.end - start + keys - 1, 0) // keys
    steps_per_split = (steps + layout.num_splits - 1) // layout.num_splits
    begin = jnp.minimum(split * steps_per_split, steps)
    stop = jnp.minimum(begin + steps_per_split, steps)
    clear = jnp.clip(jnp.maximum(item.full_first - start + keys - 1, 0) // keys, begin, stop)
    blur = jnp.clip(jnp.maximum(item.full_end - start, 0) // keys, clear, stop)
    return Span(item, start, begin, clear, blur, stop)


def scratch(layout: Layout, needs_weights: bool) -> dict[str, Any]:
    """Shared memory and barriers of a block of threads, by the names that the kernel's body takes."""
    rows, boxes = (layout.num_warpgroups, WGMMA_ROWS), layout.kv_tokens // layout.unit
    ring = _tiled((layout.num_stages, layout.kv_tokens, layout.head_dim), layout.dtype)
    result = [_tiled((*rows, layout.head_dim), np.dtype(np.float32)), plgpu.SMEM(rows, jnp.float32)]
    refs = dict(
        q_smem=_tiled((*rows, layout.head_dim), layout.dtype),
        ring_or_result=plgpu.RefUnion([ring, ring], result),
        q_ready=plgpu.Barrier(num_barriers=layout.num_warpgroups),
        k_ready=plgpu.Barrier(num_arrivals=boxes, num_barriers=layout.num_stages),
        v_ready=plgpu.Barrier(num_arrivals=boxes, num_barriers=layout.num_stages),
        is_free=plgpu.Barrier(num_arrivals=layout.num_warpgroups, num_barriers=layout.num_stages),
        meeting=plgpu.Barrier(num_arrivals=layout.num_warpgroups),
    )
    return refs | dict(p_smem=_tiled((*rows, layout.kv_tokens), layout.dtype)) if needs_weights else refs


def _tiled(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Shared memory in swizzled tiles of 8 rows, as wgmma reads and TMA writes them without bank conflicts."""
    swizzle = plgpu.find_swizzle(shape[-1] * dtype.itemsize * 8)
    transforms = plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)
