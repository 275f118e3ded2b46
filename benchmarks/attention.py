"""Benchmark of the paged attention operation: each implementation of this device, against reading the KV once.

    python benchmarks/attention.py [--implementation native xla]

Decode rows, prefill chunks and a shared prefix, one layer of the model's shapes, a pool larger than the caches. The
yardstick is the sum over the same pages' K and V in the same turns: no attention reads less.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jradix.config import SHARED_MEMBERS
from jradix.model_files import resolve
from jradix.ops.attention import IMPLEMENTATIONS, SharedPrefixes, paged_attention
from jradix.weights.loader import load_config
from pallas_kernels.errors import UnsupportedKernel
from report import print_result, print_table
from shared_prefix import in_turn

NUM_LAYERS = 8       # pools that are read in turn, so that they come from memory


@dataclass(frozen=True)
class Case:
    """`rows` contexts of `context` tokens, the last `new` of each new; `shared`: common to all rows."""
    rows: int
    context: int
    new: int = 1
    shared: int = 0

    @property
    def name(self) -> str:
        if self.new > 1:
            return f"chunk {self.new} to {self.context}"
        return f"decode {self.rows}x{self.context}" + (f", {self.shared} shared" if self.shared else "")


CASES = {"tiny": (Case(2, 40), Case(1, 40, new=17), Case(4, 40, shared=32)),
         "default": (Case(1, 2048), Case(8, 512), Case(8, 2048), Case(32, 512), Case(16, 2112, shared=2048),
                     Case(1, 512, new=512), Case(1, 1024, new=512), Case(1, 2048, new=512))}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(CASES), default="default")
    parser.add_argument("--model", default="demo", help="whose heads are taken")
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS,
                        help="default: all that this device has")
    parser.add_argument("--repeats", type=int, help="default 20, tiny 2")
    options = parser.parse_args(argv)
    repeats = options.repeats or (2 if options.size == "tiny" else 20)
    device = jax.devices(options.device)[0]
    model = load_config(resolve(options.model))
    table: list[list[Any]] = [["ms per layer", *(options.implementation or IMPLEMENTATIONS), "read once",
                               "best / read"]]
    lines, refused = [], {}
    with jax.default_device(device):
        for case in CASES[options.size]:
            calls = {}
            for name in options.implementation or IMPLEMENTATIONS:
                try:
                    calls[name] = make_call(case, name, options, model.num_heads, model.num_kv_heads, model.head_dim)
                    calls[name]()
                except UnsupportedKernel as error:
                    if options.implementation:
                        raise
                    refused[name] = str(error)
                    calls.pop(name, None)
            read = make_call(case, None, options, model.num_heads, model.num_kv_heads, model.head_dim)
            times = np.median(in_turn([*calls.values(), read], repeats), axis=1) / NUM_LAYERS * 1e3
            found = dict(zip([*calls, "read"], map(float, times)))
            ratio = min(found[name] for name in calls) / found["read"]
            table.append([case.name, *(found.get(name) for name in options.implementation or IMPLEMENTATIONS),
                          found["read"], ratio])
            lines.append(dict(case=case.name, **{f"{name}_ms": value for name, value in found.items()},
                              best_over_read=ratio))
    notes = [f"medians of {repeats} calls in turn, {NUM_LAYERS} layers each"]
    print_table("paged attention", table, notes + [f"not {name}: {reason}" for name, reason in refused.items()])
    result = dict(size=options.size, kv_dtype=options.kv_dtype, page_size=options.page_size, cases=lines,
                  refused=refused)
    print_result("attention", result, f"{device.platform}:{device.id} ({device.device_kind})")
    return 0


def make_call(case: Case, implementation: str | None, options: argparse.Namespace, num_heads: int, num_kv_heads: int,
              head_dim: int) -> Callable[[], None]:
    """All layers of one case, waited for; implementation None: the sum over the pages that they read."""
    rng = np.random.default_rng(0)
    page_size, rows = options.page_size, case.rows
    pages, shared_pages = -(-case.context // page_size), case.shared // page_size
    num_pages = 1 + rows * pages
    table = 1 + rng.permutation(rows * pages).astype(np.int32).reshape(rows, pages)
    table[:, :shared_pages] = table[0, :shared_pages]
    pools = [[jnp.asarray(rng.standard_normal((num_pages, page_size, num_kv_heads * head_dim)), options.kv_dtype)
              for _ in range(2)] for _ in range(NUM_LAYERS)]
    if implementation is None:
        used = jnp.asarray(np.unique(table))
        contents = [[pool[used] for pool in layer] for layer in pools]
        read = jax.jit(lambda contents: [[pool.sum(dtype=jnp.float32) for pool in layer] for layer in contents])
        return lambda: jax.block_until_ready(read(contents))
    q = jnp.asarray(rng.standard_normal((rows * case.new, num_heads, head_dim)), jnp.float32)
    shared = None
    if case.shared:
        members = np.arange(rows, dtype=np.int32).reshape(-1, min(SHARED_MEMBERS, rows))
        shared = SharedPrefixes(jnp.asarray(table[members[:, 0]]), jnp.full(len(members), case.shared, jnp.int32),
                                jnp.asarray(members))
    ragged = (jnp.asarray(table), jnp.full(rows, case.context, jnp.int32),
              case.new * jnp.arange(rows + 1, dtype=jnp.int32), jnp.int32(rows if case.new == 1 else 0))

    @jax.jit
    def run(q: Array, pools: list[list[Array]], ragged: tuple[Array, ...], shared: SharedPrefixes | None) -> Array:
        for keys, values in pools:
            q = paged_attention(q, keys, values, *ragged, sm_scale=head_dim ** -0.5, shared=shared,
                                has_chunks=case.new > 1, implementation=implementation)
        return q

    return lambda: jax.block_until_ready(run(q, pools, ragged, shared))


if __name__ == "__main__":
    sys.exit(main())
