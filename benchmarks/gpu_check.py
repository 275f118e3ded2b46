"""Check of the attention kernels on a GPU: are they right, how fast, and what do they do for the seed workloads.

    python benchmarks/gpu_check.py --json gpu_check.json
    python benchmarks/gpu_check.py --size tiny       # on any machine: the XLA form stands in for the kernels

Sections, in this order:
  correctness  every kernel against the float64 reference of tests/kernels; long contexts against float32 in XLA
  decode       GB/s of keys and values that are read, against a copy on the same device
  extend       TFLOP/s, against a bfloat16 matrix product on the same device
  sharing      decode rows that read one prefix together, against each by itself
  workloads    the seed workloads on an 8B-shaped model with random weights, cache on, then cache off

Cases run in a process beside this one. When it hangs or dies, the case at fault is recorded and a new process goes on
with the next one. The file is written after every case, so that a cut leaves what was done. Exit code 1: a case failed.
"""
from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jradix.config import SHARED_MEMBERS, EngineConfig, StepShapes
from jradix.engine import Engine
from jradix.models.config import ModelConfig, RopeConfig
from jradix.models.decoder import Decoder
from jradix.ops import attention_xla
from jradix.ops.attention import SharedPrefixes, paged_attention
from jradix.ops.kv_cache import write_pages
from jradix.outputs import RequestOutput
from jradix.runner.memory import free_bytes, plan_memory
from jradix.runner.runner import ModelRunner
from jradix.sampling_params import SamplingParams
from pallas_kernels import mosaic_gpu
from pallas_kernels.errors import UnsupportedKernel
from report import machine, print_result, print_table, summarise
from workloads import WORKLOADS, Request, drive, minimum_computed_tokens

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 350.0
RANDOM_PAGES = 512
FAULTS = RuntimeError, ValueError, TypeError, LookupError, AssertionError     # others end the process, and only that
Fields = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What one `--size` measures.

    Attributes:
      heads: query heads, kv heads and head_dim of the timed sections and of the model.
      pages: page sizes of the timed decode steps.
      rows, contexts: of those steps.
      chunk: flat tokens of a call of extend.
      chunks: name -> (new tokens, context) of each row.
      sharing: rows on one prefix.
      prefix, own: tokens of the prefix, and of each row behind it.
      loops, repeats: calls in one timed loop, and timed loops.
      copied, product: numbers that the copy moves; rows and columns of the matrix product.
      num_combos: combinations of sizes in the correctness section.
      model: vocabulary, hidden, intermediate, layers.
      engine: rows, prompt tokens per step, longest request.
    """
    workload: str
    heads: tuple[int, int, int]
    pages: tuple[int, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk: int
    chunks: dict[str, tuple[tuple[int, int], ...]]
    sharing: tuple[int, ...]
    prefix: int
    own: int
    loops: int
    repeats: int
    copied: int
    product: int
    num_combos: int
    model: tuple[int, int, int, int]
    engine: tuple[int, int, int]


SIZES = dict(
    default=Sizes("gpu_check", (32, 8, 128), (16, 64), (1, 16, 64, 256), (1024, 4096, 32_768), 2048,
                  {"2048 of 2048": ((2048, 2048),), "2048 of 8192": ((2048, 8192),),
                   "8 x 256 of 4096": ((256, 4096),) * 8, "512 of 32768": ((512, 32_768),)},
                  (16, 64), 8192, 64, 20, 7, 1 << 29, 8192, 16, (128_256, 4096, 14_336, 32), (128, 2048, 10_752)),
    tiny=Sizes("tiny", (4, 2, 64), (16,), (2, 4), (32, 64), 16,
               {"2 x 8 of 64": ((8, 64),) * 2}, (8,), 64, 16, 2, 1, 1 << 18, 128, 2, (49_152, 64, 64, 1), (4, 64, 256)))


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


def kernels(size: str) -> tuple[str, dict[str, Callable[..., Any]]]:
    """Name of the implementation that a size checks, and its functions."""
    form = attention_xla if size == "tiny" else mosaic_gpu
    found = {name: getattr(form, name) for name in ("decode", "extend", "shared_prefix")}
    if size == "tiny":
        return "xla", found | dict(write_kv=lambda k_pages, v_pages, k, v, slots: (
            write_pages(k_pages, k, slots), write_pages(v_pages, v, slots)))
    return "mosaic_gpu", found | dict(write_kv=mosaic_gpu.write_kv)


# -- correctness

# Weights are rounded to 8 (bfloat16) or 11 bits (float16), and exp and tanh are the hardware's.
OUT_TOLERANCE = dict(bfloat16=8e-3, float16=2e-3)
LSE_TOLERANCE = 1e-3     # of up to 700 keys, one too many or too few is seen


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
    spec = importlib.util.spec_from_file_location("kernel_reference", ROOT / "tests" / "kernels" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- speed


class Loop:
    """A function in a jitted loop, each result the next call's first argument; compiled, with no memory taken yet.

    Args:
      size: a key of `SIZES`.
      step: `step(x, *rest)`, of x's shape and type.
      shapes: of x and the rest.
    """

    def __init__(self, size: str, step: Callable[..., Array], *shapes: Any) -> None:
        once = jax.jit(step)        # so that the kernel is lowered once
        self._num_calls, self._repeats = SIZES[size].loops, SIZES[size].repeats

        def run(x: Array, *rest: Any) -> tuple[Array, Array]:
            first = once(x, *rest)
            return first, lax.fori_loop(1, self._num_calls, lambda _, x: once(x, *rest), first)

        self._run = jax.jit(run).lower(*shapes).compile()

    def measure(self, *arrays: Any) -> tuple[float, Array]:
        """Median seconds of a call over warm loops, and the result of the first call."""
        first, _ = jax.block_until_ready(self._run(*arrays))
        times = []
        for _ in range(self._repeats):
            start = time.perf_counter()
            jax.block_until_ready(self._run(*arrays))
            times.append((time.perf_counter() - start) / self._num_calls)
        return summarise(times).median, first


@functools.cache
def copy_gb_per_s(size: str) -> float:
    """Bytes read and written by an elementwise pass over memory."""
    x = jnp.arange(SIZES[size].copied, dtype=jnp.uint32)
    return 2 * x.nbytes / Loop(size, lambda x: x * 3 + 1, x).measure(x)[0] / 1e9


@functools.cache
def product_tflop_per_s(size: str) -> float:
    n = SIZES[size].product
    x, y = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
    loop = Loop(size, lambda x, y: (lax.dot(x, y, preferred_element_type=jnp.float32) / n**0.5).astype(x.dtype), x, y)
    return 2 * n**3 / loop.measure(x, y)[0] / 1e12


def query_shape(size: str, num: int) -> jax.ShapeDtypeStruct:
    heads, _, head_dim = SIZES[size].heads
    return jax.ShapeDtypeStruct((num, heads, head_dim), jnp.bfloat16)


def make_queries(size: str, num: int) -> Array:
    return jax.random.normal(jax.random.key(num), query_shape(size, num).shape, jnp.bfloat16)


def page_shape(size: str, num_pages: int, page_size: int) -> jax.ShapeDtypeStruct:
    """Pages of a layer, at least so many: whole blocks of `RANDOM_PAGES` where there are more than one."""
    _, kv_heads, head_dim = SIZES[size].heads
    block = min(num_pages, RANDOM_PAGES)
    return jax.ShapeDtypeStruct((-(-num_pages // block) * block, page_size, kv_heads * head_dim), jnp.bfloat16)


@functools.lru_cache(maxsize=1)
def make_pages(shape: jax.ShapeDtypeStruct) -> tuple[Array, Array]:
    """Keys and values of a layer. The numbers repeat every `RANDOM_PAGES` pages: fresh ones would cost too much."""
    num_pages, *rest = shape.shape
    block = math.gcd(num_pages, RANDOM_PAGES) if num_pages > RANDOM_PAGES else num_pages
    spread = jax.jit(lambda pages: jnp.broadcast_to(pages, (num_pages // block, *pages.shape)).reshape(shape.shape))
    k_pages, v_pages = jax.random.normal(jax.random.key(0), (2, block, *rest), shape.dtype)
    return spread(k_pages), spread(v_pages)


def permuted_table(num_rows: int, num_columns: int, num_pages: int) -> Array:
    """int32[S, M], each row on pages of its own in no order; page 0 is nobody's."""
    pages = 1 + np.random.default_rng(0).permutation(num_pages - 1)[:num_rows * num_columns]
    return jnp.asarray(pages.reshape(num_rows, num_columns), jnp.int32)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def attend_step(size: str, kernel: str) -> Callable[..., Array]:
    run, scale = kernels(size)[1][kernel], SIZES[size].heads[2]**-0.5
    return lambda q, *rest: run(q, *rest, sm_scale=scale)[0].astype(q.dtype)


