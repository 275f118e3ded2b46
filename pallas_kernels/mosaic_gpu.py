"""Paged attention for Hopper GPUs (Mosaic GPU, sm_90a): decode, ragged extend and attention to a prefix rows share.

| | served | refused with `UnsupportedKernel` |
|---|---|---|
| q and pages | bfloat16 or float16, one type; `page_size` a multiple of 8 | float32, mixed types, other page sizes |
| heads | up to 64 query heads per kv head | query heads that are no multiple of the kv heads |
| head_dim | multiples of 32 up to 256 | others |
| memory | blocks within 227 KiB of shared memory | others, with the numbers |

Scores, softmax and sums are float32, weights are rounded to the type of the pages before they meet the values. Slots of
a page that no query sees may hold anything, NaN included. `write_kv` writes the pages in place. The assembler has to be
that of CUDA 12.9.1 or later: from 12.8 to 12.9.0 it miscompiles masks (jax's own attention kernel refuses those).
"""
from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.blocks import DecodeBlocks, ExtendBlocks, SharedBlocks
from pallas_kernels.merge import merge
from pallas_kernels.mosaic_gpu_budget import check, choose, given_or_tuned, interpreter, max_warpgroups, refuse, splits
from pallas_kernels.mosaic_gpu_ring import WGMMA_ROWS, Items
from pallas_kernels.mosaic_gpu_walk import Scoring, walk
from pallas_kernels.mosaic_gpu_write import write_kv

__all__ = ["decode", "extend", "shared_prefix", "write_kv"]


def decode(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, kv_starts: Array | None = None,
           *, sm_scale: float, sliding_window: int | None = None, soft_cap: float | None = None,
           blocks: DecodeBlocks | None = None, interpret: Any = False) -> tuple[Array, Array]:
    """Attention of one query per row, at position kv_lens[s] - 1, over keys from kv_starts[s] on.

    A block of threads serves the heads of one kv head of one row, over one part of its context (FlashDecoding, Dao et
    al. 2023): it reads its keys once, and the parts are merged by log-sum-exp.

    Args:
      q: [S, Hq, D] queries, bfloat16 or float16.
      k_pages, v_pages: [N, page_size, Hkv * D] of the same type.
      page_table: int32[S, M] pages of each row.
      kv_lens: int32[S] tokens of each context; 0 for a padding row.
      kv_starts: int32[S] first key of each row, whole pages; None: 0.
      sm_scale: factor on the scores.
      sliding_window: a query sees this many tokens, its own included; None: all.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap), after sm_scale; None: as they are.
      blocks: sizes of the pipeline; kv_tokens is a multiple of 64 whatever the page size; None: the measured ones of
        this device, or a rule.
      interpret: run on the CPU (jax >= 0.11, in an abstract mesh of a GPU): True, or `InterpretGPUParams`.

    Returns:
      float32[S, Hq, D] normalised, and float32[S, Hq] log-sum-exp of the scores; 0 and -inf for a row without keys.

    Raises:
      UnsupportedKernel: shapes, types or blocks that this kernel does not serve.
    """
    check("decode", q, k_pages, v_pages, sliding_window)
    num_rows, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k_pages.shape[1], k_pages.shape[2] // head_dim
    group = num_heads // num_kv_heads
    if group > WGMMA_ROWS:
        refuse("decode", f"{group} query heads per kv head", f"at most {WGMMA_ROWS}")
    blocks = given_or_tuned("decode", DecodeBlocks, blocks, head_dim, page_size)
    num_splits = (splits(num_rows * num_kv_heads, page_table.shape[1] * page_size) if blocks is None
                  else blocks.num_splits)
    layout = choose("decode", blocks, (128, 64) if head_dim <= 64 else (64,), num_splits=num_splits, tiles=1, heads=1,
                    tile_rows=_up(group, 8), heads_per_kv=1, head_dim=head_dim, page_size=page_size,
                    dtype=np.dtype(q.dtype))
    kv_lens = kv_lens.astype(jnp.int32)
    first = jnp.zeros_like(kv_lens) if kv_starts is None else kv_starts.astype(jnp.int32)
    if sliding_window is not None:
        first = jnp.maximum(first, kv_lens - sliding_window)
    rows, unread = jnp.arange(num_rows + 1, dtype=jnp.int32), jnp.zeros_like(kv_lens)
    items = Items(rows[:-1], first, kv_lens, first, kv_lens, unread, unread, unread)
    tiles = _to_rows(q.reshape(num_rows, num_kv_heads, group, head_dim), layout.tile_rows)
    out, lse = walk(tiles, k_pages, v_pages, page_table.astype(jnp.int32), items, rows, layout,
                    Scoring(sm_scale, soft_cap), interpret=interpreter("decode", interpret))
    out, lse = _from_rows(*merge(tuple(out), tuple(lse.swapaxes(1, 2))), num_rows, group)
    return out.reshape(num_rows, num_heads, head_dim), lse.reshape(num_rows, num_heads)


