"""Products of activations and weights: in C on CPUs, by XLA elsewhere and where there is no C compiler."""
from __future__ import annotations

import functools
import logging

import jax.numpy as jnp
from jax import Array, lax

from jradix.ops import matmul_native

logger = logging.getLogger(__name__)

FEW_ROWS = 64     # up to which XLA's float32 product on CPUs is faster from the right


def matmul(x: Array, w: Array, num_rows: Array | None = None) -> Array:
    """x float32[M, K] times the transposed w [N, K], summed in float32: float32[M, N].

    float32 weights are multiplied at full precision whatever the user's global setting (by default a GPU would use
    TF32). With 16-bit weights XLA rounds x to their type; the C form does so only for a matrix unit. The C form takes
    the layers of a 135M model through 16 float32 rows in 30 ms where XLA takes 41, and through 32 in 52 where XLA takes
    66 (medians of 10 in turn, two cores of a Zen 3; 128 GFLOP/s of their 200 at most). With AMX 256 rows take 125 ms in
    float32 and 51 in bfloat16, where vectors take 199 and 207 (two cores of a Xeon).

    Args:
      num_rows: int32[], rows from this one on are padding, and their results are of no use; None: all rows count.
    """
    count = jnp.int32(x.shape[0]) if num_rows is None else num_rows
    return lax.platform_dependent(x, w, count, cpu=_on_cpu, default=lambda x, w, count: _product(x, w))


def _on_cpu(x: Array, w: Array, count: Array) -> Array:
    reason = matmul_native.why_not(w.dtype)
    if reason is not None:
        _say(reason)
    elif not (x.shape[0] == 1 and w.dtype == jnp.float32):      # there XLA is 1.3 times as fast
        return matmul_native.matmul(x, w, count)
    return matmul_xla(x, w)


def matmul_xla(x: Array, w: Array) -> Array:
    """By XLA's products on CPUs, whose form decides.

    In float32 a few rows are multiplied from the right, w @ x^T: the 30 layers of a 135M model then take 9, 12 and
    22 ms for 8, 16 and 32 rows, otherwise 16, 22 and 38. A 16-bit product with one row is 10-20x slower than with two
    (there is no such matrix-vector routine), so there the row is doubled.
    """
    if w.dtype == jnp.float32 and 1 < x.shape[0] <= FEW_ROWS:
        turned = lax.optimization_barrier(x.T)      # the barriers keep XLA from turning the product round again
        return lax.optimization_barrier(jnp.matmul(w, turned, precision=lax.Precision.HIGHEST)).T
    if w.dtype != jnp.float32 and x.shape[0] == 1:
        return _product(jnp.concatenate([x, x]), w)[:1]
    return _product(x, w)


def _product(x: Array, w: Array) -> Array:
    return lax.dot_general(x.astype(w.dtype), w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32,
                           precision=lax.Precision.HIGHEST if w.dtype == jnp.float32 else None)


@functools.cache
def _say(reason: str) -> None:
    logger.info("matmul: by XLA; not native: %s", reason)
