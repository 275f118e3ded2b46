"""What `deterministic=True` costs, and whether it holds: computed tokens and time against the default, and bits.

    python benchmarks/determinism.py [--workloads react mcts chatbot noshare] [--size small] [--reps 3]

Two engines with the same weights and pool run each workload in turn, every time from an empty cache; ratios are of
neighbouring runs. Then some prompts of each workload are run in three ways on either engine: alone in an empty cache,
all together, and all together again on the cache that leaves. The log-probabilities of the chosen tokens must have the
same bits in all three with `deterministic=True`; the exit code is 1 when they have not. How many prompts differ without
it is printed as well.
"""
from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from jradix.llm import LLM
from jradix.sampling_params import SamplingParams
from llm_runs import Run, add_llm_options, make_llm, run_workload, use_cache
from report import print_result, print_table
from workloads import WORKLOADS

NUM_COMPARED = 4      # prompts of each workload whose bits are compared
NUM_OUTPUT = 16


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_llm_options(parser)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS),
                        default=["react", "mcts", "chatbot", "noshare"])
    parser.add_argument("--size", choices=("tiny", "small", "default"), default="small")
    parser.add_argument("--reps", type=int, default=3, help="runs of each workload on each engine")
    options = parser.parse_args(argv)
    engines = {False: make_llm(options), True: make_llm(options, deterministic=True)}
    rows, wrong = [], 0
    for name in options.workloads:
        runs: dict[bool, list[Run]] = {False: [], True: []}
        for turn in range(options.reps + 1):          # the first compiles
            for is_fixed, llm in engines.items():
                use_cache(llm, True)
                run = run_workload(llm, WORKLOADS[name](options.size))
                if turn:
                    runs[is_fixed].append(run)
        prompts = [request.prompt for request, _ in runs[True][0].done]
        prompts = prompts[::max(len(prompts) // NUM_COMPARED, 1)][:NUM_COMPARED]
        differ = {is_fixed: num_differing(llm, prompts) for is_fixed, llm in engines.items()}
        wrong += differ[True]
        rows.append(dict(
            workload=name, prompt_tokens=runs[True][0].num_prompt_tokens,
            computed={str(is_fixed): each[0].num_computed_tokens for is_fixed, each in runs.items()},
            wall_s={str(is_fixed): statistics.median(run.wall_s for run in each) for is_fixed, each in runs.items()},
            wall_ratio=statistics.median(b.wall_s / a.wall_s for a, b in zip(runs[False], runs[True])),
            cpu_ratio=statistics.median(b.cpu_s / a.cpu_s for a, b in zip(runs[False], runs[True])),
            prompts_compared=len(prompts), prompts_that_differ={str(key): n for key, n in differ.items()}))
    table: list[list[Any]] = [["", "prompt tokens", "computed", "deterministic", "ratio", "wall s", "deterministic",
                               "wall ratio", "CPU ratio", "other bits", "deterministic"]]
    for row in rows:
        plain, fixed = row["computed"]["False"], row["computed"]["True"]
        table.append([row["workload"], row["prompt_tokens"], plain, fixed, fixed / plain, row["wall_s"]["False"],
                      row["wall_s"]["True"], row["wall_ratio"], row["cpu_ratio"],
                      *(f"{n} of {row['prompts_compared']}" for n in row["prompts_that_differ"].values())])
    grid = engines[True].config.hit_granularity
    print_table(f"deterministic=True, chunks of {grid} tokens", table,
                [f"medians of {options.reps} runs in turn, each from an empty cache; other bits: prompts whose "
                 "log-probabilities are not the same alone, together and together again"])
    print_result("determinism", dict(size=options.size, model=options.model, dtype=options.dtype, grid_tokens=grid,
                                     reps=options.reps, workloads=rows), engines[True].stats()["device"])
    return 1 if wrong else 0


def num_differing(llm: LLM, prompts: list[list[int]]) -> int:
    """Prompts whose log-probabilities differ in any bit between alone, together, and together on a warm cache."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=1)
    found = []
    for prompt in prompts:
        use_cache(llm, True)
        found.append([_bits(llm.generate([prompt], params)[0])])
    use_cache(llm, True)
    for _ in range(2):
        for seen, output in zip(found, llm.generate(prompts, params)):
            seen.append(_bits(output))
    return sum(len(set(seen)) > 1 for seen in found)


def _bits(output: Any) -> tuple:
    completion = output.outputs[0]
    return tuple((token, entry[token].logprob) for token, entry in zip(completion.token_ids, completion.logprobs))


if __name__ == "__main__":
    sys.exit(main())
