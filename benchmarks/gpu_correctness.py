"""Section "correctness" of `gpu_check`: kernels against the float64 reference of their tests, and long contexts."""
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gpu_inputs import SIZES, Fields, kernels, make_pages, make_queries, page_shape, permuted_table
from jradix.ops import attention_xla

REFERENCE = Path(__file__).resolve().parents[1] / "tests" / "kernels" / "reference.py"
# Weights are rounded to 8 (bfloat16) or 11 bits (float16), and exp and tanh are the hardware's.
OUT_TOLERANCE = dict(bfloat16=8e-3, float16=2e-3)
LSE_TOLERANCE = 1e-3     # of up to 700 keys, one too many or too few is seen


class Combo(NamedTuple):
    """One combination of sizes and types that the kernels serve."""
    head_dim: int
    page_size: int
    group: int
    kv_heads: int
    dtype: str
    window: int | None
    cap: float | None

    def __str__(self) -> str:
        return (f"D {self.head_dim}, pages of {self.page_size}, heads {self.kv_heads} x {self.group}, {self.dtype}"
                + (f", window {self.window}" if self.window else "") + (f", cap {self.cap:g}" if self.cap else ""))


def combos(num: int) -> list[Combo]:
    """Any 8 in a row have all head dims, page sizes, groups and types; 16 have all pairs of the first two."""
    return [Combo((64, 128, 96, 256)[i % 4], (8, 16, 64, 128)[(i + i // 4) % 4], 1 + 3 * i % 8, 1 + i % 2,
                  ("bfloat16", "float16")[(i + i // 4) % 2], (None, 33, None, 150)[i // 2 % 4],
                  (None, None, 20.0)[i % 3]) for i in range(num)]


def correctness_cases(size: str) -> dict[str, Callable[[], Callable[[], Fields]]]:
    """Cases that prepare in other threads, and compare when they are called again."""
    found: dict[str, Callable[[], Callable[[], Fields]]] = {}
    for i, combo in enumerate(combos(SIZES[size].num_combos)):
        for kernel in ("decode", "extend", "shared_prefix"):
            if kernel == "shared_prefix":
                combo = combo._replace(window=None)
            found[f"{kernel}: {combo}"] = functools.partial(prepare_kernel, size, kernel, combo)
        if i % 3 == 0 and combo.kv_heads * combo.head_dim % 64 == 0:      # the widths that write_kv serves
            found[f"write_kv: {combo}"] = functools.partial(prepare_write, size, combo)
        if i == 0:
            found |= {f"{kernel}: long": functools.partial(functools.partial, compare_long, size, kernel)
                      for kernel in ("decode", "extend", "shared_prefix")}
    return found


def prepare_kernel(size: str, kernel: str, combo: Combo) -> Callable[[], Fields]:
    """Ragged rows on poisoned pages, compiled, and what the reference says of them."""
    oracle, rng = reference(), np.random.default_rng(combo.head_dim + combo.page_size + combo.group)
    page, settings = combo.page_size, dict(sm_scale=combo.head_dim**-0.5, soft_cap=combo.cap)
    starts = None
    if kernel == "shared_prefix":
        kv_lens, num_tokens = [4 * page, 12 * page, 0], 24     # padding groups stand last
        members = np.full((3, 22), num_tokens)
        members[0, :22], members[1, :2] = np.arange(22), (22, 23)
        tables = [np.array(kv_lens), members]
    elif kernel == "decode":
        kv_lens = [0, 1, page, 2 * page + 3, 700, 150]
        starts = np.array([0, 0, 0, page, 128, 0])
        num_tokens, tables = len(kv_lens), [np.array(kv_lens), starts]
    else:
        kv_lens, q_lens = [20, 0, 130, 700, 9], [20, 0, 128, 40, 1]
        num_tokens, tables = sum(q_lens) + 5, [np.array(kv_lens), np.cumsum([0, *q_lens])]
    if kernel != "shared_prefix":
        settings |= dict(sliding_window=combo.window)
    pool = oracle.make_pool(rng, kv_lens, page_size=page, width=combo.kv_heads * combo.head_dim)
    q = rng.standard_normal((num_tokens, combo.kv_heads * combo.group, combo.head_dim))
    floats = [np.asarray(array, jnp.dtype(combo.dtype)) for array in (q, *pool[:2])]
    arrays = [*floats, pool.page_table, *(table.astype(np.int32) for table in tables)]
    run = jax.jit(functools.partial(kernels(size)[1][kernel], **settings)).lower(*arrays).compile()
    expected = getattr(oracle, kernel)(*(array.astype(np.float32) for array in floats), pool.page_table, *tables,
                                       **settings)
    return lambda: compare(run(*arrays), expected, combo.dtype, is_decode=kernel == "decode")


def prepare_write(size: str, combo: Combo) -> Callable[[], Fields]:
    """Rows of both arrays, some of them outside the pages, against NumPy; donated, as in a step."""
    rng, width = np.random.default_rng(combo.page_size), combo.kv_heads * combo.head_dim
    dtype = jnp.dtype(combo.dtype)
    k_pages, v_pages = rng.standard_normal((2, 24, combo.page_size, width)).astype(dtype)
    k, v = rng.standard_normal((2, 40, width)).astype(dtype)
    num_slots = 24 * combo.page_size
    slots = rng.permutation(num_slots)[:40].astype(np.int32)
    slots[0], slots[1] = num_slots, -1
    run = jax.jit(kernels(size)[1]["write_kv"], donate_argnums=(0, 1)).lower(k_pages, v_pages, k, v, slots).compile()

    def measure() -> Fields:
        written = run(*map(jnp.asarray, (k_pages, v_pages)), k, v, slots)
        num_wrong = 0
        for pages, rows, got in zip((k_pages, v_pages), (k, v), written):
            expected = pages.copy().reshape(num_slots, width)
            expected[slots[2:]] = rows[2:]
            num_wrong += int((np.asarray(got).reshape(num_slots, width) != expected).sum())
        return dict(ok=not num_wrong, num_wrong=num_wrong)

    return measure


def compare_long(size: str, kernel: str) -> Fields:
    """Contexts of thousands of keys, against the XLA form on the same numbers in float32."""
    sizes = SIZES[size]
    context = sizes.prefix if kernel == "extend" else sizes.contexts[1]
    num_rows, page = (1 if kernel == "extend" else sizes.rows[-2]), sizes.pages[0]
    table = permuted_table(num_rows, context // page, 1 + num_rows * context // page)
    k_pages, v_pages = make_pages(page_shape(size, 1 + num_rows * context // page, page))
    q = make_queries(size, sizes.chunk if kernel == "extend" else num_rows)
    lens = jnp.full(num_rows, context - (0 if kernel == "shared_prefix" else 5), jnp.int32)
    rest = dict(decode=(table, lens), extend=(table, lens, jnp.array([0, sizes.chunk - 3])),
                shared_prefix=(table[:1], lens[:1], jnp.arange(num_rows)[None]))[kernel]
    run, exact = (functools.partial(form, sm_scale=sizes.heads[2]**-0.5)
                  for form in (kernels(size)[1][kernel], getattr(attention_xla, kernel)))
    expected = jax.jit(exact)(*(array.astype(jnp.float32) for array in (q, k_pages, v_pages)), *rest)
    got = jax.jit(run)(q, k_pages, v_pages, *rest)
    num_real = sizes.chunk - 3 if kernel == "extend" else None
    return compare([array[:num_real] for array in got], [np.asarray(array)[:num_real] for array in expected],
                   str(q.dtype), is_decode=kernel == "decode")


def compare(got: Sequence[Array], expected: Sequence[np.ndarray], dtype: str, *, is_decode: bool) -> Fields:
    """Largest differences where a query sees a key; elsewhere the output has to be finite, and decode to say -inf."""
    (out, lse), (right, right_lse) = (np.asarray(array) for array in got), expected
    is_seen = np.isfinite(right_lse)
    out_error = float(np.abs(out[is_seen] - right[is_seen]).max())
    lse_error = float(np.abs(lse[is_seen] - right_lse[is_seen]).max())
    is_finite = bool(np.isfinite(out).all() and not np.isnan(lse).any())
    is_empty = not is_decode or bool((lse[~is_seen] == -np.inf).all())
    return dict(ok=is_finite and is_empty and out_error <= OUT_TOLERANCE[dtype] and lse_error <= LSE_TOLERANCE,
                out_error=out_error if is_finite else None, lse_error=lse_error if is_finite else None,
                is_finite=is_finite)


@functools.cache
def reference() -> ModuleType:
    """The float64 reference of the kernels' tests."""
    spec = importlib.util.spec_from_file_location("kernel_reference", REFERENCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
