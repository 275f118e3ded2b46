"""Benchmark of structured output: coverage and compile times of schemas, and what a constraint costs while tokens run.

    python benchmarks/structured.py [--part model passes coverage] [--data ../shared/data] [--every 8]
                                    [--json FILE] [--markdown FILE]

- model: tokens per second under the product schema against the same number of free tokens, in turns of the same
  engine, with and without jump decoding; and steps of 32 rows with 32 grammars against 32 rows with one.
- passes: forward passes per output token of real documents under their own strict schemas; what is not forced takes
  one pass. Compact, and with ", " and ": " as separators.
- coverage: schemas right, wrong and refused, compile times and table sizes, beside other libraries where they are
  installed (`structured_coverage.py`).

The last two need `--data`, a folder with json_schemas.jsonl and the JSON schema test suite. The exit code is 1 when a
goal is missed or an invalid document was accepted.
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import structured_coverage
from jradix.errors import GrammarError
from jradix.grammar.compiler import compile_grammar
from jradix.llm import LLM
from jradix.model_files import resolve
from jradix.sampling_params import SamplingParams
from llm_runs import add_llm_options, make_llm
from report import Watch, print_result, print_table, summarise
from workloads import JSON_MAX_TOKENS, JSON_PROMPT, PRODUCT_SCHEMA, PRODUCTS

PARTS = ("model", "passes", "coverage")
GOALS = {"without jump": 0.97, "with jump": 1.15}
MAX_PASSES = {"compact": 0.78, "spaced": 0.70}
MAX_GRAMMAR_COST = 1.03
SEPARATORS: dict[str, Any] = {"compact": "compact", "spaced": (", ", ": ")}
NUM_GRAMMARS = 32
NUM_GROUPS = 383        # of the test suite


class Run(NamedTuple):
    """Wall seconds of a batch, its steps, its output tokens, and how many of these were forced."""
    wall_s: float
    num_steps: int
    num_tokens: list[int]
    num_forced: int


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_llm_options(parser)
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all, without --data the first")
    parser.add_argument("--size", choices=("tiny", "default"), default="default")
    parser.add_argument("--data", type=Path, help="folder with json_schemas.jsonl and the JSON schema test suite")
    parser.add_argument("--every", type=int, default=1, help="only every n-th schema")
    parser.add_argument("--repeats", type=int, help="turns of each kind; default 5, tiny 1")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)),
                        help="processes for schemas, at a time")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--markdown", type=Path, help="also write them as a table")
    options = parser.parse_args(argv)
    repeats = options.repeats or (1 if options.size == "tiny" else 5)
    parts = options.part or (PARTS if options.data else PARTS[:1])
    if options.data is None and set(parts) - {"model"}:
        parser.error("--part passes and coverage read schemas: give --data, the folder they are in")
    rows: list[Figure] = []
    result: dict[str, Any] = dict(size=options.size, model=options.model)

    def add(found: list[Figure]) -> None:
        """Prints and keeps the figures of a part, so that an interrupt costs no other part's."""
        rows.extend(found)
        print_table("structured output", [("", "measured", "goal", "holds"),
                                          *((row.name, row.value, row.goal, row.holds) for row in found)])
        result.update(figures=[row._asdict() for row in rows], all_hold=all(row.holds is not False for row in rows))
        if options.markdown:
            options.markdown.write_text(markdown(rows), encoding="utf-8")
        if options.json:
            options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")

    if "model" in parts:
        add(model_figures(options, repeats))
    if "passes" in parts:
        add(passes_figures(options))
    if "coverage" in parts:
        result["coverage"] = structured_coverage.coverage(structured_coverage.read_options([
            "--data", str(options.data), "--every", str(options.every), "--workers", str(options.workers),
            "--tokenizer", options.tokenizer or options.model, "--libraries", *structured_coverage.LIBRARIES]))
        add(coverage_figures(result["coverage"]))
    print_result("structured", result)
    return int(not result["all_hold"] or structured_coverage.accepts_invalid(result.get("coverage", {})))


class Figure(NamedTuple):
    """One measured number; `goal` as text, None where there is none."""
    name: str
    value: float
    goal: str | None = None
    holds: bool | None = None


def at_least(name: str, value: float, goal: float) -> Figure:
    return Figure(name, value, f">= {goal}", value >= goal)


def at_most(name: str, value: float, goal: float) -> Figure:
    return Figure(name, value, f"<= {goal}", value <= goal)