def decode_cases(size: str) -> dict[str, Callable[[], Callable[[], Fields]]]:
    return {f"{rows} rows, pages of {page}": functools.partial(prepare_decode, size, rows, page)
            for page in SIZES[size].pages for rows in SIZES[size].rows}


def prepare_decode(size: str, num_rows: int, page_size: int) -> Callable[[], Fields]:
    """One page table as wide as the longest context, as in an engine: only the lengths differ between contexts."""
    sizes = SIZES[size]
    longest, (_, kv_heads, head_dim) = sizes.contexts[-1], sizes.heads
    token_bytes = 4 * kv_heads * head_dim
    num_tokens = min(sizes.rows[-1] * longest, pool_bytes() // token_bytes)
    num_pages, num_columns = 1 + num_tokens // page_size, longest // page_size
    pages = page_shape(size, num_pages, page_size)
    loop = Loop(size, attend_step(size, "decode"), query_shape(size, num_rows), pages, pages,
                ints(num_rows, num_columns), ints(num_rows))

    def measure() -> Fields:
        fields: Fields = {}
        for context in sizes.contexts:
            if num_rows * context > num_tokens:
                fields[f"left_out_{context}"] = f"{num_rows * context * token_bytes:,} bytes of pages"
                continue
            table = np.zeros((num_rows, num_columns), np.int32)
            table[:, :context // page_size] = permuted_table(num_rows, context // page_size, num_pages)
            took, _ = loop.measure(make_queries(size, num_rows), *make_pages(pages), table,
                                   np.full(num_rows, context, np.int32))
            speed = num_rows * context * token_bytes / took / 1e9
            fields |= {f"us_{context}": took * 1e6, f"gb_per_s_{context}": speed,
                       f"of_copy_{context}": speed / copy_gb_per_s(size)}
        return fields | dict(copy_gb_per_s=copy_gb_per_s(size))

    return measure


@functools.cache
def pool_bytes() -> int:
    """Bytes for the pages of a layer; two such pools are held while one takes the other's place."""
    return int(free_bytes(jax.devices()[0]) * 0.4)


def extend_cases(size: str) -> dict[str, Callable[[], Callable[[], Fields]]]:
    return {name: functools.partial(prepare_extend, size, rows) for name, rows in SIZES[size].chunks.items()}


def prepare_extend(size: str, rows: tuple[tuple[int, int], ...]) -> Callable[[], Fields]:
    """Chunks in a shape of 8 rows, the others empty."""
    sizes = SIZES[size]
    heads, _, head_dim = sizes.heads
    page, longest = sizes.pages[0], max(length for chunk in sizes.chunks.values() for _, length in chunk)
    num_pages = 1 + 8 * longest // page
    pages = page_shape(size, num_pages, page)
    loop = Loop(size, attend_step(size, "extend"), query_shape(size, sizes.chunk), pages, pages,
                ints(8, longest // page), ints(8), ints(9))

    def measure() -> Fields:
        q_lens, kv_lens = np.array([*rows, *[(0, 0)] * (8 - len(rows))], np.int32).T
        cu_q_lens = np.array([0, *np.cumsum(q_lens)], np.int32)
        took, _ = loop.measure(make_queries(size, sizes.chunk), *make_pages(pages),
                               permuted_table(8, longest // page, num_pages), kv_lens.copy(), cu_q_lens)
        num_pairs = sum(new * length - new * (new - 1) // 2 for new, length in rows)
        speed, product = 4 * head_dim * heads * num_pairs / took / 1e12, product_tflop_per_s(size)
        return dict(us=took * 1e6, tflop_per_s=speed, product_tflop_per_s=product, of_product=speed / product)

    return measure


def sharing_cases(size: str) -> dict[str, Callable[[], Callable[[], Fields]]]:
    return {f"{rows} rows on {SIZES[size].prefix}, {members} at a time": functools.partial(
                prepare_sharing, size, rows, members)
            for rows in SIZES[size].sharing for members in sorted({SHARED_MEMBERS, rows})}


def prepare_sharing(size: str, num_rows: int, num_members: int) -> Callable[[], Fields]:
    """The operation with and without `shared`; `num_members` rows are one part of a group. The results agree."""
    sizes, page = SIZES[size], SIZES[size].pages[0]
    prefix_columns, own_columns, parts = sizes.prefix // page, sizes.own // page, -(-num_rows // num_members)
    num_pages = 1 + prefix_columns + num_rows * own_columns

    def step(q: Array, *rest: Any) -> Array:
        return paged_attention(q, *rest[:6], shared=rest[6] if len(rest) > 6 else None, has_chunks=False,
                               sm_scale=sizes.heads[2]**-0.5, implementation=kernels(size)[0]).astype(q.dtype)

    pages = page_shape(size, num_pages, page)
    shapes = (query_shape(size, num_rows), pages, pages, ints(num_rows, prefix_columns + own_columns),
              ints(num_rows), ints(num_rows + 1), ints())
    apart = Loop(size, step, *shapes)
    together = Loop(size, step, *shapes, SharedPrefixes(ints(parts, prefix_columns), ints(parts),
                                                        ints(parts, num_members)))

    def measure() -> Fields:
        ids = permuted_table(1, num_pages - 1, num_pages)[0]
        prefix = jnp.broadcast_to(ids[:prefix_columns], (num_rows, prefix_columns))
        table = jnp.concatenate([prefix, ids[prefix_columns:].reshape(num_rows, own_columns)], axis=1)
        shared = SharedPrefixes(prefix[:parts], jnp.full(parts, sizes.prefix, jnp.int32),
                                jnp.arange(parts * num_members, dtype=jnp.int32).reshape(parts, num_members))
        arrays = (make_queries(size, num_rows), *make_pages(pages), table,
                  jnp.full(num_rows, sizes.prefix + sizes.own, jnp.int32), jnp.arange(num_rows + 1, dtype=jnp.int32),
                  jnp.int32(num_rows))
        (slow, expected), (fast, got) = apart.measure(*arrays), together.measure(*arrays, shared)
        error = float(jnp.abs(got.astype(jnp.float32) - expected.astype(jnp.float32)).max())
        return dict(ok=error <= OUT_TOLERANCE["bfloat16"], apart_us=slow * 1e6, together_us=fast * 1e6,
                    speedup=slow / fast, out_error=error)

    return measure


# -- workloads

SEED_WORKLOADS = "react", "mcts", "chatbot", "noshare"
OFF_BUDGET_S = 60.0      # of all runs without the cache together


def workload_cases(size: str) -> dict[str, Callable[[], Fields]]:
    return {"model": lambda: bench(size).describe()} | {
        f"{name}, cache {'on' if is_on else 'off'}": lambda name=name, is_on=is_on: bench(size).measure(name, is_on)
        for is_on in (True, False) for name in SEED_WORKLOADS}


@functools.lru_cache(maxsize=1)
def bench(size: str) -> Bench:
    return Bench(size)


class Bench:
    """An engine on random weights with a few compiled shapes, and what its runs without the cache have left to spend.

    Args:
      size: a key of `SIZES`.
    """

    def __init__(self, size: str) -> None:
        self.workload_size = SIZES[size].workload
        config, (num_rows, chunk, longest) = model_config(size), SIZES[size].engine
        device, dtype = jax.devices()[0], jnp.dtype(jnp.float32 if size == "tiny" else jnp.bfloat16)
        self._implementation, self._refusal = serving_attention(size, config, dtype)
        plan = plan_memory(config, device=device, weight_dtype=dtype, kv_dtype=dtype, page_size=16,
                           max_num_seqs=num_rows, step_tokens=num_rows + chunk,
                           kv_cache_bytes=1 << 22 if size == "tiny" else None)
        started = time.perf_counter()
        model = jax.block_until_ready(Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
        self._init_s = time.perf_counter() - started
        engine_config = EngineConfig(page_size=16, num_pages=plan.num_pages, max_model_len=longest,
                                     max_num_seqs=num_rows, prefill_chunk_tokens=chunk, grammar_bytes=0)
        self._runner = ModelRunner(model, config, engine_config, device=device, kv_dtype=dtype,
                                   implementation=self._implementation)
        self._runner.shapes = StepShapes(tuple(sorted({min(16, num_rows), num_rows})), (num_rows,), (chunk,))
        self._engine = Engine(self._runner, engine_config, seed=0)
        self._memory = plan
        self._off_left_s = OFF_BUDGET_S
        self._outputs: dict[str, list[list[int]]] = {}
        self._warmup_s = {}
        for shape in self._runner.shapes.all():
            started = time.perf_counter()
            layout = self._runner.layout(shape)
            packed = layout.allocate()
            layout.step_batch(packed.ints).row_slots.fill(self._runner.spare_slot)
            jax.block_until_ready(self._runner.dispatch(packed, shape).tokens)
            self._warmup_s[f"{shape.num_rows} + {shape.num_chunk_tokens}"] = time.perf_counter() - started
        self._run(WORKLOADS["mcts"]("tiny", 1), float("inf"))      # what copies pages
        self._num_programs = self._runner.num_compiled

    def describe(self) -> Fields:
        return dict(implementation=self._implementation, refused=self._refusal, init_s=self._init_s,
                    weight_bytes=self._memory.weight_bytes, pool_tokens=self._memory.num_pages * 16,
                    warmup_s=self._warmup_s)

    def measure(self, name: str, is_on: bool) -> Fields:
        """One run of a workload from an empty cache."""
        self._engine.cache.clear()
        self._engine.cache.enabled = is_on
        before, started = self._engine.stats(), time.perf_counter()
        done, outputs, is_cut = self._run(WORKLOADS[name](self.workload_size),
                                          float("inf") if is_on else self._off_left_s)
        wall, after = time.perf_counter() - started, self._engine.stats()
        tokens = {key: after["tokens"][key] - before["tokens"][key] for key in before["tokens"]}
        steps = after["steps"] - before["steps"]
        fields = dict(wall_s=wall, prompt_tokens=tokens["computed_prompt"] + tokens["cached_prompt"],
                      computed_prompt_tokens=tokens["computed_prompt"], output_tokens=tokens["generated"],
                      tokens_per_s=(tokens["computed_prompt"] + tokens["generated"]) / wall, steps=steps,
                      ms_per_step=wall / max(steps, 1) * 1e3, is_cut=is_cut,
                      compiled_after_warmup=self._runner.num_compiled - self._num_programs)
        if not is_on:
            self._off_left_s -= wall
        if not is_cut:
            ttft = summarise([output.metrics.ttft_s for output in outputs], 1e3)
            fields |= dict(computed_over_fewest=tokens["computed_prompt"] / minimum_computed_tokens(done),
                           ttft_ms=ttft.median)
            ids = [output for _, output in done]
            if (known := self._outputs.setdefault(name, ids)) is not ids:
                fields["same_outputs"] = f"{sum(a == b for a, b in zip(known, ids))} of {len(ids)}"
        return fields

    def _run(self, workload: Any, seconds: float) -> tuple[list[tuple[Request, list[int]]], list[RequestOutput], bool]:
        """Requests with their output ids, the outputs, and whether time ran out; then the requests are incomplete."""
        end, finished = time.perf_counter() + seconds, []

        def run_batch(batch: list[Request]) -> list[list[int]]:
            names = [self._engine.add_request(request.prompt, SamplingParams(
                temperature=0.0, max_tokens=request.num_output, ignore_eos=True)) for request in batch]
            outputs: dict[str, RequestOutput] = {}
            while self._engine.has_unfinished:
                if time.perf_counter() > end:
                    self._engine.drop_all()
                    raise TimeoutError(f"a workload took more than {seconds:.0f} s")
                outputs |= {output.request_id: output for output in self._engine.step()}
            finished.extend(outputs[name] for name in names)
            return [outputs[name].outputs[0].token_ids for name in names]

        try:
            return drive(workload, run_batch), finished, False
        except TimeoutError:
            return [], finished, True


def model_config(size: str) -> ModelConfig:
    vocab, hidden, intermediate, layers = SIZES[size].model
    heads, kv_heads, head_dim = SIZES[size].heads
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5,
        tie_embeddings=False, attention_bias=False, attention_out_bias=False, mlp_bias=False, qk_norm=False,
        rope=RopeConfig(theta=500_000.0, dim=head_dim), layer_windows=(None,) * layers, max_model_len=131_072)


def serving_attention(size: str, config: ModelConfig, dtype: jnp.dtype) -> tuple[str, str | None]:
    """The kernels where they serve a step of the engine, else "xla" and why not."""
    name = kernels(size)[0]
    pages = jax.ShapeDtypeStruct((4, 16, config.kv_width), dtype)
    table, lens, cu_q_lens, num_decode = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 3), (2,), (3,), ()))
    q = jax.ShapeDtypeStruct((8, config.num_heads, config.head_dim), jnp.float32)
    try:
        jax.eval_shape(functools.partial(paged_attention, sm_scale=1.0, implementation=name), q, pages, pages, table,
                       lens, cu_q_lens, num_decode)
    except UnsupportedKernel as error:
        return "xla", str(error)
    return name, None


# -- the process that runs cases, and the one that watches it


@dataclass(frozen=True)
class Section:
    """Attributes:
      cases: of a size: name -> what measures it, or prepares its measurement where there are threads for that.
      budget_s: seconds after which the rest of its cases is left out.
      stall_s: seconds without a result after which a case counts as hung.
      num_threads: that prepare cases ahead, compiling above all; 0: none.
      is_timed: cases wait until all are prepared, because compiling disturbs the clock.
    """
    cases: Callable[[str], dict[str, Callable[[], Any]]]
    budget_s: float
    stall_s: float
    num_threads: int = 0
    is_timed: bool = False


SECTIONS = dict(
    correctness=Section(correctness_cases, 110.0, 45.0, num_threads=8),
    decode=Section(decode_cases, 60.0, 50.0, num_threads=8, is_timed=True),
    extend=Section(extend_cases, 30.0, 25.0, num_threads=8, is_timed=True),
    sharing=Section(sharing_cases, 45.0, 40.0, num_threads=8, is_timed=True),
    workloads=Section(workload_cases, 240.0, 200.0))


def plan_cases(size: str) -> list[tuple[str, str]]:
    """Section and name of every case, in order."""
    return [(section, case) for section in SECTIONS for case in SECTIONS[section].cases(size)]


def serve(size: str, first: int) -> int:
    """Runs the cases from number `first` on, and prints one JSON line for each; 3 when the device is unusable."""
    if size == "tiny":
        jax.config.update("jax_disable_most_optimizations", True)      # compiling is what it costs
    print(json.dumps(dict(device=str(jax.devices()[0].device_kind), platform=jax.default_backend())), flush=True)
    for name, members in itertools.groupby(plan_cases(size)[first:], key=lambda case: case[0]):
        section = SECTIONS[name]
        cases = [section.cases(size)[case] for _, case in members]
        with ThreadPoolExecutor(section.num_threads or 1) as pool:
            ahead = [pool.submit(case) for case in cases] if section.num_threads else []
            wait(ahead if section.is_timed else ())
            for i, case in enumerate(cases):
                try:
                    fields = ahead[i].result()() if ahead else case()
                except FAULTS as error:
                    traceback.print_exc()
                    fields = dict(ok=False, error=f"{type(error).__name__}: {error}"[:2000])
                print(json.dumps(fields), flush=True)
                if "error" in fields and not is_device_usable():
                    pool.shutdown(wait=False, cancel_futures=True)
                    return 3
        make_pages.cache_clear()       # the memory is the next section's
    return 0


def is_device_usable() -> bool:
    """Whether a fault left the device's context intact: one wild access ends it for the whole process."""
    try:
        return int(jnp.arange(3).sum()) == 3
    except RuntimeError:
        return False


class Worker:
    """A process that runs the cases from one on.

    Args:
      size: a key of `SIZES`.
      first: number of the first case.
    """

    def __init__(self, size: str, first: int) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--size", size, "--serve-from", str(first)],
            stdout=subprocess.PIPE, text=True, env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)))
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, timeout_s: float) -> Fields | None:
        """The next line, None when the process has ended. Raises queue.Empty when none comes in time."""
        line = self._lines.get(timeout=max(timeout_s, 0.0))
        return None if line is None else json.loads(line)

    def stop(self) -> int:
        """Ends the process, unless it has ended by itself; returns its exit code."""
        self._process.kill()
        return self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)


