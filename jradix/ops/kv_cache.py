"""The KV cache on the device: one array of pages for keys and one for values per layer."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class KVCache(NamedTuple):
    """Pages of all layers. Donated to every step, so that writes happen in place.

    Attributes:
      k, v: per layer [N, page_size, Hkv * D]; page 0 is the scratch page that padding writes to.
    """
    k: tuple[Array, ...]
    v: tuple[Array, ...]


def kv_page_bytes(*, num_layers: int, page_size: int, kv_width: int, dtype: jnp.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * num_layers * page_size * kv_width * jnp.dtype(dtype).itemsize


def make_kv_cache(*, num_layers: int, num_pages: int, page_size: int, kv_width: int, dtype: jnp.dtype,
                  device: jax.Device) -> KVCache:
    """Zeroed pages, committed to `device`: `num_pages` and the scratch page before them.

    Committed, because the results of a step are: jit compiles a second time for an argument that differs in that.
    """
    def zeros() -> Array:
        return jnp.zeros((num_pages + 1, page_size, kv_width), dtype, device=device)

    return KVCache(tuple(zeros() for _ in range(num_layers)), tuple(zeros() for _ in range(num_layers)))


def write_pages(pages: Array, values: Array, write_slots: Array) -> Array:
    """Writes one row per token; a slot outside the pages is dropped, never clamped.

    Args:
      pages: [N, page_size, W].
      values: [T, W], cast to the pages' dtype.
      write_slots: int32[T], page * page_size + offset; any slot >= N * page_size writes nothing.
    """
    num_pages, page_size, width = pages.shape
    flat = pages.reshape(num_pages * page_size, width)
    flat = flat.at[write_slots].set(values.astype(pages.dtype), mode="drop", wrap_negative_indices=False)
    return flat.reshape(pages.shape)
