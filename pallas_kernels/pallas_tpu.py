"""Paged attention for TPUs (Mosaic): decode, ragged extend and attention to a prefix that rows share.

| | served | refused with `UnsupportedKernel` |
|---|---|---|
| pages | float32, bfloat16; `page_size` a multiple of 8 | other types and page sizes |
| heads | any number of query heads per kv head | query heads that are no multiple of the kv heads |
| head_dim | multiples of 16; a page is stored padded to 128 lanes, so Hkv * D wants to be a multiple of 128 | others |
| memory | tiles within the core's scoped VMEM, page tables within its SMEM | both, with the numbers |

Queries are rounded to the type of the pages; scores, softmax and sums are float32. Slots of a page that no query sees
may hold anything, NaN included. A context is computed in one part: `num_splits` is 1 here, one core runs the grid.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import Blocks, DecodeBlocks, ExtendBlocks, SharedBlocks, tuned_blocks
from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.pallas_tpu_budget import check_smem, choose, device_kind
from pallas_kernels.pallas_tpu_walk import Items, Layout, walk

_KEY_TOKENS = (256, 128, 64, 32)
_QUERY_TOKENS = (128, 64, 32, 16, 8)


def decode(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, kv_starts: Array | None = None,
           *, sm_scale: float, sliding_window: int | None = None, soft_cap: float | None = None,
           blocks: DecodeBlocks | None = None, interpret: bool | pltpu.InterpretParams = False) -> tuple[Array, Array]:
    """Attention of one query per row, at position kv_lens[s] - 1, over keys from kv_starts[s] on.

    Args:
      q: [S, Hq, D] queries.
      k_pages, v_pages: [N, page_size, Hkv * D] float32 or bfloat16.
      page_table: int32[S, M] pages of each row.
      kv_lens: int32[S] tokens of each context; 0 for a padding row.
      kv_starts: int32[S] first key of each row, whole pages; None: 0.
      sm_scale: factor on the scores.
      sliding_window: a query sees this many tokens, its own included; None: all.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap), after sm_scale; None: as they are.
      blocks: sizes of the pipeline; None: the measured ones of this device, or a rule.
      interpret: run on the CPU; `InterpretParams` says how.

    Returns:
      float32[S, Hq, D] normalised, and float32[S, Hq] log-sum-exp of the scores; 0 and -inf for a row without keys.

    Raises:
      UnsupportedKernel: shapes, types or blocks that this kernel does not serve.
    """
    num_rows, num_heads, head_dim = q.shape
    blocks = _blocks("decode", DecodeBlocks, blocks, head_dim, k_pages.shape[1])
    layout = _layout("decode", q, k_pages, v_pages, blocks, (1,), sliding_window)
    check_smem("decode", *page_table.shape, num_rows)
    kv_lens = kv_lens.astype(jnp.int32)
    first = jnp.zeros_like(kv_lens) if kv_starts is None else kv_starts.astype(jnp.int32)
    if sliding_window is not None:
        first = jnp.maximum(first, kv_lens - sliding_window)
    rows, unread = jnp.arange(num_rows, dtype=jnp.int32), jnp.zeros_like(kv_lens)
    out, lse = walk(_to_tiles(q[:, None], layout), k_pages, v_pages, page_table.astype(jnp.int32),
                    Items(rows, rows, first, kv_lens, unread, unread, unread), layout, sm_scale=sm_scale,
                    is_ragged=False, sliding_window=sliding_window, soft_cap=soft_cap, interpret=interpret)
    return out.reshape(num_rows, num_heads, head_dim), lse.reshape(num_rows, num_heads)


def extend(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, cu_q_lens: Array, *,
           sm_scale: float, sliding_window: int | None = None, soft_cap: float | None = None,
           blocks: ExtendBlocks | None = None, interpret: bool | pltpu.InterpretParams = False) -> tuple[Array, Array]:
    """Causal attention of the last tokens of ragged rows over their whole contexts.

    A tile of queries is `q_tokens` flat tokens whatever rows they belong to; each row that has tokens in it is one walk
    of the row's keys.

    Args:
      q: [T, Hq, D] queries, rows one after the other; tokens past cu_q_lens[-1] are padding.
      page_table: int32[S, M] pages of each row.
      kv_lens: int32[S] tokens of each context, those of q included.
      cu_q_lens: int32[S + 1] first token of each row.
      (others): as in `decode`.

    Returns:
      float32[T, Hq, D] normalised, and float32[T, Hq] log-sum-exp of the scores; 0 and -inf for padding tokens.

    Raises:
      UnsupportedKernel: shapes, types or blocks that this kernel does not serve.
    """
    num_tokens, num_heads, head_dim = q.shape
    blocks = _blocks("extend", ExtendBlocks, blocks, head_dim, k_pages.shape[1])
    sizes = _QUERY_TOKENS if blocks is None else (blocks.q_tokens,)
    layout = _layout("extend", q, k_pages, v_pages, blocks, sizes, sliding_window)
    num_tiles = -(-num_tokens // layout.tile_tokens)
    check_smem("extend", *page_table.shape, num_tiles + page_table.shape[0])
    items = _extend_items(kv_lens.astype(jnp.int32), cu_q_lens.astype(jnp.int32), num_tiles, layout.tile_tokens,
                          sliding_window)
    tokens = num_tiles * layout.tile_tokens
    tiles = jnp.pad(q, ((0, tokens - num_tokens), (0, 0), (0, 0)))
    out, lse = walk(_to_tiles(tiles.reshape(num_tiles, layout.tile_tokens, num_heads, head_dim), layout), k_pages,
                    v_pages, page_table.astype(jnp.int32), items, layout, sm_scale=sm_scale, is_ragged=True,
                    sliding_window=sliding_window, soft_cap=soft_cap, interpret=interpret)
    out = out.reshape(num_tiles, num_heads, layout.tile_tokens, head_dim).transpose(0, 2, 1, 3)
    lse = lse.reshape(num_tiles, num_heads, layout.tile_tokens).transpose(0, 2, 1)
    return out.reshape(tokens, num_heads, head_dim)[:num_tokens], lse.reshape(tokens, num_heads)[:num_tokens]


def shared_prefix(q: Array, k_pages: Array, v_pages: Array, prefix_pages: Array, prefix_lens: Array, members: Array, *,
                  sm_scale: float, soft_cap: float | None = None, blocks: SharedBlocks | None = None,
                  interpret: bool | pltpu.InterpretParams = False) -> tuple[Array, Array]:
    """Attention of groups of decode rows to the prefix that each group shares, whose keys are read once for all.

    Members of a group that exceed what VMEM holds are served in several tiles, each of which reads the prefix.

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
    num_rows, num_heads, head_dim = q.shape
    num_groups, num_members = members.shape
    blocks = _blocks("shared_prefix", SharedBlocks, blocks, head_dim, k_pages.shape[1])
    most = 1 << (num_members - 1).bit_length()
    sizes = [most >> shift for shift in range(most.bit_length())]
    layout = _layout("shared_prefix", q, k_pages, v_pages, blocks, sizes, None)
    size = layout.tile_tokens
    tiles_of_group = -(-num_members // size)
    num_tiles = num_groups * tiles_of_group
    check_smem("shared_prefix", *prefix_pages.shape, num_tiles)
    padding = ((0, 0), (0, tiles_of_group * size - num_members))
    members = jnp.pad(members.astype(jnp.int32), padding, constant_values=num_rows).reshape(num_tiles, size)
    is_row = members < num_rows
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    groups = tiles // tiles_of_group
    end, unread = jnp.where(is_row.any(axis=1), prefix_lens.astype(jnp.int32)[groups], 0), jnp.zeros_like(tiles)
    out, lse = walk(_to_tiles(q[jnp.minimum(members, num_rows - 1)], layout), k_pages, v_pages,
                    prefix_pages.astype(jnp.int32), Items(tiles, groups, unread, end, unread, unread, unread), layout,
                    sm_scale=sm_scale, is_ragged=False, sliding_window=None, soft_cap=soft_cap, interpret=interpret)
    out = out.reshape(num_tiles, num_heads, size, head_dim).transpose(0, 2, 1, 3)
    lse = lse.reshape(num_tiles, num_heads, size).transpose(0, 2, 1)
    out, lse = jnp.where(is_row[..., None, None], out, 0), jnp.where(is_row[..., None], lse, -jnp.inf)
    return (out.reshape(num_groups, -1, num_heads, head_dim)[:, :num_members],
            lse.reshape(num_groups, -1, num_heads)[:, :num_members])


def _extend_items(kv_lens: Array, cu_q_lens: Array, num_tiles: int, size: int, sliding_window: int | None) -> Items:
    """An item for each tile and each row with tokens in it; the spare ones visit the tiles that no row reaches.

    Rows ascend and lie one after the other, so there are at most tiles + rows of them, and tiles ascend with them.
    """
    starts, ends = cu_q_lens[:-1], cu_q_lens[1:]
    first_tiles = starts // size
    counts = jnp.where(ends > starts, (ends - 1) // size + 1 - first_tiles, 0)
    stops = jnp.cumsum(counts)
    i = jnp.arange(num_tiles + kv_lens.shape[0], dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(stops, i, side="right"), kv_lens.shape[0] - 1).astype(jnp.int32)
    is_used = i < stops[-1]
    num_reached = -(-ends[-1] // size)
    tile = jnp.where(is_used, first_tiles[row] + i - (stops - counts)[row],
                     jnp.minimum(num_reached + i - stops[-1], num_tiles - 1))
    first_token = jnp.maximum(starts[row] - tile * size, 0)
    end_token = jnp.minimum(ends[row] - tile * size, size)
    position = kv_lens[row] - ends[row] + tile * size
    first = 0 if sliding_window is None else jnp.maximum(position + first_token + 1 - sliding_window, 0)
    end = jnp.where(is_used, position + end_token, 0)
    return Items(*(jnp.broadcast_to(x, i.shape).astype(jnp.int32)
                   for x in (tile, row, first, end, position, first_token, end_token)))


def _to_tiles(q: Array, layout: Layout) -> Array:
    """[tiles, tile_tokens, Hq, D] to [tiles, num_bundles, rows, D], in the type of the pages."""
    tiles, tokens, num_heads, head_dim = q.shape
    return q.astype(layout.dtype).transpose(0, 2, 1, 3).reshape(tiles, layout.num_bundles, layout.rows, head_dim)


def _blocks(kernel: str, kind: type, blocks: Blocks | None, head_dim: int, page_size: int) -> Blocks | None:
    if blocks is None:
        return tuned_blocks("pallas_tpu", kernel, device_kind(), head_dim=head_dim, page_size=page_size)
    if not isinstance(blocks, kind):
        raise UnsupportedKernel(f"{kernel}: blocks={blocks}: expected {kind.__name__} or None")
    return blocks


def _layout(kernel: str, q: Array, k_pages: Array, v_pages: Array, blocks: Blocks | None, tile_tokens: Sequence[int],
            sliding_window: int | None) -> Layout:
    """Checks what was given, and takes the largest blocks that fit where none are asked for."""
    num_heads, head_dim = q.shape[1:]
    _, page_size, width = k_pages.shape
    dtype = np.dtype(k_pages.dtype)

    def refuse(given: str, expected: str) -> None:
        raise UnsupportedKernel(f"{kernel}: {given}: expected {expected}")

    if dtype not in (jnp.float32, jnp.bfloat16):
        refuse(f"pages of {dtype}", "float32 or bfloat16")
    if (v_pages.shape, v_pages.dtype) != (k_pages.shape, k_pages.dtype):
        refuse(f"k_pages {k_pages.dtype}{k_pages.shape} and v_pages {v_pages.dtype}{v_pages.shape}", "the same of both")
    if page_size % 8:
        refuse(f"page_size={page_size}", "a multiple of 8, the rows of a VMEM tile")
    if head_dim % 16 or width % head_dim or num_heads % (width // head_dim):
        refuse(f"{num_heads} query heads of {head_dim} on pages of width {width}",
               "a head_dim that is a multiple of 16, whole kv heads, and a multiple of them")
    if sliding_window is not None and sliding_window < 1:
        refuse(f"sliding_window={sliding_window}", "at least 1, or None")
    if blocks is not None:
        if blocks.kv_tokens < 1 or blocks.kv_tokens % page_size or blocks.num_stages < 1:
            refuse(f"{blocks}", f"kv_tokens in whole pages of {page_size}, and num_stages of at least 1")
        if not isinstance(blocks, ExtendBlocks) and blocks.num_splits != 1:
            refuse(f"{blocks}", "num_splits=1: one core runs all parts in turn")
        if any(tokens < 1 or tokens & (tokens - 1) for tokens in tile_tokens):
            refuse(f"{blocks}", "q_tokens to be a power of two")

    def layouts() -> Iterator[Layout]:
        key_tokens = _KEY_TOKENS if blocks is None else (blocks.kv_tokens,)
        for tokens in tile_tokens:
            for keys in key_tokens:
                yield Layout(num_kv_heads=width // head_dim, group=num_heads * head_dim // width, head_dim=head_dim,
                             tile_tokens=tokens, page_size=page_size, pages_per_step=max(keys // page_size, 1),
                             num_stages=2 if blocks is None else blocks.num_stages, dtype=dtype)

    return choose(kernel, layouts())
