"""Replay of a trace of prompts through the radix tree: which share of the prompt tokens each eviction policy saves.

    python benchmarks/cache_trace.py [--pages 2048] [--seeds 0 1 2 3 4] [--json]
    python benchmarks/cache_trace.py --trace requests.jsonl

A line of a trace file is {"time_s": float, "tokens": [ids], "num_output": n}. `tokens` are all of a request: the
prompt, then the `num_output` tokens (0 when left out) that were generated, which are cached but not looked up.

Requests are served one after another at their times on a clock of the trace, on the real tree and page pool; hits count
whole pages. `belady` is the optimum for comparison: it knows the future and evicts, also leaves first, the page whose
next use is farthest. Without a trace file, three synthetic ones are made from each seed. No device is used.
"""
from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from jradix.cache.eviction import EVICTION_POLICIES
from jradix.cache.pages import PagePool
from jradix.cache.prefix_cache import HISTORY_POOLS
from jradix.cache.radix_tree import RadixTree
from report import print_result, print_table

OPTIMUM = "belady"
VOCABULARY = 49_152


class Request(NamedTuple):
    """One request of a trace.

    Attributes:
      time_s: when it came, seconds from the start.
      tokens: int32[k], the prompt and the generated tokens after it.
      num_output: how many of them were generated.
    """
    time_s: float
    tokens: np.ndarray
    num_output: int = 0


Trace = list[Request]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="JSON lines; default: synthetic traces")
    parser.add_argument("--pages", type=int, default=2048, help="capacity of the cache")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--min-ttl-s", type=float, default=0.0)
    parser.add_argument("--policies", nargs="+", choices=(*EVICTION_POLICIES, OPTIMUM),
                        default=[*EVICTION_POLICIES, OPTIMUM])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--size", choices=("tiny", "default"), default="default")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    options = parser.parse_args(argv)
    try:
        if options.trace:
            names, seeds = [options.trace.name], [0]
            traces = {(options.trace.name, 0): read_trace(options.trace)}
        else:
            names, seeds = list(TRACES), options.seeds
            traces = {(name, seed): TRACES[name](np.random.default_rng(seed), 0.05 if options.size == "tiny" else 1.0)
                      for name in names for seed in seeds}
        rates = {key: {policy: hit_rate(trace, policy, options.pages, options.page_size, options.min_ttl_s)
                       for policy in options.policies} for key, trace in traces.items()}
    except (OSError, ValueError) as error:
        print(f"cache_trace: {error}", file=sys.stderr)
        return 2

    results = []
    for name in names:
        rows: list[list[Any]] = [["seed", *options.policies]]
        for seed in seeds:
            rows.append([str(seed), *(100 * rates[name, seed][policy] for policy in options.policies)])
        means = [float(np.mean([row[i + 1] for row in rows[1:]])) for i in range(len(options.policies))]
        trace = traces[name, seeds[0]]
        notes = [f"{len(trace):,} requests, {sum(len(r.tokens) - r.num_output for r in trace):,} prompt tokens, "
                 f"{distinct_pages(trace, options.page_size):,} distinct pages"
                 + ("" if options.trace else f" (seed {seeds[0]})")]
        print_table(f"{name}: % of the prompt tokens found, {options.pages:,} pages of {options.page_size}",
                    [*rows, ["mean", *means]], notes)
        results.append(dict(trace=name, seeds=seeds, mean=dict(zip(options.policies, means)),
                            by_seed=[rates[name, seed] for seed in seeds]))
    if options.json:
        print_result("cache_trace", dict(pages=options.pages, page_size=options.page_size,
                                         min_ttl_s=options.min_ttl_s, traces=results))
    return 0


