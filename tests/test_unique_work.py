"""The scheduler computes no prompt token twice: the benchmark workloads against the fewest tokens possible, no device.

Outputs are random tokens; what is counted does not depend on them.
"""
from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from jradix.cache.prefix_cache import PrefixCache
from jradix.config import EngineConfig
from jradix.sampling_params import SamplingParams
from jradix.sched.order import depth_first_order
from jradix.sched.request import Request
from jradix.sched.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import workloads  # noqa: E402  (a script's module, not the package's)

LARGE_POOL = 200_000    # tokens


def computed_over_fewest(name: str, size: str, *, page_size: int, pool_tokens: int = LARGE_POOL,
                         depth_first: bool = True, host_tokens: int = 0) -> float:
    """Runs a workload one step ahead of an imagined device and compares the prompt tokens computed."""
    config = EngineConfig(page_size=page_size, num_pages=pool_tokens // page_size, max_model_len=8192,
                          num_host_pages=host_tokens // page_size)
    cache = PrefixCache.create(page_size=page_size, num_pages=config.num_pages, max_pages=config.max_pages_per_seq,
                               num_host_pages=config.num_host_pages)
    scheduler, numbers, rng = Scheduler(config, cache), itertools.count(), np.random.default_rng(0)

    def run(batch: list[workloads.Request]) -> list[list[int]]:
        prompts = [np.array(request.prompt, np.int32) for request in batch]
        requests = [Request(next(numbers), prompt.copy(), len(prompt), SamplingParams(temperature=0.0, ignore_eos=True),
                            request.num_output) for prompt, request in zip(prompts, batch)]
        cached = [cache.num_matching_tokens(prompt, request.namespace) for prompt, request in zip(prompts, requests)]
        for i in depth_first_order(prompts, cached) if depth_first else range(len(requests)):
            scheduler.add(requests[i])
        in_flight = None
        while True:
            plan = scheduler.schedule()
            if in_flight is not None:
                scheduler.update(*in_flight)
            if plan is None and in_flight is None:
                break
            in_flight = plan and (plan, rng.integers(100, 49_000, (1, len(plan.rows))).astype(np.int32))
        scheduler.take_ended()
        scheduler.check_invariants()
        return [request.output_ids for request in requests]

    done = workloads.drive(workloads.WORKLOADS[name](size), run)
    return scheduler.counters.num_computed_prompt_tokens / workloads.minimum_computed_tokens(done)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name, size", [("react", "default"), ("mcts", "odd"), ("chatbot", "odd"), ("thrash", "odd")])
def test_large_pool_computes_each_distinct_token_once(name: str, size: str, page_size: int) -> None:
    """In-batch sharing included; shared lengths are no multiples of a page."""
    assert computed_over_fewest(name, size, page_size=page_size) == 1.0


def test_depth_first_order_needs_a_pool_of_a_few_prefixes_only() -> None:
    pool = 4 * workloads.SIZES["thrash"]["default"]["prefix"]
    assert computed_over_fewest("thrash", "default", page_size=16, pool_tokens=pool) <= 1.05
    assert computed_over_fewest("thrash", "default", page_size=16, pool_tokens=pool, depth_first=False) > 1.5


def test_host_tier_makes_up_for_a_pool_of_a_quarter() -> None:
    size = workloads.SIZES["react"]["default"]
    needed = size["system"] + size["agents"] * size["turns"] * (size["observation"] + size["output"])
    small = dict(page_size=16, pool_tokens=needed // 4)
    assert computed_over_fewest("react", "default", **small, host_tokens=2 * needed) <= 1.05
    assert computed_over_fewest("react", "default", **small) > 2