def markdown(rows: list[Figure]) -> str:
    lines = ["| figure | measured | goal | holds |", "|---|---|---|---|"]
    for row in rows:
        holds = "" if row.holds is None else "yes" if row.holds else "**no**"
        lines.append(f"| {row.name} | {row.value:.4g} | {row.goal or ''} | {holds} |")
    return "\n".join(lines) + "\n"


# -- on the model


def model_figures(options: argparse.Namespace, repeats: int) -> list[Figure]:
    """Constrained against free tokens per second, and many grammars against one."""
    is_tiny = options.size == "tiny"
    rows = []
    with make_llm(options) as llm:
        max_tokens = 24 if is_tiny else JSON_MAX_TOKENS
        prompts = [llm.render_chat([{"role": "user", "content": JSON_PROMPT.format(product=product)}])
                   for product in PRODUCTS]
        bound = SamplingParams(temperature=0.0, max_tokens=max_tokens, json_schema=PRODUCT_SCHEMA)

        def constrained(is_jumping: bool) -> Run:
            object.__setattr__(llm.engine.config, "jump_decoding", is_jumping)
            return run(llm, prompts, [bound] * len(prompts))

        def free(num_tokens: list[int]) -> Run:
            return run(llm, prompts, [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
                                      for n in num_tokens])

        turns: dict[str, list[Run]] = {"free": [], "without jump": [], "with jump": []}
        for turn in range(repeats + 1):                     # the first compiles
            plain, jumped = constrained(False), constrained(True)
            found = {"free": free(plain.num_tokens), "without jump": plain, "with jump": jumped}
            if plain.num_tokens != jumped.num_tokens:
                raise RuntimeError("jump decoding changed the number of tokens")
            for name, each in found.items() if turn else ():
                turns[name].append(each)
        for name, goal in GOALS.items():
            ratio = summarise([f.wall_s / c.wall_s for f, c in zip(turns["free"], turns[name])]).median
            rows.append(at_least(f"constrained / free tokens per second, {name}", ratio, goal))
        last = turns["with jump"][-1]
        rows += [Figure("share of the product's tokens that were forced", last.num_forced / sum(last.num_tokens)),
                 Figure("steps with jump / without", last.num_steps / turns["without jump"][-1].num_steps)]
    with make_llm(options, max_num_seqs=NUM_GRAMMARS, jump_decoding=False) as llm:
        num_tokens = 8 if is_tiny else 48
        prompts = [llm.encode(f"record {i}") for i in range(NUM_GRAMMARS)]

        def many(num_grammars: int) -> Run:
            return run(llm, prompts, [SamplingParams(
                temperature=0.0, max_tokens=num_tokens, regex=f"[a-z ]{{{200 + i % num_grammars}}}")
                for i in range(NUM_GRAMMARS)])

        pairs = [(many(1), many(NUM_GRAMMARS)) for _ in range(repeats + 1)][1:]
        ratio = summarise([(b.wall_s / b.num_steps) / (a.wall_s / a.num_steps) for a, b in pairs]).median
        rows.append(at_most(f"step of {NUM_GRAMMARS} rows with {NUM_GRAMMARS} grammars / with one", ratio,
                            MAX_GRAMMAR_COST))
    return rows


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
    """One batch on an empty cache. Raises RuntimeError when a request failed."""
    llm.cache.clear()
    before, watch = llm.stats()["steps"], Watch()
    watch.start()
    outputs = llm.generate(prompts, params)
    watch.stop()
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(prompts)} requests failed: {failed[0]}")
    samples = [output.outputs[0] for output in outputs]
    return Run(watch.wall_s[0], llm.stats()["steps"] - before, [len(sample.token_ids) for sample in samples],
               sum(sample.num_forced_tokens for sample in samples))


# -- passes per token


def passes_figures(options: argparse.Namespace) -> list[Figure]:
    """Passes per token of valid documents under their strict schemas, over all tokens."""
    path = Path(resolve(options.tokenizer or options.model).path)
    schemas = list(itertools.islice(structured_coverage.real_schemas(options.data), None, None, options.every))
    rows = []
    for name, whitespace in SEPARATORS.items():
        shares = [share for _, share in structured_coverage.in_workers(ForcedShare(path, whitespace), schemas,
                                                                       options.workers)]
        num_documents, num_tokens, num_forced = (sum(counts) for counts in zip(*shares))
        rows.append(at_most(f"passes per token, strict schemas, {name} ({num_documents} documents)",
                            1 - num_forced / max(num_tokens, 1), MAX_PASSES[name]))
    return rows


