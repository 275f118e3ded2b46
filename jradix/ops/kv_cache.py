"""The KV cache on the device: one array of pages for keys and one for values per layer."""
from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from jradix.ops import memory_native
from pallas_kernels.errors import UnsupportedKernel

logger = logging.getLogger("jradix")

Writer: TypeAlias = Callable[[Array, Array, Array], Array]      # (array, rows [T, ...], slots int32[T]) -> array


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
    if device.platform == "cpu" and memory_native.why_not(dtype) is None:
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
        all else is written by `write_rows`.
    """
    if implementation == "mosaic_gpu":
        from pallas_kernels import mosaic_gpu
        try:
            return mosaic_gpu.write_kv(k_pages, v_pages, k, v, slots)
        except UnsupportedKernel as error:
            _say(str(error))
    return write_rows(k_pages, k, slots), write_rows(v_pages, v, slots)


def write_rows(array: Array, rows: Array, slots: Array) -> Array:
    """The array, seen as rows one after the other, with some of them written: in C on CPUs, by XLA elsewhere and where
    there is no C compiler.

    Args:
      array: of any shape.
      rows: [T, ...], cast to the array's type; a row has the size of the array's last axes, whole ones.
      slots: int32[T] place of each row, counted in rows; a place outside the array writes nothing.
    """
    return lax.platform_dependent(array, rows, slots, cpu=_in_c_or(_write_rows), default=_write_rows)


def write_page(pages: Array, page: Array, page_id: Array) -> Array:
    """The pages [N, page_size, W] with one of them, [1, page_size, W], written at int32[] page_id, which must exist."""
    return lax.platform_dependent(pages, page, page_id[None], cpu=_in_c_or(_write_page), default=_write_page)


def _in_c_or(write: Writer) -> Writer:
    """Chooses when it is lowered for a CPU: elsewhere no C code is compiled."""

    def on_cpu(array: Array, rows: Array, slots: Array) -> Array:
        is_served = memory_native.why_not(array.dtype) is None
        return (memory_native.write_rows if is_served else write)(array, rows, slots)

    return on_cpu


def _write_page(pages: Array, page: Array, page_ids: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(pages, page, page_ids[0], 0)


def _write_rows(array: Array, rows: Array, slots: Array) -> Array:
    flat = array.reshape(-1, *rows.shape[1:])
    flat = flat.at[slots].set(rows.astype(array.dtype), mode="drop", wrap_negative_indices=False)
    return flat.reshape(array.shape)


@functools.cache
def _say(reason: str) -> None:
    logger.info("KV write: by XLA; %s", reason)
