"""Benchmark of the radix tree on the host: match, insert, commit and eviction against their bounds.

    python benchmarks/radix_tree.py [--nodes 1000000] [--fanout 1000]

The baseline of `match` is the usual alternative, a dictionary of chained page hashes. No device is used. Bounds are
judged by CPU time, so that a busy machine does not decide; the exit code is 1 when one does not hold.
"""
from __future__ import annotations

import argparse
import sys
import time
from typing import Any, Callable, NamedTuple

import numpy as np

from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.radix_tree import RadixTree
from report import Watch, print_result, print_table, summarise

PROMPT_TOKENS = 100_000
CHUNK_TOKENS = 512                 # a request commits its prompt in chunks of this size
MAX_MATCH_MS = 1.0
MAX_EVICTION_US = 20.0
MAX_REQUEST_US = 150.0             # match, lock, insert and release of a prompt
REQUEST_TOKENS = 4096
REQUEST_NODES = 100_000
VOCABULARY = 49_152
SCALE = {"ms": 1e3, "us": 1e6}


class Row(NamedTuple):
    """One line of the report; `bound` is on the median of the CPU time."""
    name: str
    times: Watch
    unit: str
    bound: float | None = None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "default"), default="default")
    parser.add_argument("--nodes", type=int, help="nodes to evict; default 1,000,000, tiny 20,000")
    parser.add_argument("--fanout", type=int, default=1000, help="children per inner node of the tree that is evicted")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args(argv)
    num_nodes = options.nodes or (20_000 if options.size == "tiny" else 1_000_000)
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32)

    rows = [Row(f"match of {PROMPT_TOKENS:,} tokens on {edges} edge{'s' * (edges > 1)}",
                time_match(prompt, edges, options.page_size, options.repeats), "ms", MAX_MATCH_MS)
            for edges in (1, 100)]
    rows.append(Row("  baseline: a dict of chained page hashes",
                    time_hashed_match(prompt, options.page_size, options.repeats), "ms"))
    rows.append(Row(f"insert of {PROMPT_TOKENS:,} tokens as one edge",
                    time_insert(prompt, options.page_size, options.repeats), "ms"))
    commit, release = time_commit(prompt, options.page_size, max(options.repeats // 5, 1))
    rows += [Row(f"commit of {CHUNK_TOKENS} tokens, {PROMPT_TOKENS:,} in all", commit, "us"),
             Row("release after it", release, "us")]
    for num in (REQUEST_NODES // 100, REQUEST_NODES):
        if num <= num_nodes:
            for is_cached in (True, False):
                times = time_request(num, options.page_size, 20 * options.repeats, is_cached=is_cached)
                rows.append(Row(f"a {'cached' if is_cached else 'new'} prompt of {REQUEST_TOKENS:,} tokens, "
                                f"{num:,} nodes", times, "us", MAX_REQUEST_US))
    build, single, bulk = time_eviction(num_nodes, options.fanout, options.page_size)
    rows += [Row(f"insert of a page, {num_nodes:,} nodes", build, "us"),
             Row("eviction of a node, one page per call", single, "us", MAX_EVICTION_US),
             Row("eviction of a node, many per call", bulk, "us", MAX_EVICTION_US)]

    table: list[list[Any]] = [["", "wall", "wall p90", "CPU", "CPU p90", "unit", "bound", "holds"]]
    lines = []
    for name, times, unit, bound in rows:
        wall, cpu = summarise(times.wall_s, SCALE[unit]), summarise(times.cpu_s, SCALE[unit])
        holds = None if bound is None else cpu.median < bound
        table.append([name, wall.median, wall.p90, cpu.median, cpu.p90, unit, bound, holds])
        lines.append(dict(name=name.strip(), wall=wall, cpu=cpu, unit=unit, bound=bound, holds=holds))
    all_hold = all(line["holds"] is not False for line in lines)
    print_table("radix tree", table, [f"medians; bounds are on CPU time; {options.fanout} children per inner node"])
    print_result("radix_tree", dict(nodes=num_nodes, fanout=options.fanout, page_size=options.page_size, rows=lines,
                                    all_hold=all_hold))
    return 0 if all_hold else 1


def time_match(prompt: np.ndarray, num_edges: int, page_size: int, repeats: int) -> Watch:
    """Matches of the whole prompt, which lies in the tree on this many edges."""
    tree = RadixTree(page_size)
    num_pages = len(prompt) // page_size
    for edge in range(1, num_edges + 1):
        pages = num_pages * edge // num_edges
        tree.insert(prompt[:pages * page_size], np.arange(1, pages + 1))
    assert sum(1 for _ in tree.nodes()) == num_edges
    assert tree.match(prompt).num_tokens == num_pages * page_size
    return timed(lambda: tree.match(prompt), repeats)


def time_hashed_match(prompt: np.ndarray, page_size: int, repeats: int) -> Watch:
    """The same match where a page is found by the hash of its tokens and of the page before it."""
    width = page_size * prompt.itemsize
    num_pages = len(prompt) // page_size
    table: dict[int, int] = {}

    def match() -> list[int]:
        data = prompt.tobytes()
        chain, found = 0, []
        for start in range(0, num_pages * width, width):
            chain = hash((chain, data[start:start + width]))
            page_id = table.get(chain)
            if page_id is None:
                break
            found.append(page_id)
        return found

    data, chain = prompt.tobytes(), 0
    for page in range(num_pages):
        chain = hash((chain, data[page * width:(page + 1) * width]))
        table[chain] = page + 1
    assert len(match()) == num_pages
    return timed(match, repeats)


def time_insert(prompt: np.ndarray, page_size: int, repeats: int) -> Watch:
    """Insertions of the whole prompt into an empty tree."""
    trees = [RadixTree(page_size) for _ in range(repeats + 1)]
    pages = np.arange(1, len(prompt) // page_size + 1)
    return timed(lambda: trees.pop().insert(prompt, pages), repeats)


def time_commit(prompt: np.ndarray, page_size: int, repeats: int) -> tuple[Watch, Watch]:
    """Commits as a long prompt is computed chunk by chunk, and the release after the last of them."""
    num_pages = -(-len(prompt) // page_size)
    commits, releases = Watch(time.thread_time), Watch(time.thread_time)
    for _ in range(repeats):
        cache = PrefixCache.create(page_size=page_size, num_pages=num_pages, max_pages=num_pages)
        lease = cache.acquire(prompt)
        for end in range(CHUNK_TOKENS, len(prompt) + 1, CHUNK_TOKENS):
            cache.extend(lease, end)
            commits.start()
            cache.commit(lease, prompt[:end])
            commits.stop()
        releases.start()
        cache.release(lease)
        releases.stop()
    return commits, releases


def time_request(num_nodes: int, page_size: int, repeats: int, *, is_cached: bool) -> Watch:
    """Match, lock, insert and release of prompts in a cache of `num_nodes` nodes, with free pages enough.

    Each prompt shares its first half with others; its second half is cached as well, or new.
    """
    rng = np.random.default_rng(2)
    half = REQUEST_TOKENS // 2
    heads = rng.integers(0, VOCABULARY, (num_nodes // 200, half)).astype(np.int32)
    num_pages = len(heads) * half // page_size + num_nodes + (repeats + 5) * (half // page_size + 2)
    cache = PrefixCache.create(page_size=page_size, num_pages=num_pages, max_pages=REQUEST_TOKENS // page_size)
    for i in range(num_nodes):
        run_request(cache, np.concatenate([heads[i % len(heads)], rng.integers(0, VOCABULARY, page_size, np.int32)]))
    watch = Watch(time.thread_time)
    for i in range(repeats + 5):
        prompt = np.concatenate([heads[i % len(heads)], rng.integers(0, VOCABULARY, half, np.int32)])
        if is_cached:
            run_request(cache, prompt)
        watch.start()
        run_request(cache, prompt)
        watch.stop()
    watch.wall_s, watch.cpu_s = watch.wall_s[5:], watch.cpu_s[5:]
    return watch


def run_request(cache: PrefixCache, prompt: np.ndarray) -> None:
    """What the cache does for a request that generates nothing."""
    lease = cache.acquire(prompt)
    cache.extend(lease, len(prompt))
    cache.release(lease, prompt)
    cache.take_moves()


def time_eviction(num_nodes: int, fanout: int, page_size: int) -> tuple[Watch, Watch, Watch]:
    """Per node of one page: building the tree, evicting half of it page by page, and evicting the rest in ten calls.

    Prompts of two pages arrive in random order below `num_nodes / fanout` shared first pages.
    """
    rng = np.random.default_rng(1)
    num_parents = max(-(-num_nodes // (fanout + 1)), 1)
    num_leaves = num_nodes - num_parents
    firsts = rng.integers(0, VOCABULARY, (num_parents, page_size)).astype(np.int32)
    owners = rng.permutation(np.arange(num_leaves) % num_parents)
    tree = RadixTree(page_size, history_pages=num_nodes // 2)
    for i, first in enumerate(firsts):
        tree.insert(first, np.array([i + 1]))
    build, single, bulk = Watch(time.thread_time), Watch(time.thread_time), Watch(time.thread_time)
    group = max(num_leaves // 100, 1)
    for begin in range(0, num_leaves, group):
        chosen = owners[begin:begin + group]
        seconds = rng.integers(0, VOCABULARY, (len(chosen), page_size)).astype(np.int32)
        prompts = np.concatenate([firsts[chosen], seconds], axis=1)
        pages = np.stack([chosen + 1, num_parents + begin + 1 + np.arange(len(chosen))], axis=1)
        build.start()
        for prompt, pair in zip(prompts, pages):
            tree.insert(prompt, pair)
        build.stop(len(chosen))
    assert tree.num_evictable_pages == num_nodes, (tree.num_evictable_pages, num_nodes)
    for _ in range(num_nodes // 2 // group):
        single.start()
        for _ in range(group):
            tree.evict(1)
        single.stop(group)
    share = -(-tree.num_evictable_pages // 10)
    while tree.num_evictable_pages:
        num_pages = min(share, tree.num_evictable_pages)
        bulk.start()
        evicted = tree.evict(num_pages)
        bulk.stop(num_pages)
        assert evicted.shape[1] == num_pages
    return build, single, bulk


def timed(call: Callable[[], Any], repeats: int) -> Watch:
    """Times `repeats` calls, after one that does not count."""
    call()
    watch = Watch(time.thread_time)
    for _ in range(repeats):
        watch.start()
        call()
        watch.stop()
    return watch


if __name__ == "__main__":
    sys.exit(main())
