"""Writes of new keys and values into their pages on Hopper: one kernel for both arrays, in place."""
from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_budget import DTYPES, interpreter, refuse

_BLOCK_ROWS = 8
_BOX = 256           # elements of a TMA box along one axis


def write_kv(k_pages: Array, v_pages: Array, k: Array, v: Array, slots: Array, *,
             interpret: Any = False) -> tuple[Array, Array]:
    """The pages with one row of each array written per token; in place where the caller donates them.

    Grid: blocks of 8 tokens. A block's rows come to shared memory in one TMA box an array and leave in one a row.

    Args:
      k_pages, v_pages: [N, page_size, W], bfloat16 or float16.
      k, v: [T, W], cast to the type of the pages.
      slots: int32[T], page * page_size + offset; one outside the pages writes nothing. Of tokens that share a slot, as
        padding may, any one's elements remain.
      interpret: run on the CPU, as in `decode`.

    Returns:
      k_pages and v_pages.

    Raises:
      UnsupportedKernel: shapes or types that this kernel does not serve.
    """
    num_tokens, width = k.shape
    if (k_pages.shape, k_pages.dtype) != (v_pages.shape, v_pages.dtype) or k_pages.dtype not in DTYPES:
        refuse("write_kv", f"k_pages {k_pages.dtype}{k_pages.shape}, v_pages {v_pages.dtype}{v_pages.shape}",
               "one shape, and one type of bfloat16 and float16")
    if v.shape != k.shape or slots.shape != (num_tokens,) or width != k_pages.shape[2]:
        refuse("write_kv", f"k {k.shape}, v {v.shape}, slots {slots.shape}",
               f"[T, {k_pages.shape[2]}] twice and [T]")
    if width % 64 or width // math.gcd(width, _BOX) > _BOX:
        refuse("write_kv", f"rows of {width} elements", "a multiple of 64, up to 256 boxes of the same size")
    box = width // math.gcd(width, _BOX), math.gcd(width, _BOX)
    block_rows = math.gcd(num_tokens, _BLOCK_ROWS)
    num_slots = k_pages.shape[0] * k_pages.shape[1]
    k_ref, v_ref = (jax.new_ref(pages.reshape(num_slots, *box)) for pages in (k_pages, v_pages))
    rows = (array.astype(k_pages.dtype).reshape(num_tokens, *box) for array in (k, v))

    def write_rows(k_rows: Any, v_rows: Any, slots_ref: Any, k_ref: Any, v_ref: Any) -> None:
        first = pl.multiple_of(lax.axis_index("block") * block_rows, block_rows)

        def scoped(k_smem: Any, v_smem: Any, ready: Any) -> None:
            arrays = (k_rows, k_smem, k_ref), (v_rows, v_smem, v_ref)
            for source, smem, _ in arrays:
                plgpu.copy_gmem_to_smem(source.at[pl.ds(first, block_rows)], smem, ready)
            plgpu.barrier_wait(ready)
            for i in range(block_rows):
                slot = slots_ref[first + i]

                @pl.when((slot >= 0) & (slot < num_slots))
                def _(i: int = i, slot: Array = slot) -> None:
                    for _, smem, target in arrays:
                        plgpu.copy_smem_to_gmem(smem.at[i], target.at[slot])
            plgpu.wait_smem_to_gmem(0)

        buffer = plgpu.SMEM((block_rows, *box), k_pages.dtype)
        pl.run_scoped(scoped, buffer, buffer, plgpu.Barrier(num_arrivals=2))

    # `plgpu.kernel` takes no mutable references before jax 0.12; what it is made of does.
    pl.kernel(write_rows, out_type=(), mesh=plgpu.Mesh(grid=(num_tokens // block_rows,), grid_names=("block",)),
              compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
              interpret=interpreter("write_kv", interpret),
              )(*rows, slots.astype(jnp.int32), k_ref, v_ref)
    return jax.freeze(k_ref).reshape(k_pages.shape), jax.freeze(v_ref).reshape(v_pages.shape)
