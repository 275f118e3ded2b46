"""What the Hopper kernels serve: checks of shapes and types, block sizes by rule, and the budget of shared memory."""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.blocks import Blocks, ExtendBlocks, tuned_blocks
from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.mosaic_gpu_ring import WGMMA_ROWS, Layout

DTYPES = jnp.bfloat16, jnp.float16    # what wgmma multiplies
SMEM_BYTES = 227 << 10                # of one block of threads
_SHARED_SMEM_BYTES = 113 << 10        # of each of two blocks on one multiprocessor
_WAVE = 2 * 132                       # blocks of threads that an H200 holds at two a multiprocessor
_MAX_SPLITS = 16
_MAX_STAGES = 4
T = TypeVar("T", bound=Blocks)


def refuse(kernel: str, given: str, expected: str) -> NoReturn:
    """Raises:
      UnsupportedKernel: always.
    """
    raise UnsupportedKernel(f"mosaic_gpu.{kernel}: {given}: expected {expected}")


def check(kernel: str, q: Array, k_pages: Array, v_pages: Array, sliding_window: int | None = None) -> None:
    """Raises:
      UnsupportedKernel: types or shapes that no layout serves.
    """
    num_heads, head_dim = q.shape[-2:]
    _, page_size, width = k_pages.shape
    for name, array in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if array.dtype not in DTYPES:
            refuse(kernel, f"{name} of {array.dtype}", "bfloat16 or float16, what wgmma multiplies; take the XLA form")
    if not (q.dtype == k_pages.dtype == v_pages.dtype) or k_pages.shape != v_pages.shape:
        refuse(kernel, f"q {q.dtype}, k_pages {k_pages.dtype}{k_pages.shape}, v_pages {v_pages.dtype}{v_pages.shape}",
               "one type, and one shape of the pages")
    if page_size % 8:
        refuse(kernel, f"page_size={page_size}", "a multiple of 8, the rows of a swizzled tile")
    if head_dim % 32 or not 32 <= head_dim <= 256:
        refuse(kernel, f"head_dim={head_dim}", "a multiple of 32 up to 256")
    if width % head_dim or num_heads % (width // head_dim):
        refuse(kernel, f"{num_heads} query heads of {head_dim} on pages of width {width}",
               "whole kv heads, and a multiple of them")
    if sliding_window is not None and sliding_window < 1:
        refuse(kernel, f"sliding_window={sliding_window}", "at least 1, or None")


def given_or_tuned(kernel: str, kind: type[T], blocks: T | None, head_dim: int, page_size: int) -> T | None:
    """The blocks that were asked for, or those measured on this device; None leaves them to the rule.

    Raises:
      UnsupportedKernel: blocks of another kernel, or sizes that no layout serves.
    """
    if blocks is None:
        return tuned_blocks("mosaic_gpu", kernel, _device_kind(), head_dim=head_dim, page_size=page_size)
    if not isinstance(blocks, kind):
        refuse(kernel, f"blocks={blocks}", f"{kind.__name__} or None")
    if blocks.kv_tokens % WGMMA_ROWS or not WGMMA_ROWS <= blocks.kv_tokens <= 256:
        refuse(kernel, f"{blocks}", f"kv_tokens of {WGMMA_ROWS}, 128, 192 or 256, what one wgmma takes; "
                                    "a page may be a part of that or hold several of them")
    if blocks.num_stages < 1 or not isinstance(blocks, ExtendBlocks) and blocks.num_splits < 1:
        refuse(kernel, f"{blocks}", "num_stages and num_splits of at least 1")
    return blocks


def choose(kernel: str, blocks: Blocks | None, key_tokens: Iterable[int], *, num_splits: int = 1, page_size: int,
           **sizes: Any) -> Layout:
    """The layout of `blocks`, or the first of the rule that fits.

    The rule fills half of a multiprocessor where a block of threads has one warpgroup, so that two share it, and else
    all of it.

    Raises:
      UnsupportedKernel: it does not fit.
    """
    def layout(kv_tokens: int, num_stages: int) -> Layout:
        return Layout(kv_tokens=kv_tokens, num_stages=num_stages, num_splits=num_splits, page_size=page_size,
                      unit=math.gcd(page_size, kv_tokens), **sizes)

    if blocks is not None:
        chosen = layout(blocks.kv_tokens, blocks.num_stages)
        if chosen.smem_bytes <= SMEM_BYTES:
            return chosen
    else:
        for kv_tokens in key_tokens:
            for num_stages in range(_MAX_STAGES, 1, -1):
                chosen = layout(kv_tokens, num_stages)
                if chosen.smem_bytes <= (SMEM_BYTES if chosen.has_loader else _SHARED_SMEM_BYTES):
                    return chosen
        for num_stages in range(_MAX_STAGES, 1, -1):
            chosen = layout(WGMMA_ROWS, num_stages)
            if chosen.smem_bytes <= SMEM_BYTES:
                return chosen
    refuse(kernel, f"{chosen.num_warpgroups} x {WGMMA_ROWS} queries of {chosen.head_dim} with {chosen.num_stages} "
                   f"stages of {chosen.kv_tokens} keys take {chosen.smem_bytes:,} bytes of shared memory",
           f"at most {SMEM_BYTES:,}; give smaller blocks")


def splits(num_blocks: int, max_keys: int) -> int:
    """Parts of each context, so that `num_blocks` blocks of threads become a wave, and parts are worth their start."""
    return max(1, min(_WAVE // max(num_blocks, 1), max_keys // (4 * WGMMA_ROWS), _MAX_SPLITS))


def max_warpgroups(head_dim: int) -> int:
    """Warpgroups that compute side by side: their weighted sums must fit the registers."""
    return 3 if head_dim <= 128 else 2


def interpreter(kernel: str, interpret: Any) -> Any:
    """`plgpu.kernel`'s argument for what a caller gave: False, True or `InterpretGPUParams`.

    Raises:
      UnsupportedKernel: interpretation is asked for, and this jax has no interpreter of GPU kernels.
    """
    if not interpret:
        return False
    if not hasattr(plgpu, "InterpretGPUParams"):
        refuse(kernel, f"interpret={interpret} on jax {jax.__version__}", "jax 0.11 or later, or interpret=False")
    return plgpu.InterpretGPUParams() if interpret is True else interpret



def _device_kind() -> str:
    """Kind of the device a kernel traced now is meant for: the abstract mesh's, or the default one."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if abstract is None else abstract.device_kind
