"""The Hopper kernels lowered for CUDA on a machine without a GPU, with controls that must fail."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu
from pallas_kernels.blocks import DecodeBlocks, ExtendBlocks
from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.mosaic_gpu_budget import SMEM_BYTES
from pallas_kernels.mosaic_gpu_ring import Items, Layout
from pallas_kernels.mosaic_gpu_walk import Scoring, walk

LLAMA_8B, SMOLLM2 = (32, 8, 128), (9, 3, 64)       # query heads, kv heads, head_dim


def lower(run: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> str:
    return jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def shapes_of(kernel: str, model: tuple[int, int, int], dtype: Any, *, page_size: int = 16, num_rows: int = 16,
              num_tokens: int = 256) -> list[jax.ShapeDtypeStruct]:
    """Arguments of a kernel: 16 rows of up to 2,048 tokens, 256 new ones in chunks, groups of 8 rows."""
    heads, kv_heads, head_dim = model

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pages = jax.ShapeDtypeStruct((512, page_size, kv_heads * head_dim), dtype)
    rows = jax.ShapeDtypeStruct((num_rows, kv_heads * head_dim), dtype)
    if kernel == "write_kv":
        return [pages, pages, rows, rows, ints(num_rows)]
    q = jax.ShapeDtypeStruct((num_tokens if kernel == "extend" else num_rows, heads, head_dim), dtype)
    if kernel == "shared_prefix":
        return [q, pages, pages, ints(2, 2048 // page_size), ints(2), ints(2, 8)]
    table = ints(num_rows, 2048 // page_size)
    return [q, pages, pages, table, ints(num_rows), *([ints(num_rows + 1)] if kernel == "extend" else [])]


def bound(kernel: str, **settings: Any) -> Callable[..., Any]:
    run = getattr(mosaic_gpu, kernel)
    return run if kernel == "write_kv" else functools.partial(run, sm_scale=0.125, **settings)


@pytest.mark.parametrize("model, dtype", [(LLAMA_8B, jnp.bfloat16), (SMOLLM2, jnp.float16)])
@pytest.mark.parametrize("kernel", mosaic_gpu.__all__)
def test_kernel_for_cuda_lowers(kernel: str, model: tuple[int, int, int], dtype: Any) -> None:
    assert "mosaic_gpu" in lower(bound(kernel), *shapes_of(kernel, model, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["decode", "extend", "shared_prefix"])
@pytest.mark.parametrize("page_size", [8, 24, 64, 128])
@pytest.mark.parametrize("model, dtype", [(LLAMA_8B, jnp.float16), (SMOLLM2, jnp.bfloat16),
                                          ((16, 2, 256), jnp.bfloat16), ((4, 4, 96), jnp.float16),
                                          ((8, 8, 32), jnp.bfloat16)])
def test_kernel_of_all_pages_lowers(kernel: str, page_size: int, model: tuple[int, int, int], dtype: Any) -> None:
    settings = dict(soft_cap=30.0) | (dict() if kernel == "shared_prefix" else dict(sliding_window=100))
    assert "mosaic_gpu" in lower(bound(kernel, **settings), *shapes_of(kernel, model, dtype, page_size=page_size))


def test_lowering_of_an_operation_without_a_rule_fails() -> None:
    def sort(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = lax.sort(x_ref[...])

    kernel = plgpu.kernel(sort, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), grid=(1,), grid_names=("block",))
    with pytest.raises(NotImplementedError, match="sort"):
        lower(kernel, jax.ShapeDtypeStruct((128,), jnp.float32))


def test_float32_operands_are_refused_by_name_before_lowering() -> None:
    with pytest.raises(UnsupportedKernel, match="q of float32: expected bfloat16 or float16"):
        lower(bound("decode"), *shapes_of("decode", LLAMA_8B, jnp.float32))


@pytest.mark.parametrize("kernel, blocks, needed", [("decode", DecodeBlocks(64, num_stages=7), "245,944"),
                                                    ("extend", ExtendBlocks(64, 256, num_stages=2), "294,984")])
def test_shared_memory_over_budget_is_refused_with_its_numbers(kernel: str, blocks: Any, needed: str) -> None:
    with pytest.raises(UnsupportedKernel, match=f"take {needed} bytes of shared memory: expected at most 232,448"):
        lower(bound(kernel, blocks=blocks), *shapes_of(kernel, LLAMA_8B, jnp.bfloat16))


def test_shared_memory_over_budget_is_counted_as_the_compiler_counts_it() -> None:
    layout = Layout(tile_rows=64, tiles=2, heads=1, heads_per_kv=1, head_dim=128, page_size=16, unit=16, kv_tokens=64,
                    num_stages=7, num_splits=1, dtype=np.dtype(jnp.bfloat16))
    assert layout.smem_bytes > SMEM_BYTES
    pages = jnp.zeros((2, 16, 128), jnp.bfloat16)
    row = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=f"smem_bytes={layout.smem_bytes}"):
        lower(lambda: walk(jnp.zeros((128, 1, 128), jnp.bfloat16), pages, pages, row[:, None], Items(*[row] * 8),
                           jnp.arange(2), layout, Scoring(1.0), interpret=False))
