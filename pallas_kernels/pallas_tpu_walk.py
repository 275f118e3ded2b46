"""The one TPU kernel behind decode, extend and shared_prefix: walks the pages of work items past tiles of queries.

It knows neither causal rules nor ragged rows: `pallas_tpu` turns those into work items.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
_NEVER = -1e30       # score of a key that may not be seen; finite, so that exp(score - max) is never NaN
_ITEM, _STEP, _NUM_STARTED, _NUM_DONE = range(4)     # the copy cursor


class Items(NamedTuple):
    """Work of each grid step: one row's keys past one tile of queries. int32[I] each.

    Items of one tile are neighbours and tiles ascend, so a tile's state stays in VMEM until its last item.
    The last three are read where tiles are ragged.
    """
    tile: Array          # block of queries
    row: Array           # row of the page table
    first: Array         # first key that any query of the item sees
    end: Array           # after the last one; end <= first: no keys
    position: Array      # of the tile's token 0, counted in the row
    first_token: Array   # of the tile that belongs to the row
    end_token: Array


@dataclass(frozen=True)
class Layout:
    """Sizes of one compiled walk.

    The query heads of a bundle of kv heads are multiplied with the bundle's lanes at once, laid out block-diagonally.
    A bundle is whole groups of 128 lanes, or all heads: few queries cost the matrix unit the same over any width.
    """
    num_kv_heads: int
    group: int               # query heads of a kv head
    head_dim: int
    tile_tokens: int         # power of two
    page_size: int
    pages_per_step: int
    num_stages: int
    dtype: np.dtype

    @property
    def heads_per_bundle(self) -> int:
        if self.num_kv_heads * self.group * self.tile_tokens <= LANES:
            return self.num_kv_heads
        heads = LANES // math.gcd(LANES, self.head_dim)
        return heads if self.num_kv_heads % heads == 0 else self.num_kv_heads

    @property
    def num_bundles(self) -> int:
        return self.num_kv_heads // self.heads_per_bundle

    @property
    def rows(self) -> int:
        """Rows of a bundle's score matrix: row r is head r // tile_tokens of the bundle, token r % tile_tokens."""
        return self.heads_per_bundle * self.group * self.tile_tokens

    @property
    def lanes(self) -> int:
        return self.heads_per_bundle * self.head_dim

    @property
    def step_tokens(self) -> int:
        return self.pages_per_step * self.page_size


def walk(q: Array, k_pages: Array, v_pages: Array, page_table: Array, items: Items, layout: Layout, *, sm_scale: float,
         is_ragged: bool, sliding_window: int | None, soft_cap: float | None,
         interpret: bool | pltpu.InterpretParams) -> tuple[Array, Array]:
    """Attention of tiles of queries over the keys of their items, FlashAttention's online softmax (Dao et al. 2022).

    Grid: one step per item, in order, on one core. Keys and values stay in HBM; a ring of `num_stages` VMEM buffers
    holds `pages_per_step` pages each. Copies run ahead of the products and across items, so that only the very first
    one of a call is waited for from its start. Queries and results are tiles that Pallas pipelines; the running
    maximum, sum and weighted values of a tile are in VMEM scratch.

    Args:
      q: [tiles, num_bundles, rows, D], the type of the pages.
      k_pages, v_pages: [N, page_size, Hkv * D].
      page_table: int32[S, M].
      is_ragged: tiles hold tokens of several rows, each of which sees keys up to its own position; False: a tile's
        tokens all see the item's last key.
      sliding_window: a token sees this many keys, the last one included; None: all.

    Returns:
      float32[tiles, num_bundles, rows, D] and float32[tiles, num_bundles, rows].
    """
    num_items = items.tile.shape[0]
    shape = (layout.num_bundles, layout.rows)
    is_wide = layout.heads_per_bundle > 1

    def tile(*trailing: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *trailing), lambda i, table, tiles, *_: (tiles[i], *[0] * len(trailing)))

    buffer = pltpu.VMEM((layout.num_stages, layout.pages_per_step, *k_pages.shape[1:]), k_pages.dtype)
    kernel = functools.partial(_kernel, layout=layout, num_pages=page_table.shape[1], sm_scale=sm_scale,
                               is_ragged=is_ragged, sliding_window=sliding_window, soft_cap=soft_cap)
    run = pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2 + len(items),
            grid=(num_items,),
            in_specs=[tile(*shape, layout.head_dim), pl.BlockSpec(memory_space=pl.ANY),
                      pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=[tile(*shape, layout.head_dim), tile(*shape)],
            scratch_shapes=[buffer, buffer, pltpu.SemaphoreType.DMA((2, layout.num_stages)),
                            pltpu.SMEM((4,), jnp.int32),
                            pltpu.VMEM((*shape, layout.lanes) if is_wide else (1, 8, LANES), q.dtype),
                            pltpu.VMEM((*shape, 1), jnp.float32), pltpu.VMEM((*shape, 1), jnp.float32),
                            pltpu.VMEM((*shape, layout.lanes), jnp.float32)]),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name="paged_walk")
    return run(page_table.reshape(-1), *items, _next_items(items), q, k_pages, v_pages)


