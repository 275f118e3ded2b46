"""Coverage of JSON schemas and time to compile them: real schemas with their documents, and the official test suite.

    python benchmarks/structured_coverage.py --data ../shared/data [--every 8] [--only ID] [--show] [--workers 2]
                                             [--libraries jradix llguidance]
    python benchmarks/structured_coverage.py --data ../shared/data --which tables --smollm2 [--every 8]

A schema is right when every valid document is accepted and every invalid one refused. Documents are written compactly;
the keys of an object may come in any order the engine asks for, since it fixes the order of declared keys. So a valid
document needs one accepted order, and an invalid one must be refused in all. A schema that is refused is counted by the
reason, never as right; so is one with a valid document deeper than a depth-limited automaton goes. The exit code is 1
when jradix accepted an invalid document.

`--libraries` judges llguidance, xgrammar and outlines-core as well, where they are installed. `tables` measures how
long automaton and token tables take for a vocabulary, as the schemas are and with strict=True, what they cost in bytes,
and how long the matcher takes to its first mask. All times are CPU time of the process a schema is compiled in, of which `--workers` run at a time; each part
starts with new ones, so that their peak memory is its own.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from grammar_walks import ENGINES, DfaWalk, MatcherWalk, Refused, Serialiser, TooManyOrders, Walk
from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.compiler import Grammar, compile_grammar
from jradix.grammar.json_schema import MIN_FREE_DEPTH
from jradix.grammar.matcher import ByteWalker, MatcherPool
from jradix.grammar.vocabulary import Vocabulary, vocabulary_of
from jradix.model_files import resolve
from jradix.tokenizer import Tokenizer
from report import print_result, print_table, summarise

LIBRARIES = ("jradix", *ENGINES)
MAX_SECONDS = {"outlines-core": 20.0}       # for a schema and its documents; some take it over 10 minutes
Tests = list[tuple[Any, bool]]
Row = tuple[str, Any, Tests]
Found = TypeVar("Found")
GOALS = dict(right_share=0.95, by_dfa_share=0.85, suite_right=230, strict_median_s=0.1, strict_p90_s=2.0,
             as_is_median_s=0.5, longest_s=20.0, peak_bytes=1 << 30, strict_median_bytes=1_500_000,
             strict_p90_bytes=15_000_000, start_p99_s=0.05)


class Verdict(NamedTuple):
    """What came of one schema: "right", "refused", "too large", "too deep", "invalid accepted", ..."""
    verdict: str
    reason: str
    seconds: float
    engine: str = ""
    num_states: int = 0


def judge(schema: Any, tests: Tests, options: dict[str, Any], limit: str = "auto") -> Verdict:
    """Compiles one schema and tries its documents."""
    started = time.process_time()
    try:
        grammar = compile_grammar(json_schema=schema, engine=limit, **options)
    except GrammarError as error:
        seconds = time.process_time() - started
        if "unsatisfiable" in str(error) and not any(valid for _, valid in tests):
            return Verdict("right", str(error), seconds, "dfa")
        return Verdict("too large" if isinstance(error, GrammarTooLarge) else "refused", str(error), seconds)
    seconds = time.process_time() - started
    walk: Walk = DfaWalk(grammar.dfa) if grammar.dfa is not None else MatcherWalk(ByteWalker(grammar.matcher))
    is_limited = grammar.report is not None and grammar.report.is_depth_limited and grammar.dfa is not None
    verdict, reason = judge_documents(walk, tests, is_limited)
    return Verdict(verdict, reason or grammar.reason or "", seconds, grammar.engine, grammar.num_states)


def judge_documents(walk: Walk, tests: Tests, is_depth_limited: bool = False) -> tuple[str, str]:
    """The verdict on a compiled schema and what was wrong."""
    wrong = []
    for document, valid in tests:
        try:
            accepted = Serialiser(walk).accepts(document)
        except TooManyOrders as error:
            return "not judged", str(error)
        if valid and not accepted and is_depth_limited and nesting(document) > MIN_FREE_DEPTH:
            return "too deep", json.dumps(document)[:200]
        if accepted != valid:
            wrong.append(("valid refused: " if valid else "INVALID ACCEPTED: ") + json.dumps(document)[:200])
    if not wrong:
        return "right", ""
    return ("invalid accepted" if any(line.startswith("INVALID") for line in wrong) else "valid refused",
            "; ".join(wrong))


def judge_other(compile_schema: Callable[[Any], Walk], schema: Any, tests: Tests) -> Verdict:
    """What came of one schema with another library."""
    started = time.process_time()
    try:
        walk = compile_schema(schema)
    except Refused as error:
        return Verdict("refused", str(error), time.process_time() - started)
    seconds = time.process_time() - started
    try:
        verdict, reason = judge_documents(walk, tests)
    except GrammarError as error:               # it gave up on a document
        verdict, reason = "too large", str(error)
    return Verdict(verdict, reason, seconds, "other")


class Ours(NamedTuple):
    """Judges rows with jradix."""
    options: dict[str, Any]
    limit: str

    def __call__(self, row: Row) -> Verdict:
        return judge(row[1], row[2], self.options, self.limit)


class Other(NamedTuple):
    """Judges rows with another library, which each process opens once; within MAX_SECONDS where that is needed."""
    library: str

    def __call__(self, row: Row) -> Verdict:
        compile_schema, max_s = _opened(self.library), MAX_SECONDS.get(self.library)
        if max_s is None:
            return judge_other(compile_schema, row[1], row[2])
        # Compiled code cannot be interrupted, so that a process of its own does the work.
        fork = get_context("fork")
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(target=lambda: sender.send(judge_other(compile_schema, row[1], row[2])))
        child.start()
        sender.close()
        try:
            return receiver.recv() if receiver.poll(max_s) else Verdict("too slow", f"over {max_s} s", max_s)
        except EOFError:
            child.join()
            return Verdict("crashed", f"exit code {child.exitcode}", 0.0)
        finally:
            child.kill()
            child.join()


@functools.cache
def _opened(library: str) -> Callable[[Any], Walk]:
    compile_schema = ENGINES[library]()
    assert compile_schema is not None, library
    return compile_schema


class Sized(NamedTuple):
    """What became of one schema with its token tables: the engine or the refusal, what it cost, and the most memory
    its process has held so far."""
    engine: str
    is_refused: bool
    seconds: float
    num_states: int
    num_rows: int
    table_bytes: int
    peak_bytes: int


class Tables(NamedTuple):
    """Compiles rows for the vocabulary of a tokenizer, and returns no more than sizes: all tables would be the peak."""
    tokenizer: Path
    options: dict[str, Any]

    def __call__(self, row: Row) -> Sized:
        vocabulary = read_vocabulary(self.tokenizer)
        started = time.process_time()
        grammar: Grammar | None = None
        try:
            grammar = compile_grammar(json_schema=row[1], vocabulary=vocabulary, **self.options)
            engine = grammar.engine
        except GrammarError as error:
            engine = type(error).__name__
        seconds = time.process_time() - started
        sizes = (0, 0, 0) if grammar is None else (grammar.num_states, grammar.num_rows, grammar.table_bytes)
        return Sized(engine, grammar is None, seconds, *sizes, peak_bytes())


def peak_bytes() -> int:
    """The most memory that this process has held."""
    with contextlib.suppress(OSError):       # Linux: a new process begins with its parent's ru_maxrss
        return 1024 * int(Path("/proc/self/status").read_text(encoding="utf-8").split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Starts(NamedTuple):
    """CPU seconds until the matcher has made a row's first mask, as with `grammar_start="matcher"`; None: it refuses."""
    tokenizer: Path

    def __call__(self, row: Row) -> float | None:
        pool = _matchers(self.tokenizer)
        started = time.process_time()
        try:
            source = compile_grammar(json_schema=row[1], engine="matcher").matcher
            pool.check(source)
            pool.start(source).mask()
        except GrammarError:
            return None
        return time.process_time() - started


