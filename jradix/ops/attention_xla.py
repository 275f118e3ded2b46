"""Paged attention in plain XLA: blockwise, online softmax, dynamic trip counts. Runs on every backend.

Decode rows (one token each) run as one batch that walks all page tables together. Prefill chunks run as a sequence of
query blocks, each walking its own row's pages, and so do the members of a group on their shared prefix. Only blocks
that hold visible keys are read, so one compiled shape serves every context length. A key slot that is not visible is
selected away, not multiplied by zero: whatever a freed page still holds, NaN included, cannot reach the result.

Each function returns `out` float32, normalised, and `lse` float32, the natural logarithm of the sum of exp(score): 0
and -inf for a query that sees no key.
"""
from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

QUERY_BLOCK = 64     # tokens of a prefill query block
KEY_BLOCK = 128      # tokens of a key block, rounded to whole pages
# Tokens of a decode key block over all rows: more leave the CPU's caches between the gather and the products
# (32 rows on 1,100 tokens: 10 ms a layer in blocks of 32, 18 ms in blocks of 128).
DECODE_TOKENS = 1024
_NEVER = -1e30       # score of a key that may not be seen; finite, so that exp(score - max) is never NaN


def decode(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, kv_starts: Array | None = None,
           *, sm_scale: float, sliding_window: int | None = None, soft_cap: float | None = None
           ) -> tuple[Array, Array]:
    """One query per row, at position kv_len - 1, on the keys from its `kv_starts` on.

    The query is laid out block-diagonally over the kv heads, so that the scores of a row are one matrix product with
    its keys [block, Hkv * D] as they lie in the pages.

    Args:
      q: float32[S, Hq, D].
      k_pages, v_pages: [N, page_size, Hkv * D].
      page_table: int32[S, M].
      kv_lens: int32[S], 0 for padding rows.
      kv_starts: int32[S], multiples of page_size; None: 0.

    Returns:
      out float32[S, Hq, D], lse float32[S, Hq].
    """
    rows, heads, head_dim = q.shape
    page_size, width = k_pages.shape[1:]
    kv_heads = width // head_dim
    pages_per_block = _pages_per_block(min(KEY_BLOCK, DECODE_TOKENS // rows), page_size)
    block = pages_per_block * page_size
    own_head = jnp.eye(kv_heads, dtype=q.dtype)[jnp.arange(heads) * kv_heads // heads]     # [Hq, Hkv]
    wide_q = (q[:, :, None, :] * own_head[None, :, :, None]).reshape(rows, heads, width)
    oldest = jnp.zeros_like(kv_lens) if kv_starts is None else kv_starts
    if sliding_window is not None:
        oldest = jnp.maximum(oldest, kv_lens - sliding_window)
    first_page = jnp.minimum(oldest, kv_lens) // page_size                                 # of each row's own walk
    num_blocks = (jnp.max(kv_lens - first_page * page_size) + block - 1) // block

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        columns = first_page[:, None] + i * pages_per_block + jnp.arange(pages_per_block)
        ids = jnp.take_along_axis(page_table, columns, axis=1, mode="clip")      # clipped: not visible
        keys = k_pages[ids].reshape(rows, block, width)
        values = v_pages[ids].reshape(rows, block, width)
        position = (first_page * page_size + i * block)[:, None] + jnp.arange(block)
        visible = (position < kv_lens[:, None]) & (position >= oldest[:, None])            # [S, block]
        scores = jnp.einsum("shw,skw->shk", wide_q, keys, **_exact(keys))
        weights, top, total, scale = _online(_cap(scores * sm_scale, soft_cap), visible[:, None, :], top, total)
        values = jnp.where(visible[:, :, None], values, 0)
        acc = acc * scale[..., None] + jnp.einsum("shk,skw->shw", weights.astype(values.dtype), values,
                                                  **_exact(values))
        return top, total, acc

    top, total, acc = lax.fori_loop(0, num_blocks, step, _nothing((rows, heads), width))
    acc = jnp.einsum("shgd,hg->shd", acc.reshape(rows, heads, kv_heads, head_dim), own_head.astype(jnp.float32),
                     precision=lax.Precision.HIGHEST)
    return _normalised(top, total, acc)


def extend(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, cu_q_lens: Array, *,
           sm_scale: float, sliding_window: int | None = None, soft_cap: float | None = None) -> tuple[Array, Array]:
    """Causal attention of ragged rows, in query blocks of one row each.

    Blocks are written in ascending order, so that the overhang of a row's last block is overwritten by the row that
    follows; what hangs over the last row is padding.

    Args:
      q: float32[T, Hq, D], rows one after the other; the new tokens are the last ones of each row's context.
      k_pages, v_pages, page_table, kv_lens: as for `decode`.
      cu_q_lens: int32[S + 1] first token of each row; rows may be empty.

    Returns:
      out float32[T, Hq, D], lse float32[T, Hq]; tokens of no row hold finite garbage.
    """
    num_tokens, heads, head_dim = q.shape
    page_size, width = k_pages.shape[1:]
    kv_heads, group = width // head_dim, heads * head_dim // width
    query_block = min(QUERY_BLOCK, num_tokens)
    q_lens = jnp.diff(cu_q_lens)
    row_blocks = -(-q_lens // query_block)
    block_end = jnp.cumsum(row_blocks)
    table = _pad_table(page_table, _pages_per_block(KEY_BLOCK, page_size))
    q = jnp.pad(q, ((0, query_block), (0, 0), (0, 0)))

    def query_step(i: Array, written: tuple[Array, Array]) -> tuple[Array, Array]:
        row = jnp.searchsorted(block_end, i, side="right")
        offset = (i - block_end[row] + row_blocks[row]) * query_block
        start, kv_len = cu_q_lens[row] + offset, kv_lens[row]
        queries = lax.dynamic_slice(q, (start, 0, 0), (query_block, heads, head_dim))
        q_position = kv_len - q_lens[row] + offset + jnp.arange(query_block)
        oldest = 0 if sliding_window is None else jnp.maximum(q_position[0] + 1 - sliding_window, 0)

        def visible(position: Array) -> Array:
            seen = position <= q_position[:, None]                                         # [query_block, block]
            if sliding_window is not None:
                seen &= position > q_position[:, None] - sliding_window
            return jnp.tile(seen, (group, 1))[None]

        out, lse = _walk(_by_kv_head(queries, kv_heads), k_pages, v_pages, table[row], oldest,
                         jnp.minimum(q_position[-1] + 1, kv_len), kv_len, visible, sm_scale=sm_scale,
                         soft_cap=soft_cap)
        out, lse = (_by_query(x, query_block) for x in (out, lse))
        return (lax.dynamic_update_slice(written[0], out, (start, 0, 0)),
                lax.dynamic_update_slice(written[1], lse, (start, 0)))

    empty = (jnp.zeros((num_tokens + query_block, heads, head_dim), jnp.float32),
             jnp.full((num_tokens + query_block, heads), -jnp.inf, jnp.float32))
    out, lse = lax.fori_loop(0, block_end[-1], query_step, empty)
    return out[:num_tokens], lse[:num_tokens]


def shared_prefix(q: Array, k_pages: Array, v_pages: Array, prefix_pages: Array, prefix_lens: Array, members: Array, *,
                  sm_scale: float, soft_cap: float | None = None) -> tuple[Array, Array]:
    """Attention of groups of queries on a prefix that all of a group see whole; each prefix is read once.

    Args:
      q: float32[S, Hq, D].
      k_pages, v_pages: as for `decode`.
      prefix_pages: int32[P, M] pages of each group's prefix.
      prefix_lens: int32[P] tokens, 0 for padding groups, which stand last.
      members: int32[P, R] rows of each group, padded with numbers outside [0, S).

    Returns:
      out float32[P, R, Hq, D], lse float32[P, R, Hq]; padding members hold finite garbage, padding groups 0 and -inf.
    """
    rows, heads, head_dim = q.shape
    page_size, width = k_pages.shape[1:]
    kv_heads = width // head_dim
    num_groups, size = members.shape
    table = _pad_table(prefix_pages, _pages_per_block(KEY_BLOCK, page_size))

    def group_step(i: Array, written: tuple[Array, Array]) -> tuple[Array, Array]:
        queries = q[jnp.clip(members[i], 0, rows - 1)]
        out, lse = _walk(_by_kv_head(queries, kv_heads), k_pages, v_pages, table[i], 0, prefix_lens[i], prefix_lens[i],
                         lambda position: True, sm_scale=sm_scale, soft_cap=soft_cap)
        return (lax.dynamic_update_index_in_dim(written[0], _by_query(out, size), i, 0),
                lax.dynamic_update_index_in_dim(written[1], _by_query(lse, size), i, 0))

    empty = (jnp.zeros((num_groups, size, heads, head_dim), jnp.float32),
             jnp.full((num_groups, size, heads), -jnp.inf, jnp.float32))
    return lax.fori_loop(0, jnp.sum(prefix_lens > 0), group_step, empty)


def _walk(queries: Array, k_pages: Array, v_pages: Array, pages: Array, first: Array | int, last: Array, kv_len: Array,
          visible: Callable[[Array], Array | bool], *, sm_scale: float, soft_cap: float | None) -> tuple[Array, Array]:
    """Queries [Hkv, n, D] on keys [first, last) of one row's pages, block by block.

    Args:
      pages: int32[M] of whole blocks.
      kv_len: slots from here on hold nothing of this row.
      visible: of key positions [block], what each query sees: bool[1, n, block], or True.
    """
    kv_heads, num_queries, head_dim = queries.shape
    page_size = k_pages.shape[1]
    pages_per_block = _pages_per_block(KEY_BLOCK, page_size)
    block = pages_per_block * page_size

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        ids = lax.dynamic_slice(pages, (j * pages_per_block,), (pages_per_block,))
        keys = k_pages[ids].reshape(block, kv_heads, head_dim)
        values = v_pages[ids].reshape(block, kv_heads, head_dim)
        position = j * block + jnp.arange(block)
        is_own = (position >= first) & (position < kv_len)
        scores = jnp.einsum("hqd,khd->hqk", queries, keys, **_exact(keys))
        weights, top, total, scale = _online(_cap(scores * sm_scale, soft_cap), visible(position) & is_own, top, total)
        values = jnp.where(is_own[:, None, None], values, 0)
        acc = acc * scale[..., None] + jnp.einsum("hqk,khd->hqd", weights.astype(values.dtype), values,
                                                  **_exact(values))
        return top, total, acc

    start = _nothing((kv_heads, num_queries), head_dim)
    return _normalised(*lax.fori_loop(first // block, (last + block - 1) // block, step, start))


def _by_kv_head(queries: Array, kv_heads: int) -> Array:
    """[n, Hq, D] -> [Hkv, G * n, D]."""
    num, heads, head_dim = queries.shape
    return queries.reshape(num, kv_heads, -1, head_dim).transpose(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)


def _by_query(values: Array, num: int) -> Array:
    """[Hkv, G * n, ...] -> [n, Hq, ...]."""
    kv_heads, _, *rest = values.shape
    grouped = values.reshape(kv_heads, -1, num, *rest)
    return jnp.moveaxis(grouped, 2, 0).reshape(num, -1, *rest)


def _nothing(shape: tuple[int, ...], width: int) -> tuple[Array, Array, Array]:
    """Maximum, sum and weighted sum before the first key."""
    return (jnp.full(shape, _NEVER, jnp.float32), jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, width), jnp.float32))


def _normalised(top: Array, total: Array, acc: Array) -> tuple[Array, Array]:
    safe = jnp.where(total == 0, 1, total)
    return acc / safe[..., None], jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))


def _online(scores: Array, visible: Array, top: Array, total: Array) -> tuple[Array, Array, Array, Array]:
    """One step of the online softmax (Milakov and Gimelshein 2018): weights, new maximum, new sum, rescaling factor."""
    scores = jnp.where(visible, scores, _NEVER)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0)
    scale = jnp.exp(top - new_top)
    return weights, new_top, total * scale + weights.sum(axis=-1), scale


def _cap(scores: Array, soft_cap: float | None) -> Array:
    return scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap


def _exact(operand: Array) -> dict:
    """Float32 products are exact to float32 on every backend; lower types accumulate in float32."""
    precision = lax.Precision.HIGHEST if operand.dtype == jnp.float32 else None
    return dict(precision=precision, preferred_element_type=jnp.float32)


def _pages_per_block(block: int, page_size: int) -> int:
    return max(block // page_size, 1)


def _pad_table(page_table: Array, pages_per_block: int) -> Array:
    """A page table whose width is whole blocks: a dynamic slice beyond the end would be clamped to wrong pages."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_block)))