def _next_items(items: Items) -> Array:
    """int32[I + 1]: entry i is the first item from i on that has keys, I if there is none."""
    num_items = items.tile.shape[0]
    own = jnp.where(items.end > items.first, jnp.arange(num_items), num_items)
    own = jnp.append(own, num_items).astype(jnp.int32)
    return lax.cummin(own, reverse=True)


def _kernel(table: Ref, tiles: Ref, rows: Ref, firsts: Ref, ends: Ref, positions: Ref, first_tokens: Ref,
            end_tokens: Ref, next_items: Ref, q_ref: Ref, k_hbm: Ref, v_hbm: Ref, out_ref: Ref, lse_ref: Ref,
            k_buffer: Ref, v_buffer: Ref, semaphores: Ref, cursor: Ref, wide_q: Ref, top: Ref, total: Ref, acc: Ref, *,
            layout: Layout, num_pages: int, sm_scale: float, is_ragged: bool, sliding_window: int | None,
            soft_cap: float | None) -> None:
    """One item. The scalars are in SMEM, k_hbm and v_hbm in HBM, all else in VMEM."""
    item, num_items = pl.program_id(0), pl.num_programs(0)
    page_size, step_tokens = layout.page_size, layout.step_tokens
    queries = q_ref if layout.heads_per_bundle == 1 else wide_q
    tile = tiles[item]
    first, end = firsts[item], ends[item]

    def first_page(i: Array) -> Array:
        return firsts[i] // page_size

    def num_steps(i: Array) -> Array:
        return jnp.where(ends[i] > firsts[i], pl.cdiv(ends[i] - first_page(i) * page_size, step_tokens), 0)

    def each_copy(i: Array, step: Array, slot: Array, act: Callable[[Any], None]) -> None:
        """The pages of one step that hold keys of the item: what hangs over its end is not copied."""
        page = first_page(i) + step * layout.pages_per_step
        row = rows[i] * num_pages

        def copy(j: Array, _: None) -> None:
            page_id = table[row + page + j]
            act(pltpu.make_async_copy(k_hbm.at[page_id], k_buffer.at[slot, j], semaphores.at[0, slot]))
            act(pltpu.make_async_copy(v_hbm.at[page_id], v_buffer.at[slot, j], semaphores.at[1, slot]))

        lax.fori_loop(0, jnp.minimum(layout.pages_per_step, pl.cdiv(ends[i], page_size) - page), copy, None)

    def start_next_step() -> None:
        ahead = cursor[_ITEM]

        @pl.when(ahead < num_items)
        def _() -> None:
            step = cursor[_STEP]
            each_copy(ahead, step, cursor[_NUM_STARTED] % layout.num_stages, lambda copy: copy.start())
            is_last = step + 1 == num_steps(ahead)
            cursor[_ITEM] = jnp.where(is_last, next_items[ahead + 1], ahead)
            cursor[_STEP] = jnp.where(is_last, 0, step + 1)
            cursor[_NUM_STARTED] += 1

    @pl.when(item == 0)
    def _() -> None:
        cursor[_ITEM] = next_items[0]
        cursor[_STEP] = cursor[_NUM_STARTED] = cursor[_NUM_DONE] = 0
        for _ in range(layout.num_stages - 1):
            start_next_step()

    @pl.when((item == 0) | (tiles[jnp.maximum(item - 1, 0)] != tile))
    def _() -> None:
        top[...] = jnp.full_like(top, _NEVER)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)
        if layout.heads_per_bundle > 1:
            for bundle in range(layout.num_bundles):
                wide_q[bundle] = _spread(q_ref[bundle], layout)

    # The last key that each row of the score matrix sees; -1 where it belongs to another row of the batch.
    if is_ragged:
        token = lax.broadcasted_iota(jnp.int32, (layout.rows, 1), 0) & (layout.tile_tokens - 1)
        is_own = (token >= first_tokens[item]) & (token < end_tokens[item])
        newest = jnp.where(is_own, positions[item] + token, -1)
    else:
        newest = jnp.full((layout.rows, 1), end - 1)

    def update(ref: Ref, bundle: int, new: Array) -> None:
        """A tile's other rows stay as they are: another request's values, NaN included, must not reach them."""
        ref[bundle] = jnp.where(is_own, new, ref[bundle]) if is_ragged else new

    def attend(step: Array, _: None) -> None:
        start_next_step()
        slot = cursor[_NUM_DONE] % layout.num_stages
        each_copy(item, step, slot, lambda copy: copy.wait())
        cursor[_NUM_DONE] += 1
        start = first_page(item) * page_size + step * step_tokens

        @pl.when((start < first) | (start + step_tokens > end))
        def _() -> None:
            _zero_outside(v_buffer.at[slot], first - start, end - start)

        key = start + lax.broadcasted_iota(jnp.int32, (1, step_tokens), 1)
        visible = key <= newest
        if sliding_window is not None:
            visible &= key > newest - sliding_window
        for bundle in range(layout.num_bundles):
            lanes = pl.ds(bundle * layout.lanes, layout.lanes)
            keys = k_buffer[slot, :, :, lanes].reshape(step_tokens, layout.lanes)
            values = v_buffer[slot, :, :, lanes].reshape(step_tokens, layout.lanes)
            scores = _product(queries[bundle], keys, ((1,), (1,))) * sm_scale
            if soft_cap is not None:
                scores = jnp.tanh(scores / soft_cap) * soft_cap
            scores = jnp.where(visible, scores, _NEVER)
            old = top[bundle]
            new = jnp.maximum(old, scores.max(axis=1, keepdims=True))
            # Rows that have seen no key yet gather finite nonsense here, which `scale` wipes out at the first key.
            weights, scale = jnp.exp(scores - new), jnp.exp(old - new)
            update(top, bundle, new)
            update(total, bundle, total[bundle] * scale + weights.sum(axis=1, keepdims=True))
            update(acc, bundle, acc[bundle] * scale + _product(weights.astype(values.dtype), values, ((1,), (0,))))

    lax.fori_loop(0, num_steps(item), attend, None)

    @pl.when((item == num_items - 1) | (tiles[jnp.minimum(item + 1, num_items - 1)] != tile))
    def _() -> None:
        for bundle in range(layout.num_bundles):
            # Of a row that saw no key; a sum that is not a number is one it saw, and must not pass for that.
            is_empty = (top[bundle] == _NEVER) & (total[bundle] >= 0)
            safe = jnp.where(is_empty, 1, total[bundle])
            out_ref[bundle] = _gather(jnp.where(is_empty, 0, acc[bundle] / safe), layout)
            lse = jnp.where(is_empty, -jnp.inf, top[bundle] + jnp.log(safe))
            lse_ref[bundle] = jnp.transpose(jnp.broadcast_to(lse, (layout.rows, LANES)))[0]


