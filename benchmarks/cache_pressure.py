"""Benchmark of a KV pool that is far too small: what the order of a batch and the host tier save.

    python benchmarks/cache_pressure.py [--size default]

Two comparisons, each a run of the same workload on the same model and pool:
  thrash, a pool of four prefixes         depth-first order of the batch, against the order of arrival
  react, a quarter of the pages it needs  a host tier that takes what is evicted, against none
Greedy decoding; the tokens must be equal. Exit code 1 when a bound on computed prompt tokens does not hold.
"""
from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from jradix.model_files import resolve
from jradix.ops.kv_cache import kv_page_bytes
from jradix.weights.loader import load_config
from llm_runs import Run, add_llm_options, make_llm, run_workload
from report import print_result, print_table
from workloads import SIZES, WORKLOADS, minimum_computed_tokens

MAX_COMPUTED = 1.05     # prompt tokens computed, over the fewest possible
PAGE_SIZE = 16


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "default"), default="default")
    parser.add_argument("--workload", choices=("thrash", "react"), action="append", help="default: both")
    add_llm_options(parser)
    options = parser.parse_args(argv)
    options.page_size = options.page_size or PAGE_SIZE
    table: list[list[Any]] = [["", "pool, tokens", "computed", "over fewest", "wall s", "evicted pages", "host hits",
                               "bound", "holds"]]
    lines, notes = [], []
    for workload in options.workload or ("thrash", "react"):
        cases = CASES[workload](options.size)
        runs = []
        for name, pool_tokens, bound, overrides in cases:
            run, stats = measure(options, workload, pool_tokens, overrides)
            runs.append(run)
            fewest = minimum_computed_tokens(run.done)
            over = run.num_computed_tokens / fewest
            line = dict(workload=workload, case=name, pool_tokens=pool_tokens, computed=run.num_computed_tokens,
                        fewest=fewest, computed_over_fewest=over, wall_s=run.wall_s,
                        evicted_pages=stats["cache"]["evicted_pages"],
                        host_hit_tokens=stats["cache"]["host_hit_tokens"], bound=bound,
                        holds=None if bound is None else over <= bound)
            lines.append(line)
            table.append([f"{workload}, {name}", pool_tokens, *(line[key] for key in (
                "computed", "computed_over_fewest", "wall_s", "evicted_pages", "host_hit_tokens", "bound", "holds"))])
        same = sum(a == b for (_, a), (_, b) in zip(runs[0].done, runs[1].done))
        notes.append(f"{workload}: {same} of {len(runs[0].done)} outputs equal, wall time "
                     f"{runs[1].wall_s / runs[0].wall_s:.2f} times as long with {cases[1][0]}")
    all_hold = all(line["holds"] is not False for line in lines)
    print_table(f"cache pressure, {options.size}", table, notes)
    print_result("cache_pressure", dict(size=options.size, model=options.model, dtype=options.dtype,
                                        page_size=options.page_size, rows=lines, all_hold=all_hold))
    return 0 if all_hold else 1


def thrash_cases(size: str) -> list[tuple[str, int, float | None, dict[str, Any]]]:
    prefixes = 4 * SIZES["thrash"][size]["prefix"]
    return [("depth first", prefixes, MAX_COMPUTED, dict(batch_order="depth_first")),
            ("order of arrival", prefixes, None, dict(batch_order="arrival"))]


def react_cases(size: str) -> list[tuple[str, int, float | None, dict[str, Any]]]:
    p = SIZES["react"][size]
    needed = p["system"] + p["agents"] * p["turns"] * (p["observation"] + p["output"])
    return [("host tier", needed // 4, MAX_COMPUTED, dict(host_tokens=2 * needed)),
            ("no host tier", needed // 4, None, {})]


CASES = {"thrash": thrash_cases, "react": react_cases}


def measure(options: argparse.Namespace, workload: str, pool_tokens: int, overrides: dict[str, Any]
            ) -> tuple[Run, dict[str, Any]]:
    """One run in an LLM of its own, every shape compiled before."""
    config = load_config(resolve(options.model))
    page_bytes = kv_page_bytes(num_layers=config.num_layers, page_size=options.page_size, kv_width=config.kv_width,
                               dtype=np.float32)      # of the KV on CPU; elsewhere the pool holds up to twice as much
    overrides = dict(overrides)
    host_tokens = overrides.pop("host_tokens", 0)
    if host_tokens:
        overrides["host_cache_bytes"] = -(-host_tokens // options.page_size) * page_bytes
    pool_bytes = (pool_tokens // options.page_size + 1) * page_bytes
    with make_llm(options, kv_cache_bytes=pool_bytes, warmup="full", **overrides) as llm:
        return run_workload(llm, WORKLOADS[workload](options.size, 0)), llm.stats()


if __name__ == "__main__":
    sys.exit(main())
