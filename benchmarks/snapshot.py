"""Benchmark of saving and loading the cache, against plain writing (with fsync) and reading of as many bytes.

    python benchmarks/snapshot.py --gib 1 --folder /a/disk/with/room

No model: a KV pool of SmolLM2-135M's sizes with random content, under a tree of made-up prompts. Save and plain write,
load and plain read take turns, each pair in the order opposite to the one before. Before every read all files are
dropped from the page cache (`posix_fadvise`), so that both read the disk; with --warm both find them there. The first
pair is the warm-up and does not count.
"""
from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from jradix.cache.node import Namespace
from jradix.cache.packed_tree import pack, unpack
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.snapshot import SnapshotIdentity, new_snapshot, open_snapshot
from jradix.ops.kv_cache import KVCache, kv_page_bytes, make_kv_cache
from jradix.runner.kv_store import fill_pages, read_pages, write_pages
from report import print_result, print_table, summarise

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 30, 3, 64, 16
GROUPS = (tuple(range(NUM_LAYERS)),)
IDENTITY = SnapshotIdentity("weights", "config", "tokenizer", "float32", "float32", PAGE_SIZE, NUM_LAYERS, NUM_KV_HEADS,
                            HEAD_DIM, GROUPS)
MAX_RATIO = 1.5
PLAIN_BYTES = 16 * 2**20     # of one plain write or read


