"""Paged attention in plain XLA: blockwise, online softmax, dynamic trip counts. Runs on every backend.

Decode rows (one token each) run as one batch that walks all page tables together. Prefill chunks run as a sequence of
query blocks, each walking its own row's pages. Only blocks that hold visible keys are read, so one compiled shape
serves every context length. A key slot that is not visible is selected away, not multiplied by zero: whatever a freed
page still holds, NaN included, cannot reach the result.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

QUERY_BLOCK = 64     # tokens of a prefill query block
KEY_BLOCK = 128      # tokens of a key block, rounded to whole pages
# Tokens of a decode key block over all rows: more leave the CPU's caches between the gather and the products
# (32 rows on 1,100 tokens: 10 ms a layer in blocks of 32, 18 ms in blocks of 128).
DECODE_TOKENS = 1024
_NEVER = -1e30       # score of a key that may not be seen; finite, so that exp(score - max) is never NaN


def paged_attention_xla(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, cu_q_lens: Array,
                        num_decode: Array, *, sm_scale: float, sliding_window: int | None = None,
                        soft_cap: float | None = None, has_chunks: bool = True) -> Array:
    """Causal attention of ragged rows over their pages. Arguments as `attention.paged_attention`."""
    num_tokens, num_rows = q.shape[0], page_table.shape[0]
    settings = dict(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap)
    is_decode = jnp.arange(num_rows) < num_decode
    decoded = _decode(q[:num_rows], k_pages, v_pages, page_table, jnp.where(is_decode, kv_lens, 0), **settings)
    if not has_chunks:
        return decoded
    out = _extend(q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, num_decode, **settings)
    padded = jnp.pad(decoded, ((0, num_tokens - num_rows), (0, 0), (0, 0)))
    return jnp.where((jnp.arange(num_tokens) < num_decode)[:, None, None], padded, out)


def _decode(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, *, sm_scale: float,
            sliding_window: int | None, soft_cap: float | None) -> Array:
    """One query per row, all rows together: q [S, Hq, D] -> [S, Hq, D].

    The query is laid out block-diagonally over the kv heads, so that the scores of a row are one matrix product with
    its keys [block, Hkv * D] as they lie in the pages.
    """
    rows, heads, head_dim = q.shape
    page_size, width = k_pages.shape[1:]
    kv_heads = width // head_dim
    pages_per_block = _pages_per_block(min(KEY_BLOCK, DECODE_TOKENS // rows), page_size)
    table = _pad_table(page_table, pages_per_block)
    block = pages_per_block * page_size
    own_head = jnp.eye(kv_heads, dtype=q.dtype)[jnp.arange(heads) * kv_heads // heads]     # [Hq, Hkv]
    wide_q = (q[:, :, None, :] * own_head[None, :, :, None]).reshape(rows, heads, width)
    first_visible = jnp.zeros_like(kv_lens) if sliding_window is None else jnp.maximum(kv_lens - sliding_window, 0)
    first_block = 0 if sliding_window is None else jnp.min(jnp.where(kv_lens > 0, first_visible, 2**30)) // block
    num_blocks = (jnp.max(kv_lens) + block - 1) // block

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        ids = lax.dynamic_slice(table, (0, i * pages_per_block), (rows, pages_per_block))
        keys = k_pages[ids].reshape(rows, block, width)
        values = v_pages[ids].reshape(rows, block, width)
        position = i * block + jnp.arange(block)
        visible = (position < kv_lens[:, None]) & (position >= first_visible[:, None])     # [S, block]
        scores = jnp.einsum("shw,skw->shk", wide_q, keys, **_exact(keys))
        weights, top, total, scale = _online(_cap(scores * sm_scale, soft_cap), visible[:, None, :], top, total)
        values = jnp.where(visible[:, :, None], values, 0)
        acc = acc * scale[..., None] + jnp.einsum("shk,skw->shw", weights.astype(values.dtype), values,
                                                  **_exact(values))
        return top, total, acc

    start = (jnp.full((rows, heads), _NEVER, jnp.float32), jnp.zeros((rows, heads), jnp.float32),
             jnp.zeros((rows, heads, width), jnp.float32))
    _, total, acc = lax.fori_loop(first_block, num_blocks, step, start)
    acc = jnp.einsum("shgd,hg->shd", acc.reshape(rows, heads, kv_heads, head_dim), own_head.astype(jnp.float32),
                     precision=lax.Precision.HIGHEST)
    return acc / jnp.where(total == 0, 1, total)[..., None]


def _extend(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, cu_q_lens: Array,
            num_decode: Array, *, sm_scale: float, sliding_window: int | None, soft_cap: float | None) -> Array:
    """Rows from `num_decode` on, in query blocks of one row each: q [T, Hq, D] -> [T, Hq, D].

    Blocks are written in ascending order, so that the overhang of a row's last block is overwritten by the row that
    follows; what hangs over the last row is padding.
    """
    num_tokens, heads, head_dim = q.shape
    page_size, width = k_pages.shape[1:]
    kv_heads, group = width // head_dim, heads * head_dim // width
    pages_per_block = _pages_per_block(KEY_BLOCK, page_size)
    table = _pad_table(page_table, pages_per_block)
    block = pages_per_block * page_size
    query_block = min(QUERY_BLOCK, num_tokens)
    q_lens = jnp.diff(cu_q_lens)
    row_blocks = jnp.where(jnp.arange(q_lens.shape[0]) >= num_decode, -(-q_lens // query_block), 0)
    block_end = jnp.cumsum(row_blocks)
    q = jnp.pad(q, ((0, query_block), (0, 0), (0, 0)))

    def query_step(i: Array, out: Array) -> Array:
        row = jnp.searchsorted(block_end, i, side="right")
        offset = (i - block_end[row] + row_blocks[row]) * query_block
        start, kv_len = cu_q_lens[row] + offset, kv_lens[row]
        queries = lax.dynamic_slice(q, (start, 0, 0), (query_block, heads, head_dim))
        queries = queries.reshape(query_block, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, group * query_block, head_dim)
        q_position = kv_len - q_lens[row] + offset + jnp.arange(query_block)
        last = jnp.minimum(q_position[-1] + 1, kv_len)
        oldest = 0 if sliding_window is None else jnp.maximum(q_position[0] + 1 - sliding_window, 0)

        def key_step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, acc = carry
            ids = lax.dynamic_slice(table, (row, j * pages_per_block), (1, pages_per_block))[0]
            keys = k_pages[ids].reshape(block, kv_heads, head_dim)
            values = v_pages[ids].reshape(block, kv_heads, head_dim)
            position = j * block + jnp.arange(block)
            visible = (position <= q_position[:, None]) & (position < kv_len)              # [query_block, block]
            if sliding_window is not None:
                visible &= position > q_position[:, None] - sliding_window
            scores = jnp.einsum("hqd,khd->hqk", queries, keys, **_exact(keys))
            weights, top, total, scale = _online(_cap(scores * sm_scale, soft_cap),
                                                 jnp.tile(visible, (group, 1))[None], top, total)
            values = jnp.where(((position >= oldest) & (position < kv_len))[:, None, None], values, 0)
            acc = acc * scale[..., None] + jnp.einsum("hqk,khd->hqd", weights.astype(values.dtype), values,
                                                      **_exact(values))
            return top, total, acc

        shape = (kv_heads, group * query_block)
        state = (jnp.full(shape, _NEVER, jnp.float32), jnp.zeros(shape, jnp.float32),
                 jnp.zeros((*shape, head_dim), jnp.float32))
        _, total, acc = lax.fori_loop(oldest // block, (last + block - 1) // block, key_step, state)
        acc = acc / jnp.where(total == 0, 1, total)[..., None]
        acc = acc.reshape(kv_heads, group, query_block, head_dim).transpose(2, 0, 1, 3)
        return lax.dynamic_update_slice(out, acc.reshape(query_block, heads, head_dim), (start, 0, 0))

    out = jnp.zeros((num_tokens + query_block, heads, head_dim), jnp.float32)
    return lax.fori_loop(0, block_end[-1], query_step, out)[:num_tokens]


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
