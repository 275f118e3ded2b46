"""Benchmark of attention to prefixes that rows share: whole decode steps with and without it, and what it costs.

    python benchmarks/shared_prefix.py [--fit]

Each case is one decode step of some rows behind a common prefix, with the rows as one group and with every row reading
the prefix by itself, in turn; and a step whose rows share nothing, with room for groups and compiled without it. The
ratios are medians of those of neighbouring calls.

`--fit` measures the attention alone for groups of several sizes and fits the cost by which the scheduler decides which
rows form a group; `--write` also puts it where jradix finds it, `pallas_kernels/tuned/shared_prefix.<device>.json`.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jradix.config import SHARED_MEMBERS, EngineConfig
from jradix.model_files import resolve
from jradix.models.config import ModelConfig
from jradix.models.decoder import Decoder
from jradix.ops.attention import SharedPrefixes, paged_attention
from jradix.runner.runner import ModelRunner
from jradix.weights.dtype import kv_dtype
from jradix.weights.loader import load_config, load_model
from pallas_kernels.blocks import TUNED
from report import print_result, print_table

PAGE_SIZE = 16
SUFFIX = 48              # tokens of each row after the prefix
GOALS = {"16 rows on 2048": 2.0, "nothing shared": 0.98}


@dataclass(frozen=True)
class Case:
    """`rows` decode rows behind `prefix` common tokens; prefix 0: rows of 512 tokens that share nothing."""
    rows: int
    prefix: int

    @property
    def name(self) -> str:
        return f"{self.rows} rows on {self.prefix}" if self.prefix else "nothing shared"


CASES = {"tiny": (Case(8, 64), Case(8, 0)),
         "default": (Case(16, 2048), Case(8, 1024), Case(16, 512), Case(32, 1024), Case(16, 0))}
FITS = {"tiny": ((8, 64), (4, 64), (2, 64), (8, 32)),
        "default": tuple((rows, prefix) for rows in (2, 4, 8, 16) for prefix in (256, 512, 1024, 2048))}
UNSHARED = 512           # tokens of rows that share nothing


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(CASES), default="default")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--repeats", type=int, help="of each step; default 15, tiny 3")
    parser.add_argument("--fit", action="store_true", help="also fit the scheduler's cost")
    parser.add_argument("--write", action="store_true", help="with --fit: write it for this device")
    options = parser.parse_args(argv)
    if options.write and not options.fit:
        parser.error("--write needs --fit")
    repeats = options.repeats or (3 if options.size == "tiny" else 15)
    device = jax.devices(options.device)[0]
    with jax.default_device(device):
        files = resolve(options.model)
        model_config = load_config(files)
        model = load_model(files, dtype=options.dtype, device=device)
        result: dict[str, Any] = dict(size=options.size, model=options.model, dtype=options.dtype, repeats=repeats)
        result["cases"] = [measure(case, model, model_config, options.dtype, device, repeats)
                           for case in CASES[options.size]]
        table = [["whole decode step, ms", "alone", "together", "alone / together", "goal", "holds"],
                 *([row["case"], row["alone_ms"], row["together_ms"], row["ratio"], row["goal"], row["holds"]]
                   for row in result["cases"])]
        print_table("shared prefix", table, [f"medians of {repeats} calls in turn"])
        if options.fit:
            result["cost"] = fit(FITS[options.size], model_config, options.dtype, device, repeats)
            print_table("cost, in units of one query that reads one key by itself", [list(result["cost"]),
                                                                                    list(result["cost"].values())])
        if options.write:
            path = TUNED / f"shared_prefix.{device.device_kind.lower().replace(' ', '-')}.json"
            path.write_text(json.dumps({name: round(value, 4) for name, value in result["cost"].items()}) + "\n")
    print_result("shared_prefix", result, f"{device.platform}:{device.id} ({device.device_kind})")
    return 0


def measure(case: Case, model: Decoder, model_config: ModelConfig, dtype: str, device: jax.Device, repeats: int
            ) -> dict[str, Any]:
    """The step with its rows apart and together; where nothing is shared, compiled without and with room for groups."""
    context = case.prefix + SUFFIX if case.prefix else UNSHARED
    config = EngineConfig(page_size=PAGE_SIZE, num_pages=case.rows * -(-context // PAGE_SIZE), max_num_seqs=case.rows,
                          max_model_len=2 * context, overlap=False, prefill_chunk_tokens=32)

    def runner_of(config: EngineConfig) -> ModelRunner:
        return ModelRunner(model, model_config, config, device=device, kv_dtype=kv_dtype(jnp.dtype(dtype), device))

    runner = runner_of(config)
    other = runner if case.prefix else runner_of(dataclasses.replace(config, shared_attention=False))
    alone = step_of(other, case, context, is_grouped=False)
    together = step_of(runner, case, context, is_grouped=bool(case.prefix))
    times = in_turn([alone, together], repeats)
    goal = GOALS.get(case.name)
    ratio = float(np.median(times[0] / times[1]))
    return dict(case=case.name, alone_ms=float(np.median(times[0])) * 1e3, together_ms=float(np.median(times[1])) * 1e3,
                ratio=ratio, goal=goal, holds=None if goal is None else ratio >= goal)


def step_of(runner: ModelRunner, case: Case, context: int, *, is_grouped: bool) -> Callable[[], None]:
    shape = runner.shapes.fit(case.rows, case.rows, case.rows)
    packed = runner.layout(shape).allocate()
    batch = runner.layout(shape).step_batch(packed.ints)
    pages, shared = -(-context // PAGE_SIZE), case.prefix // PAGE_SIZE
    batch.token_src.fill(-1)
    batch.cu_q_lens[:] = np.minimum(np.arange(shape.num_rows + 1), case.rows)
    batch.kv_lens[:case.rows] = context
    batch.page_table[:, :case.rows, :pages] = 1 + np.arange(case.rows * pages).reshape(case.rows, pages)
    batch.page_table[:, :case.rows, :shared] = batch.page_table[:, :1, :shared]
    batch.row_slots[:] = np.arange(shape.num_rows)
    batch.is_sampled[:case.rows] = 1
    batch.num_decode[0] = case.rows
    batch.shared_members.fill(shape.num_tokens)
    if is_grouped:
        for part, start in enumerate(range(0, case.rows, SHARED_MEMBERS)):
            members = np.arange(start, min(start + SHARED_MEMBERS, case.rows))
            batch.shared_members[part, :len(members)] = members
            batch.shared_lens[part] = case.prefix
    return lambda: jax.block_until_ready(runner.dispatch(packed, shape).tokens)


def fit(cases: tuple[tuple[int, int], ...], model_config: ModelConfig, dtype: str, device: jax.Device, repeats: int
        ) -> dict[str, float]:
    """`SharingCost` by least squares over groups of several sizes, from the attention of one layer.

    A step's attention without groups takes unit * queries * keys; with a group that part is replaced by
    unit * (parts * (part + read * keys) + member * queries * keys).
    """
    attend = jax.jit(paged_attention, static_argnames=("sm_scale", "has_chunks"))
    rng = np.random.default_rng(0)
    num_heads, head_dim, width = model_config.num_heads, model_config.head_dim, model_config.kv_width
    rows_of_fit, values = [], []
    for rows, prefix in cases:
        pages = prefix // PAGE_SIZE + 1
        pool = [jnp.asarray(rng.standard_normal((1 + rows * pages, PAGE_SIZE, width)),
                            kv_dtype(jnp.dtype(dtype), device)) for _ in range(2)]
        table = 1 + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
        table[:, :-1] = table[0, :-1]
        own_table = 1 + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
        num_parts = -(-rows // SHARED_MEMBERS)
        members = np.full((max(rows // 2, 1), SHARED_MEMBERS), rows, np.int32)
        lens = np.zeros(len(members), np.int32)
        for part in range(num_parts):
            own = np.arange(part * SHARED_MEMBERS, min((part + 1) * SHARED_MEMBERS, rows))
            members[part, :len(own)], lens[part] = own, prefix
        q = jnp.asarray(rng.standard_normal((rows, num_heads, head_dim)), jnp.float32)
        shared = SharedPrefixes(jnp.asarray(table[np.clip(members[:, 0], 0, rows - 1)]), jnp.asarray(lens),
                                jnp.asarray(members))
        first_tokens = jnp.arange(rows + 1, dtype=jnp.int32)

        def run(table: np.ndarray, kv_len: int, shared: SharedPrefixes) -> Callable[[], None]:
            arguments = q, *pool, jnp.asarray(table), jnp.full(rows, kv_len, jnp.int32), first_tokens, jnp.int32(rows)
            return lambda: jax.block_until_ready(attend(*arguments, shared=shared, has_chunks=False,
                                                        sm_scale=head_dim ** -0.5))

        empty = SharedPrefixes(shared.pages, jnp.zeros_like(shared.lens), jnp.full_like(shared.members, rows))
        alone, together, rest = in_turn([run(own_table, prefix + 1, empty), run(table, prefix + 1, shared),
                                         run(own_table, 1, empty)], repeats * 4)
        short = float(np.min(rest))                     # all but the prefix
        unit = (float(np.min(alone)) - short) / (rows * prefix)
        rows_of_fit.append([num_parts * prefix, rows * prefix, num_parts])
        values.append((float(np.min(together)) - short) / unit)
    weights = 1 / np.asarray(values)                    # relative errors count alike
    solved, *_ = np.linalg.lstsq(np.asarray(rows_of_fit) * weights[:, None], np.ones(len(values)), rcond=None)
    read, member, part = (max(float(value), 0.0) for value in solved)
    return dict(read=read, member=member, part=part)


def in_turn(calls: list[Callable[[], None]], repeats: int) -> np.ndarray:
    """Seconds [calls, repeats], after one call each that compiles."""
    for call in calls:
        call()
    times = np.zeros((len(calls), repeats))
    for turn in range(repeats):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            times[i, turn] = time.perf_counter() - start
    return times


if __name__ == "__main__":
    sys.exit(main())
