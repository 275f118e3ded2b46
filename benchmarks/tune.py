"""Measures block sizes of the kernels on this device, and writes the file in which the kernels look for them.

    python benchmarks/tune.py --pairs 128x16 128x64 --kernels decode extend
    python benchmarks/tune.py --interpret --pairs 64x16 --out FILE       # on CPU, to test this program: means nothing

Per kernel and pair of head_dim and page size, each field of the blocks is varied in turn from the best found so far. A
candidate's score is its time over that of what the kernel takes by itself now, its rule or an earlier entry: the
geometric mean over a few shapes. An entry is written where that saves at least 3%; elsewhere the file stays as it is.
It is written after every kernel and pair, so that a cut leaves what was done.
"""
from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gpu_check import write_json
from gpu_inputs import RANDOM_PAGES, ints, make_pages, permuted_table
from gpu_speed import Loop
from pallas_kernels import blocks
from pallas_kernels.blocks import Blocks, DecodeBlocks, ExtendBlocks, SharedBlocks
from pallas_kernels.errors import UnsupportedKernel
from report import print_result, print_table

MAX_SCORE = 0.97
TOLERANCE = 0.02        # bfloat16 weights, summed in another order
NUM_THREADS = 8
BACKENDS = dict(gpu="mosaic_gpu", tpu="pallas_tpu", cpu="pallas_tpu")
KINDS: dict[str, type[Blocks]] = dict(decode=DecodeBlocks, extend=ExtendBlocks, shared_prefix=SharedBlocks)
VALUES: dict[str, dict[str, tuple[int, ...]]] = dict(
    mosaic_gpu=dict(q_tokens=(64, 128, 192), kv_tokens=(64, 128, 256), num_stages=(2, 3, 4),
                    num_splits=(1, 2, 4, 8, 16)),
    pallas_tpu=dict(q_tokens=(128, 64, 32), kv_tokens=(128, 256, 512), num_stages=(2, 3, 4), num_splits=(1,)),
    interpreted=dict(q_tokens=(16,), kv_tokens=(16, 32), num_stages=(2,), num_splits=(1,)))


class Case(NamedTuple):
    """A shape to be fast on: rows with so many new tokens each (decode and shared_prefix: one) on this context."""
    rows: int
    new: int
    context: int


CASES = dict(decode=(Case(1, 1, 8192), Case(16, 1, 4096), Case(64, 1, 2048)),
             extend=(Case(1, 2048, 8192), Case(8, 256, 4096)),
             shared_prefix=(Case(8, 1, 8192), Case(64, 1, 4096)))
TINY_CASES = dict(decode=(Case(1, 1, 32),), extend=(Case(1, 16, 32),), shared_prefix=(Case(8, 1, 32),))


