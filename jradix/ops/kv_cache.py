"""The KV cache on the device: one array of pages for keys and one for values per layer."""
from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jradix.ops import memory_native
from pallas_kernels.errors import UnsupportedKernel

logger = logging.getLogger("jradix")


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

    Committed, because the results of a step are: jit compiles a second time for an argument that differs in that. On
    CPUs they take memory as they are written.
    """
    shape = num_pages + 1, page_size, kv_width
    make = functools.partial(jnp.zeros, shape, dtype, device=device)
    if memory_native.why_not(dtype, device) is None:
        make = functools.partial(memory_native.zeros, shape, dtype, device)
    return KVCache(tuple(make() for _ in range(num_layers)), tuple(make() for _ in range(num_layers)))


def write_kv(k_pages: Array, v_pages: Array, k: Array, v: Array, slots: Array, *, implementation: str | None = None
             ) -> tuple[Array, Array]:
    """The pages with one row of keys and of values written per token; in place where the caller donates them.

    Args:
      k_pages, v_pages: [N, page_size, W].
      k, v: [T, W], cast to the pages' dtype.
      slots: int32[T], page * page_size + offset; any slot >= N * page_size writes nothing, and is never clamped.
      implementation: of the attention. "mosaic_gpu" has a kernel for this too, which is used for the widths it serves;
        all else is written by XLA.
    """
    if implementation == "mosaic_gpu":
        from pallas_kernels import mosaic_gpu
        try:
            return mosaic_gpu.write_kv(k_pages, v_pages, k, v, slots)
        except UnsupportedKernel as error:
            _say(str(error))
    return _write_rows(k_pages, k, slots), _write_rows(v_pages, v, slots)


@functools.cache
def _say(reason: str) -> None:
    logger.info("KV write: by XLA; %s", reason)


def _write_rows(pages: Array, rows: Array, slots: Array) -> Array:
    num_pages, page_size, width = pages.shape
    flat = pages.reshape(num_pages * page_size, width)
    flat = flat.at[slots].set(rows.astype(pages.dtype), mode="drop", wrap_negative_indices=False)
    return flat.reshape(pages.shape)
