"""The kernel of all paged attention on Hopper: tiles of queries that walk the pages of rows, in Mosaic GPU.

Grid: (heads, tiles, splits), one block of threads each: warpgroups that compute on 64 rows of queries each, all on the
same keys, and one that loads where there are several.

    loads      k[0] v[0] | k[1] v[1] | ...     TMA, into a ring of `num_stages` steps
    computes   q k' -> softmax -> p v          wgmma, step after step

q rests in shared memory, scores, weights and sums in registers, and the ring's memory serves the result at the end.
The online softmax is that of Milakov and Gimelshein (2018), the division of labour that of FlashAttention-3 (Shah et
al. 2024).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_ring import WGMMA_ROWS, Items, Layout, Ring, Span, read_span, scratch, slot_of

_NEVER = -1e30       # score of a key that may not be seen; finite, so that exp2(score - top) is never NaN
_LOG2E, _LN2 = math.log2(math.e), math.log(2)
# Registers of a thread that computes and of one that loads, by warpgroups that compute: 65,536 are shared out.
_REGISTERS = {2: (232, 40), 3: (160, 32)}


@dataclass(frozen=True)
class Scoring:
    """How scores are made. `sliding_window` and causality apply to ragged walks; others have them in their items."""
    sm_scale: float
    soft_cap: float | None = None
    sliding_window: int | None = None
    is_ragged: bool = False


def walk(q: Array, k_pages: Array, v_pages: Array, page_table: Array, items: Items, item_starts: Array, layout: Layout,
         scoring: Scoring, *, interpret: Any) -> tuple[Array, Array]:
    """Attention of tiles of queries over the keys of their items.

    Args:
      q: [rows, heads, D], rows in whole blocks of `tiles * tile_rows`.
      k_pages, v_pages: [N, page_size, Hkv * D] of q's type.
      page_table: int32[S, M].
      items: sorted by block of rows.
      item_starts: int32[blocks + 1] first item of each block.
      interpret: False, or `InterpretGPUParams`.

    Returns:
      float32[num_splits, rows, heads, D] normalised, and float32[num_splits, heads, rows] log-sum-exp of the scores; 0
      and -inf for queries that see nothing.
    """
    num_rows, num_heads, head_dim = q.shape
    slots = k_pages.shape[0] * layout.page_size, k_pages.shape[2] // head_dim, head_dim
    out_type = [jax.ShapeDtypeStruct((layout.num_splits, num_rows, num_heads, head_dim), jnp.float32),
                jax.ShapeDtypeStruct((layout.num_splits, num_heads, num_rows), jnp.float32)]

    def paged_attention(*refs: Any, **scratch_refs: Any) -> None:
        _block(layout, scoring, *refs, **scratch_refs)

    return plgpu.kernel(
        paged_attention, out_type=out_type, scratch_types=scratch(layout, needs_weights=bool(interpret)),
        grid=(num_heads // layout.heads, num_rows // (layout.tile_rows * layout.tiles), layout.num_splits),
        grid_names=("head", "tile", "split"), num_threads=layout.num_warpgroups + layout.has_loader,
        thread_name="warpgroup", interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0,
                                             lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(q, k_pages.reshape(slots), v_pages.reshape(slots), page_table, jnp.stack(items, axis=1), item_starts)


def _block(layout: Layout, scoring: Scoring, q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, items_ref: Any,
           starts_ref: Any, out_ref: Any, lse_ref: Any, *, q_smem: Any, ring_or_result: Any, q_ready: Any,
           k_ready: Any, v_ready: Any, is_free: Any, meeting: Any, p_smem: Any = None) -> None:
    """One block of threads."""
    (k_smem, v_smem), (out_smem, lse_smem) = ring_or_result
    ring = Ring(k_ref, v_ref, table_ref, k_smem, v_smem, k_ready, v_ready, is_free)
    head, tile, split = (lax.axis_index(name) for name in ("head", "tile", "split"))
    warpgroup = lax.axis_index("warpgroup")
    kv_head = head * layout.heads // layout.heads_per_kv
    first_row = pl.multiple_of((tile * layout.tiles + warpgroup % layout.tiles) * layout.tile_rows, layout.tile_rows)

    def over_spans(visit: Callable[[Span, Any], Any], state: Any) -> Any:
        return lax.fori_loop(starts_ref[tile], starts_ref[tile + 1],
                             lambda i, state: visit(read_span(items_ref, i, split, layout), state), state)

    def meet() -> None:
        """Warpgroups that compute wait for one another."""
        if layout.num_warpgroups > 1:
            plgpu.barrier_arrive(meeting)
            plgpu.barrier_wait(meeting)

    def load(span: Span, stop: Array, count: Array) -> Array:
        """Starts the copies of the steps of `span` up to `stop`."""
        def step(j: Array, count: Array) -> Array:
            ring.load(ring.locate(span, j, layout), kv_head, count, layout)
            return count + 1

        return lax.fori_loop(span.begin, stop, step, count)

    def attend(span: Span, j: Array, state: Any, is_masked: bool) -> Any:
        count, acc, top, total = state
        slot = slot_of(count, layout)
        first_key = span.start + j * layout.kv_tokens
        ahead = None if layout.has_loader else ring.locate(span, j + layout.num_stages, layout)
        plgpu.barrier_wait(k_ready.at[slot])
        scores = _to_log2(_product(q_smem.at[warpgroup], k_smem.at[slot].transpose((1, 0))), scoring)
        if is_masked:
            scores = jnp.where(_visible(span.item, first_key, first_row, layout, scoring), scores, _NEVER)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - _columns(new_top, layout.kv_tokens))
        scale = jnp.exp2(top - new_top)
        total = total * scale + weights.sum(axis=1)
        acc = acc * _columns(scale, layout.head_dim)
        plgpu.barrier_wait(v_ready.at[slot])
        if is_masked:
            pl.when(warpgroup == 0)(lambda: _zero_unseen(v_smem.at[slot], span.item, first_key, layout))
            meet()
        acc = _accumulate(acc, weights.astype(layout.dtype), v_smem.at[slot], p_smem and p_smem.at[warpgroup])
        plgpu.barrier_arrive(is_free.at[slot])
        if ahead is not None:
            @pl.when(j + layout.num_stages < span.stop)
            def _() -> None:
                ring.load(ahead, kv_head, count + layout.num_stages, layout)
        return count + 1, acc, new_top, total

    def visit(span: Span, state: Any) -> Any:
        if not layout.has_loader:
            load(span, jnp.minimum(span.begin + layout.num_stages, span.stop), state[0])
        for begin, stop, is_masked in ((span.begin, span.clear, True), (span.clear, span.blur, False),
                                       (span.blur, span.stop, True)):
            state = lax.fori_loop(begin, stop, lambda j, s, m=is_masked: attend(span, j, s, m), state)
        return state

    def compute_all() -> None:
        own_head = head * layout.heads + warpgroup // layout.tiles
        rows, own = pl.ds(first_row, layout.tile_rows), pl.ds(0, layout.tile_rows)
        plgpu.copy_gmem_to_smem(q_ref.at[rows, own_head], q_smem.at[warpgroup, own], q_ready.at[warpgroup])
        plgpu.barrier_wait(q_ready.at[warpgroup])
        start = (jnp.int32(0), _full((WGMMA_ROWS, layout.head_dim), 0), _full((WGMMA_ROWS,), _NEVER),
                 _full((WGMMA_ROWS,), 0))
        _, acc, top, total = over_spans(visit, start)
        meet()                               # the result takes the place of keys that others may still be reading
        is_seen = top > _NEVER / 2
        total = jnp.where(is_seen, total, 1)
        out_smem[warpgroup] = acc * _columns(jnp.where(is_seen, 1 / total, 0), layout.head_dim)
        lse_smem[warpgroup] = jnp.where(is_seen, top * _LN2 + jnp.log(total), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, own], out_ref.at[split, rows, own_head])
        plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup, own], lse_ref.at[split, own_head, rows])
        plgpu.wait_smem_to_gmem(0)

    if not layout.has_loader:
        compute_all()
        return
    registers = _REGISTERS[layout.num_warpgroups]

    @pl.when(warpgroup == layout.num_warpgroups)
    def _() -> None:
        plgpu.set_max_registers(registers[1], action="decrease")
        over_spans(lambda span, count: load(span, span.stop, count), jnp.int32(0))

    @pl.when(warpgroup < layout.num_warpgroups)
    def _() -> None:
        plgpu.set_max_registers(registers[0], action="increase")
        compute_all()


def _product(queries: Any, keys: Any) -> Array:
    """float32[64, kv_tokens] from shared memory."""
    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, queries, keys)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((queries.shape[0], keys.shape[1]), jnp.float32))


def _accumulate(acc: Array, weights: Array, values: Any, p_smem: Any | None) -> Array:
    """acc + weights @ values, weights from registers. The interpreter knows that product from shared memory only."""
    if p_smem is None:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(acc))
    p_smem[...] = weights
    plgpu.commit_smem()
    return acc + _product(p_smem, values)


def _to_log2(scores: Array, scoring: Scoring) -> Array:
    """Scaled and capped scores times log2(e). tanh by way of exp2: the hardware's tanh has 11 bits."""
    if scoring.soft_cap is None:
        return scores * (scoring.sm_scale * _LOG2E)
    power = jnp.exp2(scores * (2 * _LOG2E * scoring.sm_scale / scoring.soft_cap))
    return scoring.soft_cap * _LOG2E * (1 - 2 / (1 + power))


