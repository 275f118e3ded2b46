"""The paged kernels in float64 NumPy, one query and head at a time, and page pools whose unowned slots are poisoned.

Written from the definition of attention; it shares no code with the kernels. Only slots that a query may see are read.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Pool(NamedTuple):
    """Pages of some rows. `k_pages, v_pages` float32[N, page_size, Hkv * D], `page_table` int32[S, M]."""
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray


def make_pool(random: np.random.Generator, kv_lens: Sequence[int], *, page_size: int, width: int,
              first_owned: Sequence[int] | None = None, fill: float = np.nan, max_pages: int | None = None) -> Pool:
    """Standard normal keys and values of each row in permuted pages of its own; all other slots hold `fill`.

    Args:
      random: source of keys, values and page order.
      kv_lens: tokens of each row; 0 for a padding row, whose table entries are the scratch page 0.
      width: Hkv * D.
      first_owned: tokens of each row before this one hold `fill` as well (older than a window); None: 0.
      max_pages: columns of the page table; None: as many as the longest row needs.
    """
    num_pages = [-(-length // page_size) for length in kv_lens]
    total = sum(num_pages) + 3                                       # scratch page, and two that nobody owns
    ids = iter(random.permutation(np.arange(1, total)))
    page_table = np.zeros((len(kv_lens), max(num_pages, default=0) if max_pages is None else max_pages), np.int32)
    k_pages = np.full((total, page_size, width), fill, np.float32)
    v_pages = k_pages.copy()
    for row, (length, count) in enumerate(zip(kv_lens, num_pages)):
        page_table[row, :count] = [next(ids) for _ in range(count)]
        for position in range(0 if first_owned is None else first_owned[row], length):
            slot = page_table[row, position // page_size], position % page_size
            k_pages[slot], v_pages[slot] = random.standard_normal((2, width))
    return Pool(k_pages, v_pages, page_table)


def decode(q: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray, page_table: np.ndarray, kv_lens: Sequence[int],
           kv_starts: Sequence[int] | None = None, *, sm_scale: float, sliding_window: int | None = None,
           soft_cap: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """float64[S, Hq, D] and float64[S, Hq]: one query per row at position kv_lens[s] - 1."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, length in enumerate(kv_lens):
        first = max(0 if kv_starts is None else kv_starts[row], _oldest(length - 1, sliding_window))
        out[row], lse[row] = _attend(q[row], k_pages, v_pages, page_table[row], range(first, length), sm_scale,
                                     soft_cap)
    return out, lse


def extend(q: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray, page_table: np.ndarray, kv_lens: Sequence[int],
           cu_q_lens: Sequence[int], *, sm_scale: float, sliding_window: int | None = None,
           soft_cap: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """float64[T, Hq, D] and float64[T, Hq]; flat tokens past cu_q_lens[-1] are 0 and -inf."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, length in enumerate(kv_lens):
        for token in range(cu_q_lens[row], cu_q_lens[row + 1]):
            position = length - cu_q_lens[row + 1] + token
            out[token], lse[token] = _attend(q[token], k_pages, v_pages, page_table[row],
                                             range(_oldest(position, sliding_window), position + 1), sm_scale, soft_cap)
    return out, lse


def shared_prefix(q: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray, prefix_pages: np.ndarray,
                  prefix_lens: Sequence[int], members: np.ndarray, *, sm_scale: float,
                  soft_cap: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """float64[P, R, Hq, D] and float64[P, R, Hq]; places without a row are 0 and -inf."""
    shape = (*members.shape, *q.shape[1:])
    out, lse = np.zeros(shape), np.full(shape[:-1], -np.inf)
    for group, row in np.ndindex(members.shape):
        if members[group, row] < len(q):
            out[group, row], lse[group, row] = _attend(q[members[group, row]], k_pages, v_pages, prefix_pages[group],
                                                       range(prefix_lens[group]), sm_scale, soft_cap)
    return out, lse


def _oldest(position: int, sliding_window: int | None) -> int:
    return 0 if sliding_window is None else max(position + 1 - sliding_window, 0)


def _attend(q: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray, pages: np.ndarray, seen: range, sm_scale: float,
            soft_cap: float | None) -> tuple[np.ndarray, np.ndarray]:
    """One query [Hq, D] over the positions `seen` of one row."""
    heads, head_dim = q.shape
    out, lse = np.zeros(q.shape), np.full(heads, -np.inf)
    if not len(seen):
        return out, lse
    page_size = k_pages.shape[1]
    slots = pages[np.array(seen) // page_size], np.array(seen) % page_size
    keys, values = (array[slots].astype(np.float64).reshape(len(seen), -1, head_dim) for array in (k_pages, v_pages))
    kv_heads = keys.shape[1]
    for head in range(heads):
        own = head * kv_heads // heads
        scores = keys[:, own] @ q[head].astype(np.float64) * sm_scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[:, own] / weights.sum()
        lse[head] = scores.max() + np.log(weights.sum())
    return out, lse
