"""Sections "decode", "extend" and "sharing" of `gpu_check`: times of the kernels beside what the device can do at all.

A kernel is held against a copy or a matrix product of the same device, in the same run.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gpu_correctness import OUT_TOLERANCE
from gpu_inputs import SIZES, Fields, ints, kernels, make_pages, make_queries, page_shape, permuted_table, query_shape
from jradix.config import SHARED_MEMBERS
from jradix.ops.attention import SharedPrefixes, paged_attention
from jradix.runner.memory import free_bytes
from report import summarise


class Loop:
    """A function in a jitted loop, each result the next call's first argument; compiled, with no memory taken yet.

    Args:
      size: a key of `SIZES`.
      step: `step(x, *rest)`, of x's shape and type.
      shapes: of x and the rest.
    """

    def __init__(self, size: str, step: Callable[..., Array], *shapes: Any) -> None:
        once = jax.jit(step)        # so that the kernel is lowered once
        self._num_calls, self._repeats = SIZES[size].loops, SIZES[size].repeats

        def run(x: Array, *rest: Any) -> tuple[Array, Array]:
            first = once(x, *rest)
            return first, lax.fori_loop(1, self._num_calls, lambda _, x: once(x, *rest), first)

        self._run = jax.jit(run).lower(*shapes).compile()

    def measure(self, *arrays: Any) -> tuple[float, Array]:
        """Median seconds of a call over warm loops, and the result of the first call."""
        first, _ = jax.block_until_ready(self._run(*arrays))
        times = []
        for _ in range(self._repeats):
            start = time.perf_counter()
            jax.block_until_ready(self._run(*arrays))
            times.append((time.perf_counter() - start) / self._num_calls)
        return summarise(times).median, first


@functools.cache
def copy_gb_per_s(size: str) -> float:
    """Bytes read and written by an elementwise pass over memory."""
    x = jnp.arange(SIZES[size].copied, dtype=jnp.uint32)
    return 2 * x.nbytes / Loop(size, lambda x: x * 3 + 1, x).measure(x)[0] / 1e9


@functools.cache
def product_tflop_per_s(size: str) -> float:
    n = SIZES[size].product
    x, y = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
    loop = Loop(size, lambda x, y: (lax.dot(x, y, preferred_element_type=jnp.float32) / n**0.5).astype(x.dtype), x, y)
    return 2 * n**3 / loop.measure(x, y)[0] / 1e12


def attend_step(size: str, kernel: str) -> Callable[..., Array]:
    run, scale = kernels(size)[1][kernel], SIZES[size].heads[2]**-0.5
    return lambda q, *rest: run(q, *rest, sm_scale=scale)[0].astype(q.dtype)


def decode_cases(size: str) -> dict[str, Callable[[], Callable[[], Fields]]]:
    return {f"{rows} rows, pages of {page}": functools.partial(prepare_decode, size, rows, page)
            for page in SIZES[size].pages for rows in SIZES[size].rows}


def prepare_decode(size: str, num_rows: int, page_size: int) -> Callable[[], Fields]:
    """One page table as wide as the longest context, as in an engine: only the lengths differ between contexts."""
    sizes = SIZES[size]
    longest, (_, kv_heads, head_dim) = sizes.contexts[-1], sizes.heads
    token_bytes = 4 * kv_heads * head_dim
    num_tokens = min(sizes.rows[-1] * longest, pool_bytes() // token_bytes)
    num_pages, num_columns = 1 + num_tokens // page_size, longest // page_size
    pages = page_shape(size, num_pages, page_size)
    loop = Loop(size, attend_step(size, "decode"), query_shape(size, num_rows), pages, pages,
                ints(num_rows, num_columns), ints(num_rows))

    def measure() -> Fields:
        fields: Fields = {}
        for context in sizes.contexts:
            if num_rows * context > num_tokens:
                fields[f"left_out_{context}"] = f"{num_rows * context * token_bytes:,} bytes of pages"
                continue
            table = np.zeros((num_rows, num_columns), np.int32)
            table[:, :context // page_size] = permuted_table(num_rows, context // page_size, num_pages)
            took, _ = loop.measure(make_queries(size, num_rows), *make_pages(pages), table,
                                   np.full(num_rows, context, np.int32))
            speed = num_rows * context * token_bytes / took / 1e9
            fields |= {f"us_{context}": took * 1e6, f"gb_per_s_{context}": speed,
                       f"of_copy_{context}": speed / copy_gb_per_s(size)}
        return fields | dict(copy_gb_per_s=copy_gb_per_s(size))

    return measure


@functools.cache
def pool_bytes() -> int:
    """Bytes for the pages of a layer; two such pools are held while one takes the other's place."""
    return int(free_bytes(jax.devices()[0]) * 0.4)


