"""KV pools in the memory of CPUs, by C code: zeros that take no memory until they are written, and writes in place.

Writing the zeros of a KV pool of 2 GiB takes 1.3 to 1.7 s of a start that takes 12, and all of it is then resident,
however little of the pool is ever used. XLA's scatter into an array of bfloat16 rewrites all of it before jax 0.11.2.
"""
from __future__ import annotations

import functools

import jax
import jax.ffi
import jax.numpy as jnp
from jax import Array
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from jradix.ops.native_library import NativeLibrary

LIBRARY = NativeLibrary("memory_native", ("jradix_zeros", "jradix_write_rows"))
TYPES = ("float32", "float16", "bfloat16")


def why_not(dtype: DTypeLike) -> str | None:
    """Why arrays of this type are not served, None where they are. The first call compiles or loads the code."""
    if jnp.dtype(dtype).name not in TYPES:
        return f"arrays of {jnp.dtype(dtype).name}; expected one of {', '.join(TYPES)}"
    return LIBRARY.why_not()


def zeros(shape: tuple[int, ...], dtype: DTypeLike, device: jax.Device) -> Array:
    """Zeros, committed to the device, a CPU; of a type that `why_not` does not refuse."""
    return _maker(shape, jnp.dtype(dtype), device)()


@functools.cache
def _maker(shape: tuple[int, ...], dtype: jnp.dtype, device: jax.Device) -> jax.stages.Wrapped:
    make = jax.ffi.ffi_call("jradix_zeros", jax.ShapeDtypeStruct(shape, dtype))
    return jax.jit(lambda: make(), out_shardings=SingleDeviceSharding(device))


def write_rows(array: Array, rows: Array, slots: Array) -> Array:
    """The array, seen as rows one after the other, with some of them written; in place where the caller donates it.

    Args:
      array: of a type that `why_not` does not refuse.
      rows: [T, ...], cast to the array's type; a row's size divides the array's.
      slots: int32[T] place of each row, counted in rows; a place outside the array writes nothing.
    """
    write = jax.ffi.ffi_call("jradix_write_rows", jax.ShapeDtypeStruct(array.shape, array.dtype),
                             input_output_aliases={0: 0})
    return write(array, rows.astype(array.dtype), slots.astype(jnp.int32))