class Engine:
    """A cache and its KV, as far as saving and loading need them."""

    def __init__(self, num_pages: int, seed: int):
        self.cache = PrefixCache.create(page_size=PAGE_SIZE, num_pages=num_pages, max_pages=num_pages)
        self.kv = make_kv_cache(num_layers=NUM_LAYERS, num_pages=num_pages, page_size=PAGE_SIZE,
                                kv_width=NUM_KV_HEADS * HEAD_DIM, dtype=jnp.float32, device=jax.devices()[0])
        if seed:
            keys = jax.random.split(jax.random.key(seed), 2 * NUM_LAYERS)
            arrays = [jax.random.normal(key, self.kv.k[0].shape) for key in keys]
            self.kv = KVCache(tuple(arrays[:NUM_LAYERS]), tuple(arrays[NUM_LAYERS:]))
            self._add_prompts(np.random.default_rng(seed))
        jax.block_until_ready(self.kv)

    def _add_prompts(self, random: np.random.Generator) -> None:
        """Prompts of 500 to 1,500 tokens, eight to a shared beginning of 512, until no page is free."""
        shared = random.integers(0, 49152, 512)
        number = 0
        while self.cache.num_free_pages:
            if number % 8 == 0:
                shared = random.integers(0, 49152, 512)
            number += 1
            prompt = np.concatenate([shared, random.integers(0, 49152, random.integers(20, 1000))]).astype(np.int32)
            room = self.cache.num_matching_tokens(prompt, Namespace()) + self.cache.num_free_pages * PAGE_SIZE
            prompt = prompt[:max(room, 1)]
            lease = self.cache.acquire(prompt)
            self.cache.extend(lease, len(prompt))
            self.cache.take_moves()
            self.cache.release(lease, prompt)

    def empty(self) -> None:
        """Forgets everything, in place: memory that the system gives anew would be slow at its first use."""
        self.cache.clear()
        self.kv = jax.block_until_ready(_zero(self.kv))

    def save(self, path: Path) -> None:
        packed, device_ids, _ = pack(self.cache)
        with new_snapshot(path, IDENTITY, packed) as pages_folder:
            write_pages(pages_folder, self.kv, device_ids, num_kv_heads=NUM_KV_HEADS, groups=GROUPS)

    def load(self, path: Path) -> int:
        """Pages loaded; returns when they are in the KV."""
        snapshot = open_snapshot(path, IDENTITY)

        def fill(rows: np.ndarray, page_ids: np.ndarray) -> None:
            for block in read_pages(snapshot.pages_folder, self.kv, rows, page_ids, num_rows=snapshot.tree.num_rows,
                                    num_kv_heads=NUM_KV_HEADS, groups=GROUPS):
                self.kv = fill_pages(self.kv, block)
        done = unpack(self.cache, snapshot.tree, fill)
        jax.block_until_ready(self.kv)
        return done.num_loaded_pages


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the KV, in GiB")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of each kind")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--warm", action="store_true", help="read files that are in the page cache")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    page_bytes = kv_page_bytes(num_layers=NUM_LAYERS, page_size=PAGE_SIZE, kv_width=NUM_KV_HEADS * HEAD_DIM,
                               dtype=jnp.float32)
    num_pages = max(int(options.gib * 2**30) // page_bytes, 4)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(Path(folder), num_pages, options.repeats, options.seed, is_warm=options.warm)
    table = [["", "jradix s", "p90", "plain s", "p90", "ratio", "GB/s"]]
    for name in ("save", "load"):
        part = result[name]
        table.append([name, *part["jradix_s"], *part["plain_s"], part["ratio"],
                      result["bytes"] / part["jradix_s"].median / 1e9])
    holds = all(result[name]["ratio"] <= MAX_RATIO for name in ("save", "load"))
    result |= dict(bound=MAX_RATIO, holds=holds, repeats=options.repeats)
    print_table(f"{result['bytes'] / 1e9:.2f} GB of KV, {num_pages} pages", table,
                [f"bound {MAX_RATIO} on the ratio of medians: holds: {'yes' if holds else 'NO'}",
                 f"files {'in the page cache' if options.warm else 'dropped from the page cache'} before each read; "
                 f"one pair of each as warm-up; {options.repeats} pairs in turn"])
    print_result("snapshot", result, jax.devices()[0].device_kind)
    return 0


def measure(folder: Path, num_pages: int, repeats: int, seed: int, *, is_warm: bool) -> dict[str, Any]:
    """Times of saves, loads, plain writes and reads, and their ratios."""
    engine, fresh = Engine(num_pages, seed), Engine(num_pages, 0)
    num_bytes = num_pages * kv_page_bytes(num_layers=NUM_LAYERS, page_size=PAGE_SIZE, kv_width=NUM_KV_HEADS * HEAD_DIM,
                                          dtype=jnp.float32)
    content = np.random.default_rng(seed).integers(0, 256, PLAIN_BYTES, np.uint8)
    snapshot, plain = folder / "snapshot", folder / "plain"
    target = np.zeros(num_bytes, np.uint8)
    packed, ids, _ = pack(engine.cache)
    assert packed.num_rows == num_pages, "the tree does not fill the pool"
    expected = [np.asarray(jnp.copy(array[ids[0]])) for array in (engine.kv.k[3], engine.kv.v[-1])]

    def load() -> float:
        fresh.empty()
        taken, loaded = timed(lambda: fresh.load(snapshot))
        assert loaded == num_pages
        _, new_ids, _ = pack(fresh.cache)
        for array, right in zip((fresh.kv.k[3], fresh.kv.v[-1]), expected):
            assert np.array_equal(np.asarray(jnp.copy(array[new_ids[0]])), right), "other content came back"
        return taken

    def save() -> float:
        return timed(lambda: engine.save(snapshot))[0]

    def write() -> float:
        return timed(lambda: write_plain(plain, content, num_bytes))[0]

    def read() -> float:
        return timed(lambda: read_plain(plain, target))[0]

    times: dict[str, list[float]] = {name: [] for name in ("save", "write", "load", "read")}
    for repeat in range(repeats + 1):
        for pair in (((save, "save"), (write, "write")), ((load, "load"), (read, "read"))):
            for run, name in pair if repeat % 2 else reversed(pair):
                if name == "save":
                    shutil.rmtree(snapshot, ignore_errors=True)
                elif name == "write":
                    plain.unlink(missing_ok=True)
                prepare(folder, is_warm=is_warm)
                taken = run()
                if repeat:
                    times[name].append(taken)
    return dict(bytes=num_bytes, files=sum(1 for file in snapshot.rglob("*") if file.is_file()),
                save=compare(times["save"], times["write"]), load=compare(times["load"], times["read"]))


@functools.partial(jax.jit, donate_argnums=0)
def _zero(kv: KVCache) -> KVCache:
    return jax.tree.map(lambda array: array * 0, kv)


def compare(ours: list[float], plain: list[float]) -> dict[str, Any]:
    a, b = summarise(ours), summarise(plain)
    return dict(jradix_s=a, plain_s=b, ratio=a.median / b.median)


def prepare(folder: Path, *, is_warm: bool) -> None:
    """All files are on the disk, none or all of them in the page cache, and the space of deleted ones is free again
    (on a disk mounted with `discard` the next sync would pay for that).
    """
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb", buffering=0) as stream:
                if is_warm:
                    while stream.read(PLAIN_BYTES):
                        pass
                else:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_plain(path: Path, content: np.ndarray, num_bytes: int) -> None:
    with open(path, "wb", buffering=0) as file:
        for start in range(0, num_bytes, len(content)):
            file.write(content[:num_bytes - start])
        os.fsync(file.fileno())


def read_plain(path: Path, target: np.ndarray) -> None:
    """Reads into memory that was touched before: what the disk and the system take, no page faults."""
    view = memoryview(target)
    with open(path, "rb", buffering=0) as file:
        for start in range(0, len(target), PLAIN_BYTES):
            file.readinto(view[start:start + PLAIN_BYTES])


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    sys.exit(main())