def extend_cases(size: str) -> dict[str, Callable[[], Callable[[], Fields]]]:
    return {name: functools.partial(prepare_extend, size, rows) for name, rows in SIZES[size].chunks.items()}


def prepare_extend(size: str, rows: tuple[tuple[int, int], ...]) -> Callable[[], Fields]:
    """Chunks in a shape of 8 rows, the others empty."""
    sizes = SIZES[size]
    heads, _, head_dim = sizes.heads
    page, longest = sizes.pages[0], max(length for chunk in sizes.chunks.values() for _, length in chunk)
    num_pages = 1 + 8 * longest // page
    pages = page_shape(size, num_pages, page)
    loop = Loop(size, attend_step(size, "extend"), query_shape(size, sizes.chunk), pages, pages,
                ints(8, longest // page), ints(8), ints(9))

    def measure() -> Fields:
        q_lens, kv_lens = np.array([*rows, *[(0, 0)] * (8 - len(rows))], np.int32).T
        cu_q_lens = np.array([0, *np.cumsum(q_lens)], np.int32)
        took, _ = loop.measure(make_queries(size, sizes.chunk), *make_pages(pages),
                               permuted_table(8, longest // page, num_pages), kv_lens.copy(), cu_q_lens)
        num_pairs = sum(new * length - new * (new - 1) // 2 for new, length in rows)
        speed, product = 4 * head_dim * heads * num_pairs / took / 1e12, product_tflop_per_s(size)
        return dict(us=took * 1e6, tflop_per_s=speed, product_tflop_per_s=product, of_product=speed / product)

    return measure


def sharing_cases(size: str) -> dict[str, Callable[[], Callable[[], Fields]]]:
    return {f"{rows} rows on {SIZES[size].prefix}, {members} at a time": functools.partial(
                prepare_sharing, size, rows, members)
            for rows in SIZES[size].sharing for members in sorted({SHARED_MEMBERS, rows})}


def prepare_sharing(size: str, num_rows: int, num_members: int) -> Callable[[], Fields]:
    """The operation with and without `shared`; `num_members` rows are one part of a group. The results agree."""
    sizes, page = SIZES[size], SIZES[size].pages[0]
    prefix_columns, own_columns, parts = sizes.prefix // page, sizes.own // page, -(-num_rows // num_members)
    num_pages = 1 + prefix_columns + num_rows * own_columns

    def step(q: Array, *rest: Any) -> Array:
        return paged_attention(q, *rest[:6], shared=rest[6] if len(rest) > 6 else None, has_chunks=False,
                               sm_scale=sizes.heads[2]**-0.5, implementation=kernels(size)[0]).astype(q.dtype)

    pages = page_shape(size, num_pages, page)
    shapes = (query_shape(size, num_rows), pages, pages, ints(num_rows, prefix_columns + own_columns),
              ints(num_rows), ints(num_rows + 1), ints())
    apart = Loop(size, step, *shapes)
    together = Loop(size, step, *shapes, SharedPrefixes(ints(parts, prefix_columns), ints(parts),
                                                        ints(parts, num_members)))

    def measure() -> Fields:
        ids = permuted_table(1, num_pages - 1, num_pages)[0]
        prefix = jnp.broadcast_to(ids[:prefix_columns], (num_rows, prefix_columns))
        table = jnp.concatenate([prefix, ids[prefix_columns:].reshape(num_rows, own_columns)], axis=1)
        shared = SharedPrefixes(prefix[:parts], jnp.full(parts, sizes.prefix, jnp.int32),
                                jnp.arange(parts * num_members, dtype=jnp.int32).reshape(parts, num_members))
        arrays = (make_queries(size, num_rows), *make_pages(pages), table,
                  jnp.full(num_rows, sizes.prefix + sizes.own, jnp.int32), jnp.arange(num_rows + 1, dtype=jnp.int32),
                  jnp.int32(num_rows))
        (slow, expected), (fast, got) = apart.measure(*arrays), together.measure(*arrays, shared)
        error = float(jnp.abs(got.astype(jnp.float32) - expected.astype(jnp.float32)).max())
        return dict(ok=error <= OUT_TOLERANCE["bfloat16"], apart_us=slow * 1e6, together_us=fast * 1e6,
                    speedup=slow / fast, out_error=error)

    return measure
