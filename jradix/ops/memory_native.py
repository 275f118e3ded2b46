"""Large arrays on CPUs whose memory is not touched until it is written.

Zeroing a KV pool of 2 GiB takes 1.3 to 1.7 s of a start that takes 12, and all of it is then resident, however little
of the pool is ever used.
"""
from __future__ import annotations

import functools

import jax
import jax.ffi
from jax import Array
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from jradix.ops.native_library import NativeLibrary

LIBRARY = NativeLibrary("memory_native", ("jradix_untouched",))


def why_not(device: jax.Device) -> str | None:
    """Why there is no such memory on the device, None where there is. The first call compiles or loads the code."""
    return LIBRARY.why_not() if device.platform == "cpu" else f"{device.platform} memory is not paged"


def untouched(shape: tuple[int, ...], dtype: DTypeLike, device: jax.Device) -> Array:
    """An array, committed to a device that `why_not` does not refuse, of any content: nobody may read what he has not
    written."""
    return _maker(shape, jax.numpy.dtype(dtype), device)()


@functools.cache
def _maker(shape: tuple[int, ...], dtype: jax.numpy.dtype, device: jax.Device) -> jax.stages.Wrapped:
    call = jax.ffi.ffi_call("jradix_untouched", jax.ShapeDtypeStruct(shape, dtype))
    return jax.jit(lambda: call(), out_shardings=SingleDeviceSharding(device))