def extend(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, cu_q_lens: Array, *,
           sm_scale: float, sliding_window: int | None = None, soft_cap: float | None = None,
           blocks: ExtendBlocks | None = None, interpret: Any = False) -> tuple[Array, Array]:
    """Causal attention of the last tokens of ragged rows over their whole contexts.

    A block of threads serves `q_tokens` flat tokens, whatever rows they belong to, of heads that share a kv head; each
    row that has tokens among them is one walk of the row's keys.

    Args:
      q: [T, Hq, D] queries, rows one after the other; tokens past cu_q_lens[-1] are padding.
      page_table: int32[S, M] pages of each row.
      kv_lens: int32[S] tokens of each context, those of q included.
      cu_q_lens: int32[S + 1] first token of each row.
      blocks: q_tokens is a multiple of 64, up to 192, or 128 where head_dim > 128.
      (others): as in `decode`.

    Returns:
      float32[T, Hq, D] normalised, and float32[T, Hq] log-sum-exp of the scores; 0 and -inf for padding tokens.

    Raises:
      UnsupportedKernel: shapes, types or blocks that this kernel does not serve.
    """
    check("extend", q, k_pages, v_pages, sliding_window)
    num_tokens, num_heads, head_dim = q.shape
    page_size, group = k_pages.shape[1], num_heads * head_dim // k_pages.shape[2]
    blocks = given_or_tuned("extend", ExtendBlocks, blocks, head_dim, page_size)
    most = max_warpgroups(head_dim)
    q_tokens = (WGMMA_ROWS if any(group % n == 0 for n in range(2, most + 1)) else 2 * WGMMA_ROWS) if blocks is None \
        else blocks.q_tokens
    tiles = q_tokens // WGMMA_ROWS
    if q_tokens % WGMMA_ROWS or not 1 <= tiles <= most:
        refuse("extend", f"q_tokens={q_tokens}", f"a multiple of {WGMMA_ROWS} up to {most * WGMMA_ROWS}")
    heads = max(n for n in range(1, most // tiles + 1) if group % n == 0)
    layout = choose("extend", blocks, (128, 64) if head_dim <= 128 and tiles * heads < 3 else (64,), tiles=tiles,
                    heads=heads, tile_rows=WGMMA_ROWS, heads_per_kv=group, head_dim=head_dim, page_size=page_size,
                    dtype=np.dtype(q.dtype))
    num_blocks = -(-num_tokens // q_tokens)
    items, starts = _extend_items(kv_lens.astype(jnp.int32), cu_q_lens.astype(jnp.int32), num_blocks, q_tokens,
                                  sliding_window)
    padded = jnp.pad(q, ((0, num_blocks * q_tokens - num_tokens), (0, 0), (0, 0)))
    out, lse = walk(padded, k_pages, v_pages, page_table.astype(jnp.int32), items, starts, layout,
                    Scoring(sm_scale, soft_cap, sliding_window, is_ragged=True),
                    interpret=interpreter("extend", interpret))
    return out[0, :num_tokens], lse[0].T[:num_tokens]


def shared_prefix(q: Array, k_pages: Array, v_pages: Array, prefix_pages: Array, prefix_lens: Array, members: Array, *,
                  sm_scale: float, soft_cap: float | None = None, blocks: SharedBlocks | None = None,
                  interpret: Any = False) -> tuple[Array, Array]:
    """Attention of groups of decode rows to the prefix that each group shares, whose keys are read once for all.

    The queries of a group on one kv head are the rows of one product: 64 of a warpgroup, and up to three warpgroups on
    the same keys. Groups beyond that are several blocks of threads, which run side by side and meet the keys in the
    second-level cache.

    Args:
      q: [S, Hq, D] queries.
      prefix_pages: int32[P, M] pages of each group's prefix.
      prefix_lens: int32[P] tokens of each prefix, whole pages; 0 for a padding group.
      members: int32[P, R] rows of each group, padded with S.
      (others): as in `decode`.

    Returns:
      float32[P, R, Hq, D] normalised, and float32[P, R, Hq] log-sum-exp of the scores; 0 and -inf where there is no
      row. To be merged with `decode` from `kv_starts` on by `merge`.

    Raises:
      UnsupportedKernel: shapes, types or blocks that this kernel does not serve.
    """
    check("shared_prefix", q, k_pages, v_pages)
    num_rows, num_heads, head_dim = q.shape
    num_groups, num_members = members.shape
    page_size, num_kv_heads = k_pages.shape[1], k_pages.shape[2] // head_dim
    group = num_heads // num_kv_heads
    num_tiles = -(-num_members * group // WGMMA_ROWS)
    parts = -(-num_tiles // max_warpgroups(head_dim))
    tiles = -(-num_tiles // parts)
    tile_rows = WGMMA_ROWS if num_tiles > 1 else _up(num_members * group, 8)
    blocks = given_or_tuned("shared_prefix", SharedBlocks, blocks, head_dim, page_size)
    num_splits = (splits(num_groups * parts * num_kv_heads, prefix_pages.shape[1] * page_size) if blocks is None
                  else blocks.num_splits)
    layout = choose("shared_prefix", blocks, (128, 64) if head_dim <= 128 and tiles < 3 else (64,),
                    num_splits=num_splits, tiles=tiles, heads=1, tile_rows=tile_rows, heads_per_kv=1,
                    head_dim=head_dim, page_size=page_size, dtype=np.dtype(q.dtype))
    members = members.astype(jnp.int32)
    is_row = members < num_rows
    end = jnp.where(is_row.any(axis=1), prefix_lens.astype(jnp.int32), 0)
    block = jnp.arange(num_groups * parts + 1, dtype=jnp.int32)
    end, unread = end[block[:-1] // parts], jnp.zeros_like(block[:-1])
    items = Items(block[:-1] // parts, unread, end, unread, end, unread, unread, unread)
    queries = q[jnp.minimum(members, num_rows - 1)].reshape(num_groups, num_members, num_kv_heads, group, head_dim)
    queries = queries.swapaxes(1, 2).reshape(num_groups, num_kv_heads, num_members * group, head_dim)
    out, lse = walk(_to_rows(queries, parts * tiles * tile_rows), k_pages, v_pages, prefix_pages.astype(jnp.int32),
                    items, block, layout, Scoring(sm_scale, soft_cap),
                    interpret=interpreter("shared_prefix", interpret))
    out, lse = _from_rows(*merge(tuple(out), tuple(lse.swapaxes(1, 2))), num_groups, num_members * group)
    out = out.reshape(num_groups, num_kv_heads, num_members, group, head_dim).swapaxes(1, 2)
    lse = lse.reshape(num_groups, num_kv_heads, num_members, group).swapaxes(1, 2)
    out = jnp.where(is_row[..., None, None], out.reshape(*members.shape, num_heads, head_dim), 0)
    return out, jnp.where(is_row[..., None], lse.reshape(*members.shape, num_heads), -jnp.inf)


def _extend_items(kv_lens: Array, cu_q_lens: Array, num_blocks: int, q_tokens: int,
                  sliding_window: int | None) -> tuple[Items, Array]:
    """An item for each row in each block of tokens that it reaches, and the first item of each block.

    Rows lie one after the other, so items in the order of rows are in that of blocks, at most blocks + rows of them.
    """
    starts, ends = cu_q_lens[:-1], cu_q_lens[1:]
    first_block = starts // q_tokens
    counts = jnp.where(ends > starts, (ends - 1) // q_tokens + 1 - first_block, 0)
    stops = jnp.cumsum(counts)
    i = jnp.arange(num_blocks + kv_lens.shape[0], dtype=jnp.int32)
    row = jnp.minimum((stops <= i[:, None]).sum(axis=1), kv_lens.shape[0] - 1)
    block = first_block[row] + i - (stops - counts)[row]
    first_token, end_token = starts[row], ends[row]
    position = kv_lens[row] - end_token
    oldest = position + jnp.maximum(first_token, block * q_tokens)
    newest = position + jnp.minimum(end_token, (block + 1) * q_tokens) - 1
    first = jnp.zeros_like(i) if sliding_window is None else jnp.maximum(oldest + 1 - sliding_window, 0)
    full_first = jnp.zeros_like(i) if sliding_window is None else jnp.maximum(newest + 1 - sliding_window, 0)
    is_covered = (first_token <= block * q_tokens) & ((block + 1) * q_tokens <= end_token)
    full_end = jnp.where(is_covered, oldest + 1, 0)
    items = Items(row, first, newest + 1, full_first, full_end, position, first_token, end_token)
    edges = jnp.arange(num_blocks + 1)[:, None]
    item_starts = jnp.clip(edges - first_block, 0, counts).sum(axis=1)
    return Items(*(field.astype(jnp.int32) for field in items)), item_starts.astype(jnp.int32)


def _to_rows(q: Array, num_rows: int) -> Array:
    """[blocks, Hkv, rows, D] to [blocks * num_rows, Hkv, D], each block's rows padded to `num_rows`."""
    blocks, num_kv_heads, rows, head_dim = q.shape
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, num_rows - rows), (0, 0)))
    return padded.swapaxes(1, 2).reshape(blocks * num_rows, num_kv_heads, head_dim)


def _from_rows(out: Array, lse: Array, num_blocks: int, rows: int) -> tuple[Array, Array]:
    """The inverse of `_to_rows` on [blocks * num_rows, Hkv, D] and [blocks * num_rows, Hkv]."""
    out, lse = (array.reshape(num_blocks, -1, *array.shape[1:])[:, :rows].swapaxes(1, 2) for array in (out, lse))
    return out, lse


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
