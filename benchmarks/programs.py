"""Benchmark of programs: host time per generated token with many of them alive, and the time of a fork.

    python benchmarks/programs.py [--programs 1000] [--model demo] [--json FILE]

- overhead: `--programs` programs of two short parts each are alive at once on one engine. Host time is CPU time of the
  thread that runs them all, planning and results of the engine's steps included; what dispatching the compiled steps
  takes is given apart, because it is XLA's. The baseline is the engine alone on the same number of requests and tokens.
- fork: `s.fork(64)` on a text of 8,192 tokens, without the generation that follows.
"""
from __future__ import annotations

import argparse
import sys
import time

import jradix
from jradix import LLM, SamplingParams, gen
from llm_runs import add_llm_options, make_llm
from report import print_result, print_table, summarise

MAX_US_PER_TOKEN, MAX_FORK_MS = 60.0, 1.0
PART_TOKENS, NUM_FORKS, FORK_TOKENS = 8, 64, 8192
TEXT = "Count from {i} on, in words, one after the other: "


@jradix.function
def count(s: jradix.State, i: int) -> None:
    s += TEXT.format(i=i)
    s += gen("first", max_tokens=PART_TOKENS, temperature=0.0, ignore_eos=True)
    s += "\nAnd now backwards: "
    s += gen("second", max_tokens=PART_TOKENS, temperature=0.0, ignore_eos=True)
    assert s["first"] is not None and s["second"] is not None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_llm_options(parser)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=20, help="forks timed")
    options = parser.parse_args(argv)
    with make_llm(options) as llm:
        count.run_batch(range(2 * llm.config.max_num_seqs), llm=llm, progress=False)      # compiles
        programs = measure_programs(llm, options.programs)
        requests = measure_requests(llm, 2 * options.programs)
        fork_ms = summarise([measure_fork(llm) for _ in range(options.repeats)], 1e3)
    holds = programs["without_dispatch_us"] <= MAX_US_PER_TOKEN and fork_ms.median <= MAX_FORK_MS
    print_table("programs", [
        ("host us per generated token", "all", "dispatch", "without dispatch", "bound"),
        (f"{options.programs} programs alive", *programs.values(), MAX_US_PER_TOKEN),
        ("the same requests without programs", *requests.values(), None),
        (f"fork({NUM_FORKS}) of {FORK_TOKENS} tokens, ms", fork_ms.median, None, None, MAX_FORK_MS)])
    print_result("programs", dict(programs=options.programs, model=options.model, overhead=programs, baseline=requests,
                                  fork_ms=fork_ms, all_hold=holds))
    return int(not holds)


def measure_programs(llm: LLM, num_programs: int) -> dict[str, float]:
    llm.cache.clear()
    before = counters(llm)
    states = count.run_batch(range(num_programs), llm=llm, progress=False, max_live=num_programs)
    assert all(state.error is None for state in states)
    return per_token(before, counters(llm))


def measure_requests(llm: LLM, num_requests: int) -> dict[str, float]:
    llm.cache.clear()
    params = SamplingParams(temperature=0.0, max_tokens=PART_TOKENS, ignore_eos=True)
    before = counters(llm)
    llm.generate([TEXT.format(i=i) for i in range(num_requests)], params, progress=False)
    return per_token(before, counters(llm))


def counters(llm: LLM) -> tuple[float, float, int]:
    """CPU seconds of this thread, those of them that dispatched, tokens generated."""
    stats = llm.stats()
    return time.thread_time(), stats["host_time"]["dispatch_s"], stats["tokens"]["generated"]


def per_token(before: tuple[float, float, int], after: tuple[float, float, int]) -> dict[str, float]:
    host, dispatch, tokens = (b - a for a, b in zip(before, after))
    return dict(all_us=1e6 * host / tokens, dispatch_us=1e6 * dispatch / tokens,
                without_dispatch_us=1e6 * (host - dispatch) / tokens)


def measure_fork(llm: LLM) -> float:
    state = jradix.start(llm)
    state.append_token_ids([100 + i % 1000 for i in range(FORK_TOKENS)])
    state += "and"
    start = time.perf_counter()
    state.fork(NUM_FORKS)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