def watch(size: str, budget_s: float, took: Callable[[str, str, Fields, float], None]) -> Fields:
    """Runs all cases, as far as the budgets reach.

    Args:
      took: called with section, case, what became of it, and the seconds since the one before.

    Returns:
      What the worker says of its device; empty when none ever started.
    """
    plan, device, worker = plan_cases(size), {}, None
    started: dict[str, float] = {}
    last = time.monotonic()
    end, i = last + budget_s, 0
    try:
        while i < len(plan):
            section, case = plan[i]
            rule, now = SECTIONS[section], time.monotonic()
            section_end, stalled = started.setdefault(section, now) + rule.budget_s, last + rule.stall_s
            if now >= min(end, section_end):
                over = f"the total of {budget_s:g} s" if now >= end else f"{section}'s {rule.budget_s:g} s"
                fields, is_over = dict(not_run=f"{over} had passed"), True
            elif now >= stalled:
                fields, is_over = dict(ok=False, error=f"no result in {rule.stall_s:g} s; stopped"), True
            else:
                worker = worker or Worker(size, i)
                try:
                    fields = worker.next(min(stalled, end, section_end) - now)
                except queue.Empty:
                    continue
                if is_over := fields is None:
                    fields = dict(ok=False, error=f"the process ended with code {worker.stop()}")
            if is_over and worker is not None:
                worker.stop()
                worker = None
            now, last = last, time.monotonic()
            if "device" in fields:
                device = fields
            else:
                took(section, case, fields, last - now)
                i += 1
    finally:
        if worker is not None:
            worker.stop()
    return device


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="default")
    parser.add_argument("--json", type=Path, help="file for the results; written after every case")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--serve-from", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve_from is not None:
        return serve(options.size, options.serve_from)
    sections: dict[str, Fields] = {name: dict(state="cut", wall_s=0.0, cases=[]) for name in SECTIONS}
    result: Fields = dict(size=options.size, implementation=kernels(options.size)[0], budget_s=options.budget,
                          sections=sections)
    plan = plan_cases(options.size)

    def took(section: str, case: str, fields: Fields, seconds: float) -> None:
        found = sections[section]
        found["cases"].append(dict(case=case, **fields))
        found["wall_s"] += seconds
        if len(found["cases"]) == sum(name == section for name, _ in plan):
            num_left_out = sum("not_run" in line for line in found["cases"])
            found["state"] = ("skipped" if num_left_out == len(found["cases"]) else
                              "cut" if num_left_out else "done")
            print_section(section, found)
        if options.json is not None:
            write_json(options.json, dict(benchmark="gpu_check", machine=machine(), **result))

    device = watch(options.size, options.budget, took)
    failed = [f"{name}: {line['case']}" for name, found in sections.items() for line in found["cases"]
              if line.get("ok") is False]
    result |= dict(device=device.get("device"), platform=device.get("platform"), failed=failed)
    if options.json is not None:
        write_json(options.json, dict(benchmark="gpu_check", machine=machine(device.get("device", "none")), **result))
    print_result("gpu_check", result, device.get("device", "none"))
    return 1 if failed else 0


def print_section(name: str, section: Fields) -> None:
    """A table of the numbers, and in notes what was left out or failed."""
    texts = "not_run", "error", "refused", "warmup_s"
    measured = [line for line in section["cases"] if "not_run" not in line]
    columns = list(dict.fromkeys(key for line in measured for key in line if key not in ("case", *texts)))
    rows = [[line["case"], *(line.get(key) for key in columns)] for line in measured]
    notes = [f"{line['case']}: {key.replace('_', ' ')}: {str(line[key]).splitlines()[0]}"
             for line in section["cases"] for key in texts if line.get(key)]
    print_table(f"{name}: {section['state']}, {section['wall_s']:.0f} s",
                [["", *(key.replace("_", " ") for key in columns)], *rows], notes)
    sys.stdout.flush()


def write_json(path: Path, content: Fields) -> None:
    """Replaces the file as a whole, so that it can be read at any moment."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
