"""Benchmark of prefix reuse: what a workload computes, waits and takes, with the cache on, off, or both in turn.

    python benchmarks/prefix_reuse.py --workload react --size default --compare

Greedy decoding on token ids, fixed output lengths. Before measuring, the workload runs once per mode with another
seed, which compiles the shapes it needs; the report says how many programs were compiled later all the same.
"""
from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import numpy as np

from jradix.llm import LLM
from llm_runs import Run, add_llm_options, make_llm, run_workload, use_cache
from report import Summary, print_result, print_table, summarise
from workloads import SIZES, WORKLOADS, minimum_computed_tokens

MODES = {True: "cache on", False: "cache off"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="react")
    parser.add_argument("--size", default="small")
    parser.add_argument("--compare", action="store_true", help="also run with the cache off, in turn")
    parser.add_argument("--no-prefix-caching", action="store_true", help="run with the cache off only")
    parser.add_argument("--warmup", choices=("workload", "full"), default="workload",
                        help="full: compile every shape of the engine, as LLM.warmup does")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    add_llm_options(parser)
    options = parser.parse_args(argv)
    if options.size not in SIZES[options.workload]:
        parser.error(f"--size {options.size}: {options.workload} has {', '.join(SIZES[options.workload])}")
    if options.compare and options.no_prefix_caching:
        parser.error("--compare runs both modes; leave out --no-prefix-caching")
    modes = [True, False] if options.compare else [not options.no_prefix_caching]
    with make_llm(options) as llm:
        runs, num_late = measure(llm, options, modes)
        device = llm.stats()["device"]
    results = {MODES[mode]: describe(runs[mode]) for mode in modes}
    table: list[list[Any]] = [["", *results]]
    for key in next(iter(results.values())):
        if key != "ttft_ms":
            table.append([key.replace("_", " "), *(_cell(result[key]) for result in results.values())])
    for turn in range(len(runs[modes[0]][0].turns)):
        table.append([f"TTFT of turn {turn + 1}, ms", *(result["ttft_ms"][turn].median for result in results.values())])
    result = dict(workload=options.workload, size=options.size, model=options.model, dtype=options.dtype,
                  repeats=options.repeats, warmup=options.warmup, compiled_after_warmup=num_late, modes=results)
    notes = [f"warm-up: {'every shape' if options.warmup == 'full' else 'the workload with another seed'}; "
             f"{num_late} programs compiled after it; medians of {options.repeats} runs"]
    if options.compare:
        result["comparison"] = compare(results, runs)
        notes += [f"{name.replace('_', ' ')}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}"
                  for name, value in result["comparison"].items()]
    print_table(f"{options.workload}, {options.size}", table, notes)
    print_result("prefix_reuse", result, device)
    return 0


def measure(llm: LLM, options: argparse.Namespace, modes: list[bool]) -> tuple[dict[bool, list[Run]], int]:
    """Runs of each mode, taken in turn, and the number of programs compiled after the warm-up."""
    make = WORKLOADS[options.workload]
    if options.warmup == "full":
        llm.warmup()
    for mode in modes:
        use_cache(llm, mode)
        run_workload(llm, make(options.size, options.seed + 1))
    num_programs = llm.stats()["compiled_programs"]
    runs: dict[bool, list[Run]] = {mode: [] for mode in modes}
    for repeat in range(options.repeats):
        for mode in modes if repeat % 2 == 0 else modes[::-1]:
            use_cache(llm, mode)
            runs[mode].append(run_workload(llm, make(options.size, options.seed)))
    return runs, llm.stats()["compiled_programs"] - num_programs


def describe(runs: list[Run]) -> dict[str, Any]:
    """The numbers of one mode. Counts are those of the first run; times are medians over the runs."""
    first = runs[0]
    fewest = minimum_computed_tokens(first.done)
    shares = cached_shares(first)
    num_turns = len(first.turns)
    ttft = [[statistics.median(output.metrics.ttft_s for output in run.turns[turn]) for run in runs]
            for turn in range(num_turns)]
    wall = summarise([run.wall_s for run in runs])
    return dict(
        prompt_tokens=first.num_prompt_tokens,
        prompt_tokens_computed=first.num_computed_tokens,
        fewest_possible=fewest,
        computed_over_fewest=first.num_computed_tokens / fewest,
        cached_share_of_context_mean=statistics.fmean(shares) if shares else None,
        cached_share_of_context_least=min(shares) if shares else None,
        preemptions=sum(output.metrics.num_preemptions for turn in first.turns for output in turn),
        wall_s=wall,
        cpu_s=summarise([run.cpu_s for run in runs]),
        output_tokens_per_s=first.num_output_tokens / wall.median,
        all_tokens_per_s=(first.num_prompt_tokens + first.num_output_tokens) / wall.median,
        ttft_ms=[summarise(times, 1e3) for times in ttft])


def cached_shares(run: Run) -> list[float]:
    """Per request from the second turn on: cached tokens as a share of the earlier turn's text that it begins with."""
    shares = []
    for before, now in zip(run.turns, run.turns[1:]):
        contexts = [np.array(output.prompt_token_ids + output.outputs[0].token_ids) for output in before]
        for output in now:
            prompt = np.array(output.prompt_token_ids)
            known = max(_common_tokens(prompt, context) for context in contexts)
            shares.append(output.num_cached_tokens / known)
    return shares


def compare(results: dict[str, dict[str, Any]], runs: dict[bool, list[Run]]) -> dict[str, Any]:
    """The two modes side by side; a ratio above 1 is in favour of the cache."""
    on, off = results[MODES[True]], results[MODES[False]]
    same = [a == b for (_, a), (_, b) in zip(runs[True][0].done, runs[False][0].done)]
    found = dict(
        ttft_off_over_on_at_last_turn=off["ttft_ms"][-1].median / on["ttft_ms"][-1].median,
        wall_off_over_on=off["wall_s"].median / on["wall_s"].median,
        cpu_off_over_on=off["cpu_s"].median / on["cpu_s"].median,
        computed_off_over_on=off["prompt_tokens_computed"] / on["prompt_tokens_computed"],
        equal_outputs=f"{sum(same)} of {len(same)}")
    if len(on["ttft_ms"]) > 2:
        turn = min(len(on["ttft_ms"]), 10)
        found[f"ttft_on_turn_{turn}_over_turn_2"] = on["ttft_ms"][turn - 1].median / on["ttft_ms"][1].median
        found[f"ttft_off_turn_{turn}_over_turn_2"] = off["ttft_ms"][turn - 1].median / off["ttft_ms"][1].median
    return found


def _common_tokens(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _cell(value: Any) -> Any:
    return value.median if isinstance(value, Summary) else value


if __name__ == "__main__":
    sys.exit(main())
