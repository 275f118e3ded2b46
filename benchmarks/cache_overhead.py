"""Benchmark of what the prefix cache costs where it cannot help: prompts that share nothing, cache on against off.

    python benchmarks/cache_overhead.py --size default

One LLM runs both, in turn, with the cache switched between runs. Before each cached run the tree is filled with other
prompts until no page is free, as in a long-running engine: every page then has to be evicted first. Each pair of runs
has its own seed. The first pair is the warm-up and does not count.
"""
from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import numpy as np

from jradix.cache.prefix_cache import PrefixCache
from jradix.llm import LLM
from llm_runs import Run, add_llm_options, make_llm, run_workload, use_cache
from report import print_result, print_table, summarise
from workloads import SIZES, noshare

MAX_RATIO = 1.02
OLD_PROMPT_TOKENS = 320
HOST_PARTS = ("schedule_s", "build_s", "output_s")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES["noshare"]), default="default")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of runs")
    parser.add_argument("--seed", type=int, default=0)
    add_llm_options(parser)
    options = parser.parse_args(argv)
    with make_llm(options) as llm:
        pairs = [measure_pair(llm, options.size, options.seed, is_on_first=True)]
        num_programs = llm.stats()["compiled_programs"]
        pairs = [measure_pair(llm, options.size, options.seed + 1 + repeat, is_on_first=repeat % 2 == 0)
                 for repeat in range(options.repeats)]
        num_late = llm.stats()["compiled_programs"] - num_programs
        device = llm.stats()["device"]
    request, _ = pairs[0][0][0].done[0]
    table: list[list[Any]] = [["", "cache on", "p90", "cache off", "p90", "median of ratios"]]
    measured = dict(wall_s=lambda run, host: run.wall_s, cpu_s=lambda run, host: run.cpu_s,
                    host_thread_cpu_s=lambda run, host: host)
    result: dict[str, Any] = dict(size=options.size, model=options.model, dtype=options.dtype, repeats=options.repeats,
                                  num_requests=len(pairs[0][0][0].done), prompt=len(request.prompt),
                                  output=request.num_output, compiled_after_warmup=num_late, bound=MAX_RATIO)
    for name, read in measured.items():
        on, off = ([read(*pair[side]) for pair in pairs] for side in (0, 1))
        ratio = statistics.median(a / b for a, b in zip(on, off))
        table.append([name.replace("_", " "), *summarise(on), *summarise(off), ratio])
        result[name] = dict(on=summarise(on), off=summarise(off), ratio=ratio)
    result["holds_in_wall_time"] = result["wall_s"]["ratio"] <= MAX_RATIO
    result["holds_in_cpu_time"] = result["cpu_s"]["ratio"] <= MAX_RATIO
    notes = [f"bound {MAX_RATIO}: holds in wall time: {_yes(result['holds_in_wall_time'])}, "
             f"in CPU time of the process: {_yes(result['holds_in_cpu_time'])}",
             f"one pair of runs as warm-up, {num_late} programs compiled after it; {options.repeats} pairs in turn"]
    print_table(f"noshare, {options.size}", table, notes)
    print_result("cache_overhead", result, device)
    return 0


def measure_pair(llm: LLM, size: str, seed: int, *, is_on_first: bool) -> list[tuple[Run, float]]:
    """The same workload with the cache on and off, in this order in the result: run, and host thread's CPU seconds."""
    found: dict[bool, tuple[Run, float]] = {}
    for is_on in (is_on_first, not is_on_first):
        use_cache(llm, is_on)
        if is_on:
            fill_cache(llm.engine.cache, seed)
        before = llm.stats()["host_time"]
        run = run_workload(llm, noshare(size, seed))
        after = llm.stats()["host_time"]
        found[is_on] = run, sum(after[part] - before[part] for part in HOST_PARTS)
    outputs = [[output for _, output in run.done] for run, _ in found.values()]
    assert outputs[0] == outputs[1], "the cache changed the tokens"
    assert found[True][0].num_computed_tokens == found[False][0].num_computed_tokens, "the prompts share something"
    return [found[True], found[False]]


def fill_cache(cache: PrefixCache, seed: int) -> None:
    """Takes all free pages for prompts that nobody will ask for, and leaves them evictable. Their KV is never read."""
    rng = np.random.default_rng(seed)
    num_pages = min(max(OLD_PROMPT_TOKENS // cache.page_size, 1), cache.max_pages)
    while num_free := min(pool.num_free for pool in cache.pools):
        num_tokens = min(num_pages, num_free) * cache.page_size
        tokens = rng.integers(0, 100, num_tokens).astype(np.int32)     # no workload has ids below 100
        lease = cache.acquire(tokens)
        cache.extend(lease, num_tokens)
        cache.release(lease, tokens)


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


if __name__ == "__main__":
    sys.exit(main())
