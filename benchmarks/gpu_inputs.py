"""What `gpu_check` measures: its sizes, the kernels that a size checks, and queries, pages and page tables for them.

It measures nothing itself.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jradix.ops import attention_xla
from jradix.ops.kv_cache import write_kv
from pallas_kernels import mosaic_gpu

RANDOM_PAGES = 512
Fields = dict[str, Any]      # of a case's line in the results


@dataclass(frozen=True)
class Sizes:
    """What one `--size` measures.

    Attributes:
      heads: query heads, kv heads and head_dim of the timed sections and of the model.
      pages: page sizes of the timed decode steps.
      rows, contexts: of those steps.
      chunk: flat tokens of a call of extend.
      chunks: name -> (new tokens, context) of each row.
      sharing: rows on one prefix.
      prefix, own: tokens of the prefix, and of each row behind it.
      loops, repeats: calls in one timed loop, and timed loops.
      copied, product: numbers that the copy moves; rows and columns of the matrix product.
      num_combos: combinations of sizes in the correctness section.
      model: vocabulary, hidden, intermediate, layers.
      engine: rows, prompt tokens per step, longest request.
    """
    workload: str
    heads: tuple[int, int, int]
    pages: tuple[int, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk: int
    chunks: dict[str, tuple[tuple[int, int], ...]]
    sharing: tuple[int, ...]
    prefix: int
    own: int
    loops: int
    repeats: int
    copied: int
    product: int
    num_combos: int
    model: tuple[int, int, int, int]
    engine: tuple[int, int, int]


SIZES = dict(
    default=Sizes("gpu_check", (32, 8, 128), (16, 64), (1, 16, 64, 256), (1024, 4096, 32_768), 2048,
                  {"2048 of 2048": ((2048, 2048),), "2048 of 8192": ((2048, 8192),),
                   "8 x 256 of 4096": ((256, 4096),) * 8, "512 of 32768": ((512, 32_768),)},
                  (16, 64), 8192, 64, 20, 7, 1 << 29, 8192, 16, (128_256, 4096, 14_336, 32), (128, 2048, 10_752)),
    tiny=Sizes("tiny", (4, 2, 64), (16,), (2, 4), (32, 64), 16,
               {"2 x 8 of 64": ((8, 64),) * 2}, (8,), 64, 16, 2, 1, 1 << 18, 128, 2, (49_152, 64, 64, 1), (4, 64, 256)))


def kernels(size: str) -> tuple[str, dict[str, Callable[..., Any]]]:
    """Name of the implementation that a size checks, and its functions."""
    name, form, write = (("xla", attention_xla, write_kv) if size == "tiny" else
                         ("mosaic_gpu", mosaic_gpu, mosaic_gpu.write_kv))
    return name, dict(decode=form.decode, extend=form.extend, shared_prefix=form.shared_prefix, write_kv=write)


def query_shape(size: str, num: int) -> jax.ShapeDtypeStruct:
    heads, _, head_dim = SIZES[size].heads
    return jax.ShapeDtypeStruct((num, heads, head_dim), jnp.bfloat16)


def make_queries(size: str, num: int) -> Array:
    return jax.random.normal(jax.random.key(num), query_shape(size, num).shape, jnp.bfloat16)


def page_shape(size: str, num_pages: int, page_size: int) -> jax.ShapeDtypeStruct:
    """Pages of a layer, at least so many: whole blocks of `RANDOM_PAGES` where there are more than one."""
    _, kv_heads, head_dim = SIZES[size].heads
    block = min(num_pages, RANDOM_PAGES)
    return jax.ShapeDtypeStruct((-(-num_pages // block) * block, page_size, kv_heads * head_dim), jnp.bfloat16)


@functools.lru_cache(maxsize=1)
def make_pages(shape: jax.ShapeDtypeStruct) -> tuple[Array, Array]:
    """Keys and values of a layer. The numbers repeat every `RANDOM_PAGES` pages: fresh ones would cost too much."""
    num_pages, *rest = shape.shape
    block = math.gcd(num_pages, RANDOM_PAGES) if num_pages > RANDOM_PAGES else num_pages
    spread = jax.jit(lambda pages: jnp.broadcast_to(pages, (num_pages // block, *pages.shape)).reshape(shape.shape))
    k_pages, v_pages = jax.random.normal(jax.random.key(0), (2, block, *rest), shape.dtype)
    return spread(k_pages), spread(v_pages)


def permuted_table(num_rows: int, num_columns: int, num_pages: int) -> Array:
    """int32[S, M], each row on pages of its own in no order; page 0 is nobody's."""
    pages = 1 + np.random.default_rng(0).permutation(num_pages - 1)[:num_rows * num_columns]
    return jnp.asarray(pages.reshape(num_rows, num_columns), jnp.int32)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