def read_trace(path: Path) -> Trace:
    """Reads a trace file; raises ValueError that names the line which is not as it should be."""
    trace: Trace = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            request = Request(float(entry["time_s"]), np.array(entry["tokens"], np.int32).reshape(-1),
                              int(entry.get("num_output", 0)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f'{path.name}, line {number}: {error!r}; expected {{"time_s": seconds, "tokens": [ids], '
                             '"num_output": count}') from error
        if not 0 <= request.num_output < len(request.tokens):
            raise ValueError(f"{path.name}, line {number}: {request.num_output} of {len(request.tokens)} tokens are "
                             "output; at least one has to be prompt")
        if trace and request.time_s < trace[-1].time_s:
            raise ValueError(f"{path.name}, line {number}: time {request.time_s} lies before the line above; sort by "
                             "time_s")
        trace.append(request)
    if not trace:
        raise ValueError(f"{path.name} has no requests")
    return trace


def hit_rate(trace: Trace, policy: str, num_pages: int, page_size: int, min_ttl_s: float = 0.0) -> float:
    """Share of all prompt tokens that were cached when their request came."""
    for request in trace:
        if len(request.tokens) // page_size > num_pages:
            raise ValueError(f"the request at {request.time_s} s has {len(request.tokens)} tokens, more than "
                             f"{num_pages} pages of {page_size}; raise --pages")
    if policy == OPTIMUM:
        hits = replay_optimum(trace, num_pages, page_size)
    else:
        hits = replay(trace, policy, num_pages, page_size, min_ttl_s)
    return sum(hits) / sum(len(request.tokens) - request.num_output for request in trace)


def replay(trace: Trace, policy: str, num_pages: int, page_size: int, min_ttl_s: float = 0.0) -> list[int]:
    """Cached tokens of each request on the real tree."""
    now = 0.0
    pool = PagePool(num_pages)
    tree = RadixTree(page_size, policy=policy, num_pages=num_pages, min_ttl_s=min_ttl_s, clock=lambda: now,
                     history_pages=HISTORY_POOLS * num_pages)
    hits = []
    for request in trace:
        now = request.time_s
        match = tree.match(request.tokens[:_num_looked_up(request)], touch=False)
        node = tree.lock(match)
        hits.append(match.num_tokens)
        num_cached = match.pages.shape[1]
        num_new = len(request.tokens) // page_size - num_cached
        pool.free(tree.evict(max(num_new - pool.num_free, 0))[0])
        pages = np.concatenate([match.pages[0], pool.alloc(num_new)])
        inserted = tree.insert(request.tokens[:len(pages) * page_size], pages)
        pool.free(pages[num_cached:inserted.num_existing_pages])    # twins: generated tokens that were cached already
        tree.unlock(node)
    return hits


def replay_optimum(trace: Trace, num_pages: int, page_size: int) -> list[int]:
    """Cached tokens of each request when the leaf page to be looked up last is evicted first."""
    paths, next_uses = _future(trace, page_size)
    is_cached: set[int] = set()
    num_below: dict[int, int] = {}                   # cached children of each page
    next_use: dict[int, float] = {}
    parent_of: dict[int, int] = {}
    farthest: list[tuple[float, int]] = []           # (-next use, page) of leaves; others are skipped
    hits = []
    for request, path, uses in zip(trace, paths, next_uses):
        looked_up = path[:_num_looked_up(request) // page_size]
        hits.append(page_size * next((i for i, page in enumerate(looked_up) if page not in is_cached), len(looked_up)))
        own = set(path)                              # they stay while it runs
        num_missing = sum(page not in is_cached for page in path)
        while len(is_cached) + num_missing > num_pages:
            use, page = heapq.heappop(farthest)
            if page in own or page not in is_cached or num_below.get(page, 0) or next_use[page] != -use:
                continue
            is_cached.remove(page)
            parent = parent_of[page]
            num_below[parent] = num_below.get(parent, 0) - 1
            if parent in is_cached and not num_below[parent]:
                heapq.heappush(farthest, (-next_use[parent], parent))
        for parent, page, use in zip([-1, *path], path, uses):
            if page not in is_cached:
                is_cached.add(page)
                parent_of[page] = parent
                num_below[parent] = num_below.get(parent, 0) + 1
            next_use[page] = use
        for page in path:
            if not num_below.get(page, 0):
                heapq.heappush(farthest, (-next_use[page], page))
    return hits


def distinct_pages(trace: Trace, page_size: int) -> int:
    """Pages of a cache that never evicts."""
    paths, _ = _future(trace, page_size)
    return len({page for path in paths for page in path})


def _future(trace: Trace, page_size: int) -> tuple[list[list[int]], list[list[float]]]:
    """Per request the pages of its path, and the index of the request that looks each of them up next."""
    ids: dict[tuple[int, bytes], int] = {}
    paths: list[list[int]] = []
    for request in trace:
        path, parent = [], -1
        for end in range(page_size, len(request.tokens) + 1, page_size):
            parent = ids.setdefault((parent, request.tokens[end - page_size:end].tobytes()), len(ids))
            path.append(parent)
        paths.append(path)
    upcoming: dict[int, float] = {}
    next_uses: list[list[float]] = []
    for index in range(len(trace) - 1, -1, -1):
        next_uses.append([upcoming.get(page, math.inf) for page in paths[index]])
        num_looked_up = _num_looked_up(trace[index]) // page_size
        for depth, page in enumerate(paths[index]):
            # Computed anyway and not looked up: to have kept it until then is of no use.
            upcoming[page] = index if depth < num_looked_up else math.inf
    return paths, next_uses[::-1]


def _num_looked_up(request: Request) -> int:
    """The last prompt token is always computed, for its logits."""
    return len(request.tokens) - request.num_output - 1


# -- synthetic traces. Lengths are log-normal around the medians given, as those of real prompts are.

def system_prompts(rng: np.random.Generator, scale: float = 1.0) -> Trace:
    """Many applications share a server: system prompts of Zipf popularity, which drifts, each with a new question."""
    prompts = [_tokens(rng, _length(rng, 800, 0.7)) for _ in range(150)]
    weights = 1 / np.arange(1, len(prompts) + 1)
    ranks = rng.permutation(len(prompts))
    trace, now = [], 0.0
    for i in range(int(2000 * scale)):
        now += rng.exponential(0.5)
        if i % 50 == 49:
            a, b = rng.integers(0, len(prompts), 2)
            ranks[[a, b]] = ranks[[b, a]]
        prompt = prompts[ranks[rng.choice(len(prompts), p=weights / weights.sum())]]
        trace.append(_ask(rng, now, [prompt]))
    return trace


def scan_and_hot_set(rng: np.random.Generator, scale: float = 1.0) -> Trace:
    """Sixteen agents in steady use; every few minutes a batch job sends long documents that never come again."""
    prompts = [_tokens(rng, _length(rng, 1200, 0.4)) for _ in range(16)]
    trace, now = [], 0.0
    for _ in range(max(int(8 * scale), 2)):
        for _ in range(100):
            now += rng.exponential(2.0)
            trace.append(_ask(rng, now, [prompts[rng.integers(len(prompts))]]))
        for _ in range(60):
            now += rng.exponential(0.5)
            trace.append(Request(now, _tokens(rng, _length(rng, 2000, 0.4)), 64))
            if rng.random() < 0.25:
                trace.append(_ask(rng, now, [prompts[rng.integers(len(prompts))]]))
    return trace


def conversations(rng: np.random.Generator, scale: float = 1.0) -> Trace:
    """Chats of several turns with time to think in between, on three system prompts; a turn sends all before it."""
    systems = [_tokens(rng, _length(rng, 400, 0.3)) for _ in range(3)]
    trace, start = [], 0.0
    for _ in range(int(400 * scale)):
        start += rng.exponential(8.0)
        now, parts = start, [systems[rng.integers(len(systems))]]
        for _ in range(min(rng.geometric(0.2), 20)):
            request = _ask(rng, now, parts)
            trace.append(request)
            parts = [request.tokens]
            now += request.num_output / 50 + rng.lognormal(math.log(30.0), 0.8)
    return sorted(trace, key=lambda request: request.time_s)


TRACES: dict[str, Callable[..., Trace]] = {
    "system prompts": system_prompts, "scan and hot set": scan_and_hot_set, "conversations": conversations}


def _ask(rng: np.random.Generator, now: float, context: Sequence[np.ndarray]) -> Request:
    """A new question after `context`, and its answer."""
    num_output = _length(rng, 150, 0.6)
    return Request(now, np.concatenate([*context, _tokens(rng, _length(rng, 60, 0.8) + num_output)]), num_output)


def _length(rng: np.random.Generator, median: float, sigma: float) -> int:
    return max(int(rng.lognormal(math.log(median), sigma)), 1)


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


if __name__ == "__main__":
    sys.exit(main())
