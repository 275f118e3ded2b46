"""Large arrays of zeros on CPUs that take no memory until they are written.

Writing the zeros of a KV pool of 2 GiB takes 1.3 to 1.7 s of a start that takes 12, and all of it is then resident,
however little of the pool is ever used.
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

LIBRARY = NativeLibrary("memory_native", ("jradix_zeros",))
TYPES = ("float32", "float16", "bfloat16")


def why_not(dtype: DTypeLike, device: jax.Device) -> str | None:
    """Why there are no such arrays, None where there are. The first call compiles or loads the code."""
    if device.platform != "cpu":
        return f"only the CPU's memory comes page by page, this is {device.platform}"
    if jnp.dtype(dtype).name not in TYPES:
        return f"zeros of {jnp.dtype(dtype).name}; expected one of {', '.join(TYPES)}"
    return LIBRARY.why_not()


def zeros(shape: tuple[int, ...], dtype: DTypeLike, device: jax.Device) -> Array:
    """Zeros, committed to the device; one that `why_not` does not refuse."""
    return _maker(shape, jnp.dtype(dtype), device)()


@functools.cache
def _maker(shape: tuple[int, ...], dtype: jnp.dtype, device: jax.Device) -> jax.stages.Wrapped:
    make = jax.ffi.ffi_call("jradix_zeros", jax.ShapeDtypeStruct(shape, dtype))
    return jax.jit(lambda: make(), out_shardings=SingleDeviceSharding(device))
