"""Paged attention on CPUs in C: compiled on first use, called through XLA's foreign function interface.

`native_library.py` says how. Where it cannot be done `why_not` tells why; the caller then takes another implementation.
The work is done by XLA's own threads.

| | served | refused with `UnsupportedKernel` |
|---|---|---|
| pages | float32, float16, bfloat16; any `page_size` | other types |
| heads | up to 64 query heads per kv head | more, or no multiple of the kv heads |
| head_dim | multiples of 8 up to 256 | others |

Scores, softmax and sums are float32, and queries are used as float32 whatever type the pages have; but in `extend` and
`shared_prefix` the matrix unit of processors that have one (AMX) takes queries and weights of keys rounded to bfloat16
beside bfloat16 pages, as GPUs do. Results have the same bits whatever else is in the batch and however many threads
there are. Slots that no query of the call may see are never computed with. A page table that names pages which do not
exist fails the step with a text.
"""
from __future__ import annotations

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jradix.ops.native_library import NativeLibrary
from pallas_kernels.errors import UnsupportedKernel

LIBRARY = NativeLibrary("attention_native", ("jradix_decode", "jradix_extend", "jradix_shared_prefix"))
KV_TYPES = ("float32", "float16", "bfloat16")
MAX_HEAD_DIM, MAX_GROUP = 256, 64


def why_not(dtype: DTypeLike = jnp.float32, head_dim: int = 64, group: int = 1, *,
            backend: str | None = None) -> str | None:
    """Why these functions cannot be used, None where they can. The first call in a process compiles or loads the code.

    Args:
      dtype: of the pages.
      head_dim: D.
      group: query heads per kv head.
      backend: platform of the device that computes; None: JAX's default.
    """
    backend = backend or jax.default_backend()
    if backend != "cpu":
        return f"the native kernel runs on the CPU, not on {backend}"
    return _unserved(jnp.dtype(dtype), head_dim, group) or LIBRARY.why_not()


def decode(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, kv_starts: Array | None = None,
           num_rows: Array | None = None, *, sm_scale: float, sliding_window: int | None = None,
           soft_cap: float | None = None) -> tuple[Array, Array]:
    """Attention of one query per row, at position kv_lens[s] - 1, over keys from kv_starts[s] on.

    Contexts are computed in parts of 1,024 keys, merged by log-sum-exp. The cost follows the keys that are seen.

    Args:
      q: [S, Hq, D] queries.
      k_pages, v_pages: [N, page_size, Hkv * D] float32, float16 or bfloat16.
      page_table: int32[S, M] pages of each row.
      kv_lens: int32[S] tokens of each context; 0 for a padding row.
      kv_starts: int32[S] first key of each row; None: 0.
      num_rows: int32[] rows from this one on are padding, whatever their kv_lens; None: all rows count.
      sm_scale: factor on the scores.
      sliding_window: a query sees this many tokens, its own included; None: all.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap), after sm_scale; None: as they are.

    Returns:
      float32[S, Hq, D] normalised, and float32[S, Hq] log-sum-exp of the scores; 0 and -inf for a row without keys.

    Raises:
      UnsupportedKernel: shapes or types that are not served, or `why_not`.
      ValueError: a setting out of its range.
      RuntimeError (when the result is waited for): a page id or a length out of range; the text names the row.
    """
    settings = _settings(q, k_pages, sm_scale, sliding_window, soft_cap)
    starts = jnp.zeros_like(kv_lens) if kv_starts is None else kv_starts
    count = jnp.int32(q.shape[0]) if num_rows is None else num_rows
    return _call("jradix_decode", q.shape, q, k_pages, v_pages, (page_table, kv_lens, starts, count), settings)