class Tuner:
    """Finds the blocks of one backend on the default device.

    Args:
      backend: module of `pallas_kernels`.
      is_interpreted: in interpretation on the CPU, on tiny shapes.
    """

    def __init__(self, backend: str, *, is_interpreted: bool) -> None:
        self._module = importlib.import_module(f"pallas_kernels.{backend}")
        self._values = VALUES["interpreted" if is_interpreted else backend]
        self._cases = TINY_CASES if is_interpreted else CASES
        self._heads = (2, 1) if is_interpreted else (32, 8)
        self._size = "tiny" if is_interpreted else "default"
        self._settings = dict(interpret=True) if is_interpreted else {}

    def tune(self, kernel: str, head_dim: int, page_size: int) -> tuple[Blocks | None, list[dict[str, Any]]]:
        """The best blocks, None where nothing beats what the kernel takes by itself, and a record per candidate.

        Raises:
          UnsupportedKernel: the kernel does not serve this pair at all.
        """
        cases = [self._arguments(kernel, case, head_dim, page_size) for case in self._cases[kernel]]
        usual = [loop.measure(*make()) for loop, (_, make) in zip(self._loops(kernel, head_dim, cases, None), cases)]
        kind = KINDS[kernel]
        names = [field.name for field in fields(kind) if len(self._values[field.name]) > 1]
        best, best_score = kind(**{field.name: self._values[field.name][0] for field in fields(kind)}), float("inf")
        records: dict[Blocks, dict[str, Any]] = {}
        for name in names:
            candidates = [candidate for value in self._values[name]
                          if (candidate := replace(best, **{name: value})) not in records]
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                prepared = list(pool.map(functools.partial(self._try_loops, kernel, head_dim, cases), candidates))
            for candidate, loops in zip(candidates, prepared):
                record = records[candidate] = dict(asdict(candidate))
                if isinstance(loops, str):
                    record["refused"] = loops
                    continue
                found = [loop.measure(*make()) for loop, (_, make) in zip(loops, cases)]
                error = max(float(jnp.abs(got.astype(jnp.float32) - right.astype(jnp.float32)).max())
                            for (_, got), (_, right) in zip(found, usual))
                record |= dict(us=[took * 1e6 for took, _ in found], usual_us=[took * 1e6 for took, _ in usual],
                               score=float(np.exp(np.mean([np.log(a / b) for (a, _), (b, _) in zip(found, usual)]))),
                               error=error, is_right=error <= TOLERANCE)
                if record["is_right"] and record["score"] < best_score:
                    best, best_score = candidate, record["score"]
        return best if best_score <= MAX_SCORE else None, list(records.values())

    def _arguments(self, kernel: str, case: Case, head_dim: int, page_size: int
                   ) -> tuple[tuple[Any, ...], Callable[[], tuple[Array, ...]]]:
        """Shapes of a kernel's arguments, and what makes them."""
        num_columns = -(-case.context // page_size)
        num_pages = -(-(1 + case.rows * num_columns) // RANDOM_PAGES) * RANDOM_PAGES
        q = jax.ShapeDtypeStruct((case.rows * case.new, self._heads[0], head_dim), jnp.bfloat16)
        pages = jax.ShapeDtypeStruct((num_pages, page_size, self._heads[1] * head_dim), jnp.bfloat16)
        rows = case.rows if kernel != "shared_prefix" else 1
        tables = dict(decode=(), extend=(ints(rows + 1),), shared_prefix=(ints(1, case.rows),))[kernel]

        def make() -> tuple[Array, ...]:
            last = dict(decode=(), extend=(jnp.arange(rows + 1, dtype=jnp.int32) * case.new,),
                        shared_prefix=(jnp.arange(case.rows, dtype=jnp.int32)[None],))[kernel]
            return (jax.random.normal(jax.random.key(1), q.shape, q.dtype), *make_pages(pages),
                    permuted_table(rows, num_columns, num_pages), jnp.full(rows, case.context, jnp.int32), *last)

        return (q, pages, pages, ints(rows, num_columns), ints(rows), *tables), make

    def _loops(self, kernel: str, head_dim: int, cases: Sequence[Any], chosen: Blocks | None) -> list[Loop]:
        run = functools.partial(getattr(self._module, kernel), sm_scale=head_dim**-0.5, blocks=chosen, **self._settings)

        def step(q: Array, *rest: Array) -> Array:
            return run(q, *rest)[0].reshape(q.shape).astype(q.dtype)

        return [Loop(self._size, step, *shapes) for shapes, _ in cases]

    def _try_loops(self, kernel: str, head_dim: int, cases: Sequence[Any], chosen: Blocks) -> list[Loop] | str:
        """The compiled loops, or why the kernel refuses these blocks."""
        try:
            return self._loops(kernel, head_dim, cases, chosen)
        except UnsupportedKernel as error:
            return str(error)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", type=read_pair, default=[(128, 16), (128, 64), (64, 16)],
                        metavar="HEAD_DIMxPAGE_SIZE")
    parser.add_argument("--kernels", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--backend", choices=sorted(set(BACKENDS.values())), help="default: that of the device")
    parser.add_argument("--out", type=Path, help="default: the file in pallas_kernels/tuned that the kernels read")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds, after which nothing new is begun")
    parser.add_argument("--interpret", action="store_true", help="on CPU, with tiny shapes; needs --out")
    options = parser.parse_args(argv)
    device = jax.devices()[0]
    if device.platform == "cpu" and not options.interpret:
        parser.error("this device is a CPU, which does not run the kernels: expected a GPU or TPU; --interpret "
                     "tries this program on tiny shapes, whose times mean nothing")
    if options.interpret and options.out is None:
        parser.error("--interpret measures nothing that kernels should read: give --out FILE")
    backend = options.backend or BACKENDS[device.platform]
    path = options.out or blocks.TUNED / f"{backend}.{device.device_kind.lower().replace(' ', '-')}.json"
    tuner = Tuner(backend, is_interpreted=options.interpret)
    end = time.monotonic() + options.budget
    result: list[dict[str, Any]] = []
    for head_dim, page_size in options.pairs:
        for kernel in options.kernels:
            found: dict[str, Any] = dict(kernel=kernel, head_dim=head_dim, page_size=page_size)
            result.append(found)
            if time.monotonic() >= end:
                found["not_run"] = f"{options.budget:g} s had passed"
                continue
            try:
                best, found["candidates"] = tuner.tune(kernel, head_dim, page_size)
            except UnsupportedKernel as error:
                found["not_run"] = str(error)
                continue
            found["blocks"] = best and asdict(best)
            if best is not None:
                write_json(path, with_entry(path, kernel, head_dim, page_size, best))
            print_candidates(found)
    left_out = [f"{found['kernel']} {found['head_dim']}x{found['page_size']}: {found['not_run']}" for found in result
                if "not_run" in found]
    print_table("entries", [["", "head dim", "page size", "blocks"], *(
        [found["kernel"], found["head_dim"], found["page_size"], found["blocks"] or "as before"] for found in result
        if "blocks" in found)], [*left_out, f"file: {path.name}"])
    print_result("tune", dict(backend=backend, is_interpreted=options.interpret, tuned=result), device.device_kind)
    return 0


def read_pair(text: str) -> tuple[int, int]:
    """"128x16" as head_dim and page size."""
    try:
        head_dim, page_size = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected head_dim x page size, such as 128x16") from None
    return head_dim, page_size


def with_entry(path: Path, kernel: str, head_dim: int, page_size: int, best: Blocks) -> dict[str, Any]:
    """The file's content with this entry in the place of an earlier one."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = [row for row in content.get(kernel, ()) if (row["head_dim"], row["page_size"]) != (head_dim, page_size)]
    rows.append(dict(head_dim=head_dim, page_size=page_size, blocks=asdict(best)))
    return content | {kernel: sorted(rows, key=lambda row: (row["head_dim"], row["page_size"]))}


def print_candidates(found: dict[str, Any]) -> None:
    """One line per candidate: its blocks, its score and its times on the kernel's shapes."""
    names = [field.name for field in fields(KINDS[found["kernel"]])]
    rows = [["", *(name.replace("_", " ") for name in names), "score", "us", "right"]]
    for number, record in enumerate(found["candidates"], 1):
        rows.append([str(number), *(record[name] for name in names), record.get("score"),
                     " ".join(f"{took:.4g}" for took in record.get("us", ())) or "refused", record.get("is_right")])
    notes = sorted({record["refused"] for record in found["candidates"] if "refused" in record})
    print_table(f"{found['kernel']}, D {found['head_dim']}, pages of {found['page_size']}", rows, notes)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
