"""The whole cache under a real model: reuse to the last token, the host tier, namespaces, waiting for age.

Every step runs with NaN in all KV slots that nobody owns: what is reused must have been copied, not met by chance.
"""
from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from jradix.engine import Engine
from jradix.errors import RequestError
from jradix.outputs import RequestOutput
from jradix.sampling_params import SamplingParams
from toy_engine import (assert_idle, drain, greedy, make_engine, new_runner, run_all, steps, toy_lm, toy_runner,
                        tokens_of)

HOST_PAGES = 300


def engine_of(page_size: int, *, host: bool = False, **sizes: object) -> Engine:
    if host:
        return make_engine(toy_runner(page_size=page_size, num_host_pages=HOST_PAGES), **sizes)
    return make_engine(toy_runner(page_size=page_size), **sizes)


def checked(engine: Engine, prompts: Sequence[Sequence[int]], num_output: int = 6,
            **fields: object) -> list[RequestOutput]:
    """Runs prompts in one batch; each output must be REF's."""
    outputs = run_all(engine, prompts, greedy(num_output, **fields), poison=np.nan)
    for prompt, output in zip(prompts, outputs):
        toy_lm().assert_greedy(prompt, output.outputs[0].token_ids, num_output)
    return outputs


def longest_common(prompt: Sequence[int], written: Sequence[Sequence[int]]) -> int:
    """The oracle: tokens that `prompt` shares with one of the sequences whose KV is there, its last one left out."""
    best = max((len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, other))))
                for other in written), default=0)
    return min(best, len(prompt) - 1)


def related_prompts(num: int, seed: int) -> list[list[int]]:
    """Prompts that go on from odd places of each other."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randint(3, 30))]]
    while len(prompts) < num:
        base = rng.choice(prompts)
        prompts.append(base[:rng.randint(0, len(base))] + [rng.randrange(3, 64) for _ in range(rng.randint(1, 14))])
    return [prompt[:60] for prompt in prompts]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_one_after_the_other_finds_the_longest_common_prefix(page_size: int) -> None:
    engine, written = engine_of(page_size), []
    for prompt in related_prompts(14, seed=page_size):
        output, = checked(engine, [prompt])
        assert output.num_cached_tokens == output.cache.num_cached_tokens == longest_common(prompt, written)
        assert output.metrics.num_computed_tokens == len(prompt) - output.num_cached_tokens
        written.append([*prompt, *output.outputs[0].token_ids[:-1]])
    assert page_size == 1 or engine.stats()["cache"]["copied_tokens"] > 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_one_batch_computes_each_distinct_token_once(page_size: int, overlap: bool) -> None:
    """In-batch sharing at odd lengths: prompts of one call wait for what another one is computing, to the token."""
    prompts = related_prompts(16, seed=100 + page_size)
    engine = engine_of(page_size, overlap=overlap, max_num_seqs=4, prefill_chunk_tokens=16)
    outputs = checked(engine, prompts)
    nodes: set[tuple[int, ...]] = set()
    least = 0
    for prompt in sorted(prompts):
        new = {tuple(prompt[:n]) for n in range(1, len(prompt) + 1)} - nodes
        least += max(len(new), 1)
        nodes |= new
    assert sum(out.metrics.num_computed_tokens for out in outputs) <= least
    assert engine.stats()["tokens"]["computed_prompt"] <= least


@pytest.mark.parametrize("page_size", [4, 16])
def test_prompt_of_whole_pages_cached_as_a_whole_runs_one_token(page_size: int) -> None:
    engine, prompt = engine_of(page_size), list(range(3, 3 + 2 * page_size))
    checked(engine, [prompt])
    again, = checked(engine, [prompt])
    assert (again.num_cached_tokens, again.metrics.num_computed_tokens) == (2 * page_size - 1, 1)
    assert again.cache.num_copied_tokens == page_size - 1


def test_copied_page_leaves_its_source_as_it_was() -> None:
    """N03's kind: three samples and a second prompt write behind one shared partial page."""
    engine, prompt = engine_of(4), [5, 6, 7, 8, 9, 10]
    many, = run_all(engine, [prompt], greedy(9, n=3), poison=np.nan)
    assert len({tuple(sample.token_ids) for sample in many.outputs}) == 1
    checked(engine, [[*prompt, 11], [*prompt, 12, 13], [*prompt[:5], 14]])
    again, = checked(engine, [prompt], 9)
    assert again.outputs[0].token_ids == many.outputs[0].token_ids