def extend(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, cu_q_lens: Array,
           first_row: Array | None = None, *, sm_scale: float, sliding_window: int | None = None,
           soft_cap: float | None = None) -> tuple[Array, Array]:
    """Causal attention of the last tokens of ragged rows over their whole contexts.

    Args:
      q: [T, Hq, D] queries, rows one after the other; tokens past cu_q_lens[-1] are padding.
      page_table: int32[S, M] pages of each row.
      kv_lens: int32[S] tokens of each context, those of q included; 0 for a padding row.
      cu_q_lens: int32[S + 1] first token of each row.
      first_row: int32[] rows before this one are left out; None: 0.
      (others): as in `decode`.

    Returns:
      float32[T, Hq, D] normalised, and float32[T, Hq] log-sum-exp of the scores; 0 and -inf for tokens that are padding
      or of rows left out.

    Raises:
      As `decode`.
    """
    settings = _settings(q, k_pages, sm_scale, sliding_window, soft_cap)
    first = jnp.int32(0) if first_row is None else first_row
    return _call("jradix_extend", q.shape, q, k_pages, v_pages, (page_table, kv_lens, cu_q_lens, first), settings)


def shared_prefix(q: Array, k_pages: Array, v_pages: Array, prefix_pages: Array, prefix_lens: Array, members: Array, *,
                  sm_scale: float, soft_cap: float | None = None) -> tuple[Array, Array]:
    """Attention of groups of decode rows to the prefix that each group shares, whose keys are read once for all.

    Args:
      q: [S, Hq, D] queries.
      prefix_pages: int32[P, M] pages of each group's prefix.
      prefix_lens: int32[P] tokens of each prefix; 0 for a padding group.
      members: int32[P, R] rows of each group, padded with S.
      (others): as in `decode`.

    Returns:
      float32[P, R, Hq, D] normalised, and float32[P, R, Hq] log-sum-exp of the scores; 0 and -inf where there is no
      row, but in padding groups anything and -inf. To be merged with `decode` from `kv_starts` on.

    Raises:
      As `decode`.
    """
    settings = _settings(q, k_pages, sm_scale, None, soft_cap)
    return _call("jradix_shared_prefix", (*members.shape, *q.shape[1:]), q, k_pages, v_pages,
                 (prefix_pages, prefix_lens, members), settings)


def _call(target: str, shape: tuple[int, ...], q: Array, k_pages: Array, v_pages: Array, indices: tuple[Array, ...],
          settings: dict[str, np.generic]) -> tuple[Array, Array]:
    reason = LIBRARY.why_not()
    if reason is not None:
        raise UnsupportedKernel(f"native attention: {reason}; take another implementation")
    results = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    call = jax.ffi.ffi_call(target, results)
    out, lse = call(q.astype(jnp.float32), k_pages, v_pages, *(index.astype(jnp.int32) for index in indices),
                    **settings)
    return out, lse


def _settings(q: Array, k_pages: Array, sm_scale: float, sliding_window: int | None,
              soft_cap: float | None) -> dict[str, np.generic]:
    heads, head_dim = q.shape[1:]
    kv_heads, rest = divmod(k_pages.shape[-1], head_dim)
    if rest or not kv_heads or heads % kv_heads:
        raise UnsupportedKernel(f"native attention: q {q.shape} on pages {k_pages.shape}; expected pages of Hkv * D = "
                                f"Hkv * {head_dim} numbers a token, and query heads in multiples of Hkv")
    reason = _unserved(k_pages.dtype, head_dim, heads // kv_heads)
    if reason is not None:
        raise UnsupportedKernel(f"native attention: {reason}")
    if sliding_window is not None and not 0 < sliding_window < 2**31:
        raise ValueError(f"sliding_window={sliding_window!r}: expected 1 to 2**31 - 1, or None")
    if soft_cap is not None and not 0 < soft_cap < np.inf:
        raise ValueError(f"soft_cap={soft_cap!r}: expected a number above 0, or None")
    return dict(sm_scale=np.float32(sm_scale), soft_cap=np.float32(soft_cap or 0),
                sliding_window=np.int32(sliding_window or 0))


def _unserved(dtype: np.dtype, head_dim: int, group: int) -> str | None:
    if dtype.name not in KV_TYPES:
        return f"pages of {dtype.name}; expected one of {', '.join(KV_TYPES)}"
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim={head_dim}; expected a multiple of 8 up to {MAX_HEAD_DIM}"
    if not 1 <= group <= MAX_GROUP:
        return f"{group} query heads per kv head; expected 1 to {MAX_GROUP}"
    return None
