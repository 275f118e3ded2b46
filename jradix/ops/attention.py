"""Paged attention over ragged rows: one operation, the implementation chosen by name."""
from __future__ import annotations

from jax import Array

from jradix.ops.attention_xla import paged_attention_xla

IMPLEMENTATIONS = ("xla",)


def paged_attention(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, cu_q_lens: Array,
                    num_decode: Array, *, sm_scale: float, sliding_window: int | None = None,
                    soft_cap: float | None = None, has_chunks: bool = True, implementation: str | None = None) -> Array:
    """Causal attention of each row's new tokens over its whole context, which is in the pages already.

    Args:
      q: [T, Hq, D] queries, rows one after the other, decode rows first.
      k_pages, v_pages: [N, page_size, Hkv * D].
      page_table: int32[S, M] pages of each row.
      kv_lens: int32[S] context lengths including the new tokens; 0 for padding rows.
      cu_q_lens: int32[S + 1] first token of each row.
      num_decode: int32[] leading rows with exactly one token.
      sm_scale: factor on the scores.
      sliding_window: a token sees this many tokens, itself included; None: all.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap); None: as they are.
      has_chunks: False promises that all rows are decode rows.
      implementation: one of `IMPLEMENTATIONS`; None takes the first that can. A name is used or refused.

    Returns:
      float32[T, Hq, D]; padding tokens hold finite garbage.

    Raises:
      ValueError: unknown implementation.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation={implementation!r}: expected one of {IMPLEMENTATIONS} or None")
    return paged_attention_xla(q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, num_decode, sm_scale=sm_scale,
                               sliding_window=sliding_window, soft_cap=soft_cap, has_chunks=has_chunks)