def _product(a: Array, b: Array, contracting: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """Float32 products are exact to float32; lower types accumulate in float32."""
    return lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=jnp.float32,
                           precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def _own_head(layout: Layout, head: int) -> Array:
    """bool[rows, 1]: the rows whose kv head is number `head` of its bundle."""
    row = lax.broadcasted_iota(jnp.int32, (layout.rows, 1), 0)
    size = layout.group * layout.tile_tokens
    return (row >= head * size) & (row < (head + 1) * size)


def _spread(q: Array, layout: Layout) -> Array:
    """[rows, D] to block-diagonal [rows, lanes]."""
    heads = range(layout.heads_per_bundle)
    return jnp.concatenate([jnp.where(_own_head(layout, head), q, 0) for head in heads], axis=1)


def _gather(wide: Array, layout: Layout) -> Array:
    """The diagonal of [rows, lanes]: [rows, D]."""
    parts = [wide[:, head * layout.head_dim:(head + 1) * layout.head_dim] for head in range(layout.heads_per_bundle)]
    out = parts[0]
    for head, part in enumerate(parts[1:], 1):
        out = jnp.where(_own_head(layout, head), part, out)
    return out


def _zero_outside(values: Ref, first: Array, end: Array) -> None:
    """Zeroes the slots of [pages, page_size, width] that nobody sees: a weight of 0 times NaN is NaN."""
    pages, page_size, width = values.shape
    slot = lax.broadcasted_iota(jnp.int32, (pages * page_size, width), 0)
    kept = values[...].reshape(pages * page_size, width).astype(jnp.float32)
    kept = jnp.where((slot >= first) & (slot < end), kept, 0)
    values[...] = kept.astype(values.dtype).reshape(values.shape)
