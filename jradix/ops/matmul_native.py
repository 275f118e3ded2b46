"""Products of activations and weights on CPUs in C, called through XLA's foreign function interface.

Each weight is read once, in the order of memory, and the rows lie in the lanes of vectors. The matrix unit of
processors that have one (AMX) takes bfloat16 weights, and float32 ones where x has more than 64 rows, with the errors
of sums in float32. A row's result has the same bits alone, among others and in any place of products of one kind, and
rows of padding cost nothing.
"""
from __future__ import annotations

import jax
import jax.ffi
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jradix.ops.native_library import NativeLibrary
from pallas_kernels.errors import UnsupportedKernel

LIBRARY = NativeLibrary("matmul_native", ("jradix_matmul",))
WEIGHT_TYPES = ("float32", "float16", "bfloat16")


def why_not(dtype: DTypeLike = jnp.float32) -> str | None:
    """Why weights of this type cannot be multiplied here, None where they can. The first call in a process compiles or
    loads the code."""
    name = jnp.dtype(dtype).name
    if name not in WEIGHT_TYPES:
        return f"weights of {name}; expected one of {', '.join(WEIGHT_TYPES)}"
    return LIBRARY.why_not()


def matmul(x: Array, w: Array, num_rows: Array) -> Array:
    """x [M, K] times the transposed w [N, K]: float32[M, N].

    Args:
      x: used as float32; a matrix unit rounds it to bfloat16 beside bfloat16 weights, as XLA does.
      w: float32, float16 or bfloat16.
      num_rows: int32[], rows of x from this one on are padding; their results are zeros.

    Raises:
      UnsupportedKernel: shapes that do not fit, or `why_not`.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or not x.shape[1]:
        raise UnsupportedKernel(f"native matmul: x {x.shape} and w {w.shape}; expected [M, K] and [N, K]")
    if reason := why_not(w.dtype):
        raise UnsupportedKernel(f"native matmul: {reason}")
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("jradix_matmul", result)(x.astype(jnp.float32), w, num_rows.astype(jnp.int32))