def _visible(item: Items, first_key: Array, first_row: Array, layout: Layout, scoring: Scoring) -> Array:
    """bool[64, kv_tokens]. Bounds are made per row, so that a score costs one comparison with a constant for each."""
    shape = (WGMMA_ROWS, layout.kv_tokens)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    if not scoring.is_ragged:
        return (column >= item.first - first_key) & (column < item.end - first_key)
    token = first_row + plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1))
    end = token + (item.position + 1 - first_key)
    is_own = (token >= item.first_token) & (token < item.end_token)
    visible = column < _columns(jnp.where(is_own, end, 0), layout.kv_tokens)
    if scoring.sliding_window is None:
        return visible
    return visible & (column >= _columns(end - scoring.sliding_window, layout.kv_tokens))


def _zero_unseen(values: Any, item: Items, first_key: Array, layout: Layout) -> None:
    """Zeroes the values in shared memory that no query may see: a weight of 0 times NaN is NaN.

    In parts of one swizzled tile's columns: registers are full of weights and sums.
    """
    columns = layout.swizzle // layout.dtype.itemsize
    for first in range(0, layout.kv_tokens, WGMMA_ROWS):
        row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS, columns), 0, layout=plgpu.Layout.WGMMA)
        is_seen = (row >= item.first - (first_key + first)) & (row < item.end - (first_key + first))
        for column in range(0, layout.head_dim, columns):
            part = values.at[pl.ds(first, WGMMA_ROWS), pl.ds(column, columns)]
            part[...] = jnp.where(is_seen, part[...], jnp.zeros((), layout.dtype))
    plgpu.commit_smem()


def _columns(rows: Array, num_columns: int) -> Array:
    return lax.broadcast_in_dim(rows, (rows.shape[0], num_columns), (0,))


def _full(shape: tuple[int, ...], value: float) -> Array:
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