@pytest.mark.parametrize("page_size, overlap", [(1, True), (4, True), (4, False), (16, True)])
def test_host_tier_small_pool_computes_nothing_twice(page_size: int, overlap: bool) -> None:
    rng = random.Random(page_size)
    heads = [[rng.randrange(3, 64) for _ in range(33)] for _ in range(6)]
    rounds = [[[*head, *(rng.randrange(3, 64) for _ in range(7))] for head in heads] for _ in range(3)]
    engine = engine_of(page_size, host=True, num_pages=112 // page_size, overlap=overlap, max_num_seqs=2)
    outputs = [out for prompts in rounds for out in checked(engine, prompts)]
    stats = engine.stats()
    assert stats["tokens"]["computed_prompt"] <= 6 * 33 + 18 * 7, "each head once, each question at most once"
    assert stats["cache"]["evicted_pages"] > 0 and stats["cache"]["host_hit_tokens"] > 0
    assert any(out.cache.num_host_tokens for out in outputs) and stats["tokens"]["recomputed"] == 0


def test_host_tier_too_small_as_well_still_gives_the_tokens_of_ref() -> None:
    rng = random.Random(7)
    heads = [[rng.randrange(3, 64) for _ in range(30)] for _ in range(12)]
    engine = engine_of(4, host=True, num_pages=24, num_host_pages=20, max_num_seqs=3, reserve_tokens=0)
    for _ in range(3):
        checked(engine, [[*head, rng.randrange(3, 64)] for head in heads], 10)
    assert engine.stats()["cache"]["recomputed_tokens"] > 0


def test_interrupt_while_pages_are_moved_leaves_a_usable_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(4, host=True, num_pages=24)
    prompts = [[i] * 30 for i in range(3, 9)]
    with monkeypatch.context() as patch:
        real, calls = engine._runner._move_batch, []

        def move(batch: object) -> None:
            real(batch)
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt

        patch.setattr(engine._runner, "_move_batch", move)
        with pytest.raises(KeyboardInterrupt):
            run_all(engine, prompts, greedy(6))
    assert engine.num_unfinished == 0
    assert_idle(engine)
    checked(engine, prompts)


def test_cache_false_neither_reads_nor_leaves_anything() -> None:
    engine, prompt = engine_of(4), [5, 6, 7, 8, 9, 10, 11]
    assert [checked(engine, [prompt], cache=False)[0].num_cached_tokens for _ in range(2)] == [0, 0]
    assert engine.stats()["pool"]["cached"] == 0
    checked(engine, [prompt])
    assert checked(engine, [prompt], cache=False)[0].num_cached_tokens == 0
    assert checked(engine, [prompt])[0].num_cached_tokens == 6


def test_cache_namespaces_with_equal_joined_text_stay_apart() -> None:
    """R11: ("a", "bc") and ("ab", "c"), "abc" and None."""
    engine, prompt = engine_of(4), [5, 6, 7, 8, 9, 10, 11]
    for namespace in (None, "abc", ("a", "bc"), ("ab", "c"), ("abc",), ["ab", 3], ["ab", "3"]):
        first, second = (checked(engine, [prompt], cache_namespace=namespace)[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 6), namespace


def test_young_prefixes_make_a_request_wait_and_then_give_way() -> None:
    """With nothing else to do, admission waits max_wait_s for young prefixes, evicts the oldest and counts it."""
    now = itertools.count()
    engine = engine_of(4, num_pages=16, min_ttl_s=1e6, max_wait_s=40.0, clock=lambda: next(now) / 4)
    checked(engine, [[5] * 40])
    output, = checked(engine, [[6] * 40])
    assert output.metrics.queue_s >= 40.0 and engine.stats()["cache"]["early_evictions"] > 0


def test_pinned_prefix_survives_a_flood_and_expires_unused() -> None:
    now = [0.0]
    engine = engine_of(4, num_pages=32, clock=lambda: now[0])
    system = np.arange(3, 33, dtype=np.int32)
    run_all(engine, [system.tolist()], greedy(0), poison=np.nan)
    engine.cache.pin(system, engine.namespace(SamplingParams()), ttl_s=10.0)
    for flood in range(8):
        checked(engine, [[40 + flood] * 50])
    assert checked(engine, [[*system, 3]])[0].num_cached_tokens == 30
    now[0] = 11.0
    for flood in range(8):
        checked(engine, [[40 + flood, *[39] * 50]])
    assert checked(engine, [[*system, 4]])[0].num_cached_tokens == 0


def test_update_weights_drops_pins_and_host_pages() -> None:
    runner = new_runner(page_size=4, num_host_pages=40)
    engine = make_engine(runner, num_pages=24)
    for i in range(4):
        run_all(engine, [[5 + i] * 40], greedy(2))
    engine.cache.pin(np.full(40, 8, np.int32), engine.namespace(SamplingParams()))
    from toy_engine import toy_decoder
    other = toy_lm(seed=1)
    engine.update_weights(toy_decoder(other.config, other.weights))
    assert engine.stats()["pool"]["cached"] == engine.stats()["host_tier"]["in_use"] == len(engine.cache.pins) == 0
    output, = run_all(engine, [[8] * 40], greedy(4), poison=np.nan)
    other.assert_greedy([8] * 40, output.outputs[0].token_ids, 4)
    assert output.num_cached_tokens == 0
    runner.close()


def test_order_of_a_batch_leaves_bad_prompts_in_place() -> None:
    engine = engine_of(4)
    prompts = [[5, 6, 9], None, [4, 4], [5, 6, 7], [], [5, 6]]
    order = engine.sharing_order(prompts, [None] * 6)
    assert sorted(order) == list(range(6)) and [i for i in order if prompts[i]] == [2, 5, 3, 0]
    with pytest.raises(RequestError):
        engine.add_request([])
    assert not drain(engine) and not list(steps(engine)) and not tokens_of([])