class ForcedShare(NamedTuple):
    """Of a schema with its documents: those that the strict schema allows, their canonical tokens, and how many of
    these are forced."""
    tokenizer: Path
    whitespace: Any

    def __call__(self, row: structured_coverage.Row) -> tuple[int, int, int]:
        _, schema, tests = row
        vocabulary = structured_coverage.read_vocabulary(self.tokenizer)
        try:
            grammar = compile_grammar(json_schema=schema, vocabulary=vocabulary, strict=True, engine="dfa",
                                      whitespace=self.whitespace)
        except GrammarError:
            return 0, 0, 0
        num_documents = num_tokens = num_forced = 0
        places = {name: place for place, name in enumerate(dict.fromkeys(declared_names(schema)))}
        separators = (",", ":") if self.whitespace == "compact" else self.whitespace
        for document in (document for document, valid in tests if valid):
            text = json.dumps(in_order(document, places), ensure_ascii=False, separators=separators)
            if not grammar.accepts(text):
                continue
            ids = vocabulary.encode(text)
            if b"".join(vocabulary.token_bytes[i] or b"" for i in ids) != text.encode():
                continue        # a character that no token spells
            num_documents += 1
            state = 0
            for token in ids:
                num_tokens += 1
                num_forced += int(grammar.tables.forced_token[state] == token)
                state = grammar.tables.advance(state, token)
        return num_documents, num_tokens, num_forced


def declared_names(schema: Any) -> Iterator[str]:
    """Names of properties, wherever they are declared, in order."""
    if isinstance(schema, dict):
        for keyword, value in schema.items():
            if keyword == "properties" and isinstance(value, dict):
                yield from value
            yield from declared_names(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from declared_names(item)


def in_order(value: Any, places: dict[str, int]) -> Any:
    """The document with the keys of its objects in the order of their declaration, the others after them."""
    if isinstance(value, list):
        return [in_order(item, places) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: in_order(value[key], places) for key in sorted(value, key=lambda key: places.get(key, len(places)))}


# -- coverage


def coverage_figures(found: dict[str, Any]) -> list[Figure]:
    """The figures of `structured_coverage` that have a goal, and those of other libraries beside them."""
    goals, rows = structured_coverage.GOALS, []
    for part, title in (("schemas", "real schemas"), ("suite", "groups of the test suite")):
        for library in structured_coverage.LIBRARIES:
            each = found.get(part if library == "jradix" else f"{library}_{part}")
            if not each or not each["total"]:
                continue
            right, total = each.get("right", 0), each["total"]
            name, wrong = f"{library}: {title}, {total}", float(each.get("invalid_accepted", 0))
            if library != "jradix":
                rows += [Figure(f"{name}: right", right), Figure(f"{name}: accept invalid documents", wrong)]
            elif part == "schemas":
                rows += [at_least(f"{name}: share right", right / total, goals["right_share"]),
                         at_least(f"{name}: share of these by automaton", each["right_by_dfa"] / max(right, 1),
                                  goals["by_dfa_share"]), at_most(f"{name}: accept invalid documents", wrong, 0)]
            else:       # the goal is for all of its groups
                rows += [at_least(f"{name}: right", right, goals["suite_right"] * total // NUM_GROUPS),
                         at_most(f"{name}: accept invalid documents", wrong, 0)]
    for part, title in (("tables_strict", "strict"), ("tables_as_is", "as they are")):
        each = found.get(part, {})
        if "seconds" not in each:
            continue
        seconds, sizes = each["seconds"], each["table_bytes"]
        is_strict, name = part == "tables_strict", f"tables, schemas {title}"
        rows.append(at_most(f"{name}: CPU seconds, median", seconds.median,
                            goals["strict_median_s" if is_strict else "as_is_median_s"]))
        rows.append(at_most(f"{name}: CPU seconds, longest", each["max_s"], goals["longest_s"]))
        rows.append(at_most(f"{name}: peak bytes of a process", each["peak_bytes"], goals["peak_bytes"]))
        if is_strict:
            rows += [at_most(f"{name}: CPU seconds, 90th percentile", seconds.p90, goals["strict_p90_s"]),
                     at_most(f"{name}: bytes, median", sizes.median, goals["strict_median_bytes"]),
                     at_most(f"{name}: bytes, 90th percentile", sizes.p90, goals["strict_p90_bytes"])]
    starts = found.get("matcher_starts", {})
    if "p99_s" in starts:
        rows.append(at_most(f"matcher's first mask, {starts['total'] - starts['refused']} schemas that it follows: CPU "
                            "seconds, 99th percentile", starts["p99_s"], goals["start_p99_s"]))
    return rows


if __name__ == "__main__":
    sys.exit(main())