@functools.cache
def _matchers(tokenizer: Path) -> MatcherPool:
    """A pool that has served a grammar: what it and the library make once is made."""
    pool = MatcherPool(read_vocabulary(tokenizer))
    source = compile_grammar(json_schema={"type": "object"}, engine="matcher").matcher
    pool.check(source)
    pool.start(source).mask()
    return pool


@functools.cache
def read_vocabulary(path: Path) -> Vocabulary:
    return vocabulary_of(Tokenizer.from_gguf(path) if path.suffix == ".gguf" else Tokenizer.from_folder(path))


def in_workers(one: Callable[[Row], Found], rows: Iterable[Row], num_workers: int) -> Iterator[tuple[Row, Found]]:
    """Rows with what `one` makes of each, in order, by new processes."""
    rows = list(rows)
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        yield from zip(rows, pool.map(one, rows))


def nesting(value: Any) -> int:
    """Levels of arrays and objects."""
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(nesting, value.values() if isinstance(value, dict) else value), default=0)


def real_schemas(data: Path) -> Iterator[Row]:
    with open(data / "json_schemas.jsonl", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield row["id"], row["schema"], [(test["data"], test["valid"]) for test in row["tests"]]


def suite_groups(data: Path) -> Iterator[Row]:
    for path in sorted((data / "json_schema_test_suite").glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield (f"{path.stem}: {group['description']}", group["schema"],
                   [(test["data"], test["valid"]) for test in group["tests"]])


def chosen(rows: Iterator[Row], arguments: argparse.Namespace) -> Iterator[Row]:
    for index, row in enumerate(rows):
        if index % arguments.every == arguments.first % arguments.every and arguments.only in row[0]:
            yield row


def reason_in_short(reason: str) -> str:
    """The last keyword of a reason's path, and the reason without quoted or numeric detail."""
    path, _, text = reason.partition(": ")
    keyword = next((part for part in reversed(path.split("/")) if part.isidentifier()), "")
    return f"{keyword}: {re.sub(r'[0-9,]+', 'N', re.sub(chr(39) + '.*?' + chr(39), '...', text))[:70]}"


def measure(title: str, rows: Iterator[Row], arguments: argparse.Namespace, one: Callable[[Row], Verdict]
            ) -> dict[str, Any]:
    """Judges rows, prints the table and returns the figures."""
    found = []
    for (name, _, _), verdict in in_workers(one, chosen(rows, arguments), arguments.workers):
        found.append(verdict)
        if arguments.show and (verdict.verdict != "right" or verdict.seconds > 2):
            print(f"{verdict.verdict} {verdict.seconds:.2f} s {verdict.engine} {verdict.num_states} {name}: "
                  f"{verdict.reason[:300]}", flush=True)
    if not found:
        return dict(total=0)
    verdicts = Counter(each.verdict for each in found)
    engines = Counter(each.engine for each in found if each.verdict == "right")
    refusals = Counter(f"{each.verdict}: {reason_in_short(each.reason)}" for each in found
                       if each.verdict in ("refused", "too large", "too slow", "crashed"))
    by_dfa = sum(count for engine, count in engines.items() if engine.startswith("dfa"))
    time_s = summarise([each.seconds for each in found])
    longest = max(each.seconds for each in found)
    print_table(title, [("", "schemas", "share"), *((name, count, count / len(found))
                                                    for name, count in verdicts.most_common()),
                        *((f"  right by {name}", count, count / verdicts["right"])
                          for name, count in engines.most_common())],
                [f"{count}x {reason}" for reason, count in refusals.most_common(12)]
                + [f"CPU seconds median {time_s.median:.4f}, p90 {time_s.p90:.3f}, max {longest:.2f}"])
    return dict(total=len(found), **{name.replace(" ", "_"): count for name, count in verdicts.items()},
                right_by_dfa=by_dfa, right_by_matcher=engines["matcher"], engines=dict(engines), seconds=time_s,
                max_s=longest, refusals=dict(refusals))


def measure_tables(title: str, rows: Iterator[Row], arguments: argparse.Namespace, one: Callable[[Row], Sized]
                   ) -> dict[str, Any]:
    """CPU time and bytes of automata with their token tables; matchers and refusals count with the time they took."""
    found = []
    for (name, _, _), each in in_workers(one, chosen(rows, arguments), arguments.workers):
        found.append(each)
        if arguments.show and each.seconds > 2:
            print(f"{each.seconds:.2f} s {each.engine} {name}", flush=True)
    engines = Counter(each.engine for each in found if not each.is_refused)
    refused = Counter(each.engine for each in found if each.is_refused)
    sizes = [each for each in found if each.engine.startswith("dfa")]
    if not sizes:
        return dict(total=len(found), engines=dict(engines), refused=dict(refused))
    seconds, peak = [each.seconds for each in found], max(each.peak_bytes for each in found)
    time_s = summarise(seconds)
    table_bytes = summarise([size.table_bytes for size in sizes])
    states, mask_rows = summarise([size.num_states for size in sizes]), summarise([size.num_rows for size in sizes])
    print_table(title, [("", "median", "p90", "max"),
                        ("CPU seconds", time_s.median, time_s.p90, max(seconds)),
                        ("table bytes", table_bytes.median, table_bytes.p90, max(size.table_bytes for size in sizes)),
                        ("states", states.median, states.p90, max(size.num_states for size in sizes)),
                        ("mask rows", mask_rows.median, mask_rows.p90, max(size.num_rows for size in sizes))],
                [f"{len(seconds)} schemas: {dict(engines)}, refused {dict(refused)}",
                 f"peak memory of a process {peak / 1e6:,.0f} MB"])
    return dict(total=len(seconds), engines=dict(engines), refused=dict(refused), seconds=time_s, max_s=max(seconds),
                table_bytes=table_bytes, max_table_bytes=max(size.table_bytes for size in sizes), states=states,
                rows=mask_rows, peak_bytes=peak)


def read_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with json_schemas.jsonl and the suite")
    parser.add_argument("--which", choices=("schemas", "suite", "tables", "all"), default="all")
    parser.add_argument("--every", type=int, default=1, help="only every n-th schema")
    parser.add_argument("--first", type=int, default=0, help="remainder of those taken, with --every")
    parser.add_argument("--only", default="", help="only those whose name contains this")
    parser.add_argument("--engine", choices=("auto", "dfa", "matcher"), default="auto")
    parser.add_argument("--show", action="store_true", help="print each that is not right, or slow")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES[:1], help="whose coverage")
    parser.add_argument("--tokenizer", help="GGUF file or model folder whose vocabulary the tables are for")
    parser.add_argument("--smollm2", action="store_true", help="tables for the vocabulary of the demo model")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes that work at a time")
    return parser.parse_args(argv)


def measure_starts(title: str, rows: Iterator[Row], arguments: argparse.Namespace, one: Callable[[Row], float | None]
                   ) -> dict[str, Any]:
    """CPU time of the rows that the matcher follows; the others wait for their tables."""
    found = [seconds for _, seconds in in_workers(one, chosen(rows, arguments), arguments.workers)]
    seconds = [each for each in found if each is not None]
    if not seconds:
        return dict(total=len(found), refused=len(found))
    time_s, p99 = summarise(seconds), float(np.quantile(seconds, 0.99))
    print_table(title, [("", "median", "p90", "p99", "max"), ("CPU seconds", *time_s, p99, max(seconds))],
                [f"{len(found)} schemas, of which the matcher refuses {len(found) - len(seconds)}"])
    return dict(total=len(found), refused=len(found) - len(seconds), seconds=time_s, p99_s=p99, max_s=max(seconds))


def main(argv: list[str] | None = None) -> int:
    result = coverage(read_options(argv))
    print_result("structured_coverage", result)
    return int(accepts_invalid(result))


def accepts_invalid(result: dict[str, Any]) -> bool:
    """Whether jradix accepted an invalid document."""
    return any(result.get(part, {}).get("invalid_accepted") for part in ("schemas", "suite", "suite_formats_off"))


def coverage(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of every part that the options name, by part; of other libraries by library and part."""
    result: dict[str, Any] = dict(goals=GOALS)
    parts = ("schemas", "suite", "tables") if arguments.which == "all" else (arguments.which,)
    ours = Ours({}, arguments.engine)
    if "schemas" in parts and "jradix" in arguments.libraries:
        result["schemas"] = measure("real schemas", real_schemas(arguments.data), arguments, ours)
    if "suite" in parts and "jradix" in arguments.libraries:
        result["suite"] = measure("test suite, draft 2020-12", suite_groups(arguments.data), arguments, ours)
        result["suite_formats_off"] = measure("test suite, formats as annotations", suite_groups(arguments.data),
                                              arguments, ours._replace(options=dict(formats=False)))
    model = arguments.tokenizer or ("demo" if arguments.smollm2 else None)
    if "tables" in parts and model:
        tables = Tables(Path(resolve(model).path), dict(engine=arguments.engine))
        for title, options in (("tables, strict=True", dict(strict=True)), ("tables, schemas as they are", {})):
            result["tables_strict" if options else "tables_as_is"] = measure_tables(
                title, real_schemas(arguments.data), arguments, tables._replace(options=tables.options | options))
        result["matcher_starts"] = measure_starts("start on the matcher", real_schemas(arguments.data), arguments,
                                                  Starts(tables.tokenizer))
    for name in arguments.libraries:
        if name == "jradix":
            continue
        if ENGINES[name]() is None:
            print(f"{name}: not installed, left out")
            continue
        for part, rows in (("schemas", real_schemas), ("suite", suite_groups)):
            if part in parts:
                result[f"{name}_{part}"] = measure(f"{name}, {part}", rows(arguments.data), arguments, Other(name))
    return result


if __name__ == "__main__":
    sys.exit(main())
