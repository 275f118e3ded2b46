"""Benchmark of how cost grows: one quantity at a time, and the exponent of the power law that fits it.

    python benchmarks/scaling.py [--size default] [--part rows context nodes lines states]

- rows: wall time of a decode step against running rows, 256 tokens of context each.
- context: wall time of a decode step of one row against its context.
- nodes: CPU time of a cached request (match, lock, insert, release) against the nodes of the radix tree.
- lines: CPU time of the first pass over a batch file, and of reading each request again, against its lines.
- states: CPU time from an automaton to its token tables, and their bytes, against its states.

An exponent of 1 is a cost in proportion, 0 one that does not grow; it is the slope of a straight line through the
logarithms, once through all points and once through the last two, where fixed costs weigh least.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

import jax
import numpy as np

from jradix.grammar.dfa import compile_language
from jradix.grammar.language import byte_set, repeat
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.token_dfa import build_token_tables
from jradix.grammar.vocabulary import vocabulary_of
from jradix.model_files import resolve
from jradix.request_file import RequestFile
from jradix.tokenizer import Tokenizer
from radix_tree import time_request
from report import print_result, print_table, summarise
from step_profile import Case, make_pieces, make_runner

PAGE_SIZE = 16
CONTEXT = 256           # of each row where their number grows
LETTERS = byte_set(b"abcdefghijklmnopqrstuvwxyz 0123456789")
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "tiny": dict(rows=(1, 8), context=(32, 64), nodes=(1_000, 2_000), lines=(100, 300), states=(10, 100)),
    "small": dict(rows=(1, 8, 16, 32), context=(256, 1024, 4096), nodes=(1_000, 10_000, 100_000),
                  lines=(100, 1_000, 10_000), states=(10, 100, 1_000)),
    "default": dict(rows=(1, 8, 16, 32, 64), context=(256, 512, 1024, 2048, 4096, 8192),
                    nodes=(1_000, 10_000, 100_000, 1_000_000), lines=(100, 1_000, 10_000, 100_000),
                    states=(10, 100, 1_000, 10_000, 20_000))}


class Series(NamedTuple):
    """What one quantity costs at each of its sizes."""
    name: str
    unit: str
    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def exponents(self) -> tuple[float, float]:
        """Slopes of log(cost) over log(size): through all points, and through the last two."""
        sizes, costs = np.log(self.sizes), np.log(self.costs)
        return float(np.polyfit(sizes, costs, 1)[0]), float((costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="default")
    parser.add_argument("--part", nargs="+", choices=list(SIZES["tiny"]), default=list(SIZES["tiny"]))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--repeats", type=int, help="of each measurement; default 10, tiny 3")
    options = parser.parse_args(argv)
    options.repeats = options.repeats or (3 if options.size == "tiny" else 10)
    sizes = SIZES[options.size]
    found: list[Series] = []
    if "rows" in options.part:
        found.append(steps("decode step, rows", [Case(rows, CONTEXT) for rows in sizes["rows"]], sizes["rows"],
                           options))
    if "context" in options.part:
        found.append(steps("decode step, context", [Case(1, length) for length in sizes["context"]], sizes["context"],
                           options))
    if "nodes" in options.part:
        found.append(requests(sizes["nodes"], options.repeats))
    if "lines" in options.part:
        found.append(batch_files(sizes["lines"], options.repeats))
    if "states" in options.part:
        found += grammars(sizes["states"], options)
    table: list[list[Any]] = [["", "unit", "sizes", "costs", "exponent", "of the last two"]]
    table += [[each.name, each.unit, ", ".join(f"{size:,}" for size in each.sizes),
               ", ".join(f"{cost:.4g}" for cost in each.costs), *each.exponents] for each in found]
    print_table("scaling", table, [f"medians of up to {options.repeats} repetitions; steps in wall time, the host's "
                                   "parts in CPU time of their thread"])
    print_result("scaling", dict(size=options.size, model=options.model, series=[
        dict(each._asdict(), exponents=each.exponents) for each in found]), options.device)
    return 0


def steps(name: str, cases: list[Case], sizes: tuple[int, ...], options: argparse.Namespace) -> Series:
    """Whole decode steps, each waited for; the sizes take turns."""
    device = jax.devices(options.device)[0]
    with jax.default_device(device):
        calls = []
        runner, model, config = make_runner(options, tuple(cases), device, num_host_steps=1)
        if any(case.rows not in runner.shapes.row_buckets for case in cases):
            raise RuntimeError(f"rows {[case.rows for case in cases]}; the compiled steps have "
                               f"{runner.shapes.row_buckets}")
        for case in cases:
            calls.append(make_pieces(runner, model, config, case)["whole"])
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(options.repeats + 1):                  # the first compiles
            for call, taken in zip(calls, times):
                started = time.perf_counter()
                call()
                taken.append(time.perf_counter() - started)
    return Series(name, "ms", sizes, tuple(summarise(taken[1:], 1e3).median for taken in times))


def requests(sizes: tuple[int, ...], repeats: int) -> Series:
    return Series("cached request, nodes of the tree", "us", sizes, tuple(
        summarise(time_request(num_nodes, PAGE_SIZE, 10 * repeats, is_cached=True).cpu_s, 1e6).median
        for num_nodes in sizes))


def batch_files(sizes: tuple[int, ...], repeats: int) -> Series:
    """The first pass over a file of chat requests, and reading each of them again."""
    def read(path: Path) -> None:
        with RequestFile(path) as file:
            file.scan()
            for line in file.lines():
                file.request(line, file.read(line))

    costs = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        for num_lines in sizes:
            path.write_text("".join(json.dumps(dict(
                custom_id=f"line-{i}", method="POST", url="/v1/chat/completions",
                body=dict(messages=[dict(role="user", content=f"How much is {i} times {i}?")], max_tokens=16))) + "\n"
                for i in range(num_lines)), encoding="utf-8")
            costs.append(median_cpu_s(lambda: read(path), 1 if num_lines > 10_000 else repeats) * 1e3)
    return Series("batch file, lines", "ms", sizes, tuple(costs))


def grammars(sizes: tuple[int, ...], options: argparse.Namespace) -> list[Series]:
    """Texts of a fixed number of letters: an automaton with a state for each place between them."""
    path = Path(resolve(options.model).path)
    vocabulary = vocabulary_of(Tokenizer.from_gguf(path) if path.suffix == ".gguf" else Tokenizer.from_folder(path))
    limits = GrammarLimits(max_states=max(sizes))
    seconds, sizes_of_tables = [], []
    for num_states in sizes:
        def compile_tables() -> Any:
            dfa = compile_language(repeat(LETTERS, num_states - 1, num_states - 1), limits)
            return build_token_tables(dfa, vocabulary, limits)

        sizes_of_tables.append(float(compile_tables().nbytes))
        seconds.append(median_cpu_s(compile_tables, 1 if num_states > 1_000 else options.repeats))
    return [Series("grammar, states: time", "s", sizes, tuple(seconds)),
            Series("grammar, states: bytes of its tables", "bytes", sizes, tuple(sizes_of_tables))]


def median_cpu_s(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return summarise(times).median


if __name__ == "__main__":
    sys.exit(main())
