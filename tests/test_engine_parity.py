"""The engine on a tiny model gives the tokens and log-probabilities of the plain model, whatever runs beside it.

REF is a float64 forward pass over the whole sequence. Unless a test says otherwise every step runs with NaN in all KV
slots that nobody owns, and the accounting of pages and slots is recomputed after it.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest

from jradix.engine import Engine
from jradix.outputs import RequestOutput
from jradix.sampling_params import SamplingParams
from toy_engine import (ToyLM, assert_idle, drain, greedy, make_engine, random_prompts, run_all, steps, toy_lm,
                        toy_runner, tokens_of)

NUM_OUTPUT = 16
LOGPROB_TOLERANCE = 1e-5   # between runs of this engine: only the order of float32 sums differs
REF_TOLERANCE = 1e-4       # against float64

HOW = {
    "alone": dict(max_num_seqs=1),
    "small_chunks": dict(prefill_chunk_tokens=7),
    "no_overlap": dict(overlap=False, prefill_chunk_tokens=24),
    "cache_off": dict(enable_prefix_caching=False),
    "cache_off_small_chunks": dict(enable_prefix_caching=False, prefill_chunk_tokens=7, overlap=False),
    "tight": dict(num_pages=80, reserve_tokens=0),
    "tight_no_overlap": dict(num_pages=80, reserve_tokens=0, overlap=False, prefill_chunk_tokens=7),
    "no_sharing_in_batch": dict(share_in_batch=False),
}


def engine_of(page_size: int = 4, **sizes: object) -> Engine:
    if "num_pages" in sizes:    # stated for page size 1
        sizes["num_pages"] = -(-sizes["num_pages"] // page_size)
    return make_engine(toy_runner(page_size=page_size), **sizes)


def check_greedy(engine: Engine, prompts: Sequence[Sequence[int]], num_output: int = NUM_OUTPUT,
                 lm: ToyLM | None = None) -> list[RequestOutput]:
    outputs = run_all(engine, prompts, greedy(num_output), poison=np.nan)
    for prompt, output in zip(prompts, outputs):
        (lm or toy_lm()).assert_greedy(prompt, output.outputs[0].token_ids, num_output)
    return outputs


def logprobs_of(output: RequestOutput) -> list[float]:
    completion = output.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids)
    return [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_greedy_cold_warm_and_partly_warm_give_the_tokens_of_ref(page_size: int, how: str) -> None:
    """N01: 5 to 40 tokens; pages of 1, 4, 16; cache off, cold, warm, partly warm; small chunks; forced preemption."""
    engine = engine_of(page_size, **HOW[how])
    prompts = random_prompts(12, seed=page_size)
    check_greedy(engine, prompts)
    warm = check_greedy(engine, prompts)
    partly = check_greedy(engine, [[*p[:len(p) // 2], *q[:9]] for p, q in zip(prompts, reversed(prompts))])
    if how.startswith("cache_off"):
        assert all(out.num_cached_tokens == 0 for out in (*warm, *partly))
    elif not how.startswith("tight"):
        for out in warm:
            whole_pages = (len(out.prompt_token_ids) - 1) // page_size * page_size
            assert whole_pages <= out.num_cached_tokens < len(out.prompt_token_ids)
    if how.startswith("tight"):
        assert engine.stats()["requests"]["preemptions"] > 0


def test_greedy_page_of_64_gives_the_tokens_of_ref() -> None:
    lm = toy_lm(num_hidden_layers=1)
    engine = make_engine(toy_runner(lm, page_size=64))
    prompts = random_prompts(6, seed=64, shortest=60, longest=90)
    check_greedy(engine, prompts, lm=lm)
    warm = check_greedy(engine, prompts, lm=lm)
    assert [out.num_cached_tokens >= 64 for out in warm] == [len(p) > 64 for p in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_greedy_hundred_prompts_give_the_tokens_of_ref(page_size: int, how: str) -> None:
    """N01 at its full size."""
    engine = engine_of(page_size, **HOW[how])
    prompts = random_prompts(100, seed=100 + page_size)
    check_greedy(engine, prompts)
    check_greedy(engine, prompts)


@pytest.mark.parametrize("sizes", [{}, dict(overlap=False), dict(num_pages=80, reserve_tokens=0)])
def test_greedy_several_decode_steps_per_call_give_the_tokens_of_ref(sizes: dict) -> None:
    engine = engine_of(decode_steps=4, **sizes)
    prompts = random_prompts(10, seed=5)
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17]
    outputs = run_all(engine, prompts, [greedy(n) for n in lengths], poison=np.nan)
    for prompt, out, n in zip(prompts, outputs, lengths):
        toy_lm().assert_greedy(prompt, out.outputs[0].token_ids, n)


@pytest.mark.parametrize("overlap", [True, False])
def test_several_decode_steps_per_call_stop_where_single_steps_stop(overlap: bool) -> None:
    prompts = random_prompts(8, seed=6)
    single, several = (
        tokens_of(run_all(engine_of(decode_steps=k, overlap=overlap, max_num_seqs=3), prompts,
                          greedy(24, stop_token_ids=list(range(10, 26))), poison=np.nan)) for k in (1, 4))
    assert single == several
    assert len({len(tokens) for tokens in single}) > 2


@pytest.mark.parametrize("architecture, overrides", [
    ("mistral", dict(sliding_window=8)), ("qwen2", dict(num_hidden_layers=1)), ("qwen3", dict(num_hidden_layers=1))])
def test_greedy_other_architectures_give_the_tokens_of_ref(architecture: str, overrides: dict) -> None:
    """A sliding window, biases, and normalised queries and keys."""
    lm = toy_lm(architecture, **overrides)
    engine = make_engine(toy_runner(lm), prefill_chunk_tokens=16, num_pages=30)
    prompts = random_prompts(8, seed=3)
    for _ in range(2):
        check_greedy(engine, prompts, 12, lm)


# -- neighbours

def test_greedy_neighbours_order_and_arrival_do_not_matter() -> None:
    """N02: 20 prompts one by one, together, shuffled, and three of them late; the same prompt four times in a batch."""
    prompts = random_prompts(20, seed=2)
    alone = [tokens_of(run_all(engine_of(), [p], greedy(12)))[0] for p in prompts[:4]]
    engine = engine_of()
    alone += [tokens_of(run_all(engine, [p], greedy(12)))[0] for p in prompts[4:]]
    assert tokens_of(check_greedy(engine_of(), prompts, 12)) == alone
    order = np.random.default_rng(0).permutation(20)
    shuffled = tokens_of(check_greedy(engine_of(), [prompts[i] for i in order], 12))
    assert [shuffled[i] for i in np.argsort(order)] == alone

    engine = engine_of()
    names = [engine.add_request(p, greedy(12)) for p in prompts[:17]]
    outputs = {}
    for number, batch in enumerate(steps(engine, poison=np.nan)):
        outputs.update((out.request_id, out) for out in batch)
        if number in (2, 5, 9):
            names.append(engine.add_request(prompts[len(names)], greedy(12)))
    assert [outputs[name].outputs[0].token_ids for name in names] == alone
    assert tokens_of(run_all(engine_of(), [prompts[0]] * 4, greedy(12))) == [alone[0]] * 4


def test_results_are_in_the_order_of_the_prompts_although_they_end_in_reverse() -> None:
    """A06: outputs of 10 to 1 tokens, one prompt twice."""
    prompts = random_prompts(9, seed=4)
    prompts.append(prompts[3])
    outputs = run_all(engine_of(), prompts, [greedy(n) for n in range(10, 0, -1)])
    for prompt, out, n in zip(prompts, outputs, range(10, 0, -1)):
        assert out.prompt_token_ids == prompt
        toy_lm().assert_greedy(prompt, out.outputs[0].token_ids, n)


def test_logprobs_equal_those_of_solo_runs() -> None:
    """N02, P13: only rows that asked have them, with the values of a run alone; warm or cold."""
    prompts = random_prompts(5, seed=8)
    asked = [None, 2, None, None, 0]
    params = [greedy(6, logprobs=k, prompt_logprobs=1 if i == 3 else None) for i, k in enumerate(asked)]
    solo = [run_all(engine_of(), [p], given)[0] for p, given in zip(prompts, params)]
    engine = engine_of(prefill_chunk_tokens=16)
    for _ in range(2):
        together = run_all(engine, prompts, params, poison=np.nan)
        for i, (one, other) in enumerate(zip(solo, together)):
            assert other.outputs[0].token_ids == one.outputs[0].token_ids
            if asked[i] is None:
                assert other.outputs[0].logprobs is None and other.outputs[0].cumulative_logprob is None
            else:
                np.testing.assert_allclose(logprobs_of(other), logprobs_of(one), atol=LOGPROB_TOLERANCE)
                assert other.outputs[0].cumulative_logprob == pytest.approx(sum(logprobs_of(other)))
                assert [list(e) for e in other.outputs[0].logprobs] == [list(e) for e in one.outputs[0].logprobs]
                assert {len(entry) for entry in other.outputs[0].logprobs} == {max(asked[i], 1)}
            assert (other.prompt_logprobs is not None) == (i == 3)
            if i == 3:
                for mine, theirs in zip(other.prompt_logprobs[1:], one.prompt_logprobs[1:], strict=True):
                    np.testing.assert_allclose([e.logprob for e in mine.values()], [e.logprob for e in theirs.values()],
                                               atol=LOGPROB_TOLERANCE)


# -- the values themselves

@pytest.mark.parametrize("page_size", [1, 4])
def test_decode_steps_have_the_logits_of_the_whole_forward_pass(page_size: int) -> None:
    """N07: after step k the 20 best log-probabilities are REF's over prompt + k tokens."""
    prompt = random_prompts(1, seed=11)[0]
    output = run_all(engine_of(page_size), [prompt], greedy(20, logprobs=20), poison=np.nan)[0].outputs[0]
    expected = toy_lm().logprobs([*prompt, *output.token_ids])[len(prompt) - 1:]
    for i, entry in enumerate(output.logprobs):
        assert len(entry) == 20
        ids = list(entry)
        np.testing.assert_allclose([entry[t].logprob for t in ids], expected[i, ids], atol=REF_TOLERANCE)
        assert [entry[t].rank for t in ids] == list(range(1, 21))
        assert set(ids) == set(np.argsort(-expected[i])[:20].tolist())


@pytest.mark.parametrize("num_cached", [0, 4, 8, 20])
def test_logits_do_not_depend_on_chunks_or_cached_prefix(num_cached: int) -> None:
    """N12: a prompt of 23 in chunks of 1 to 64 with 0 to 20 tokens cached; each token is computed once."""
    prompt = random_prompts(1, seed=12, shortest=23, longest=23)[0]
    expected = toy_lm().logprobs(prompt)[-1]
    for chunk in (1, 3, 4, 5, 16, 23, 64):
        engine = engine_of(prefill_chunk_tokens=chunk)
        if num_cached:
            run_all(engine, [prompt[:num_cached]], greedy(0))
        before = engine.stats()["tokens"]["computed"]
        output = run_all(engine, [prompt], greedy(1, logprobs=20), poison=np.nan)[0]
        entry = output.outputs[0].logprobs[0]
        np.testing.assert_allclose([e.logprob for e in entry.values()], expected[list(entry)], atol=REF_TOLERANCE)
        assert output.num_cached_tokens == num_cached
        assert engine.stats()["tokens"]["computed"] - before == 23 - num_cached == output.metrics.num_computed_tokens


@pytest.mark.parametrize("sizes", [{}, dict(num_pages=100, reserve_tokens=0, prefill_chunk_tokens=7)])
def test_outputs_have_the_same_bits_whatever_unowned_slots_hold(sizes: dict) -> None:
    """N05: 0, 1e4, NaN and infinity in every slot that is not owned and written, the scratch page included."""
    prompts = random_prompts(6, seed=13)

    def run(value: float) -> list[tuple]:
        engine = engine_of(**sizes)
        outputs = run_all(engine, prompts, greedy(8, logprobs=3, prompt_logprobs=2), poison=value)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]

    expected = run(0.0)
    for value in (1e4, np.nan, np.inf, -np.inf):
        assert run(value) == expected


# -- sharing

def test_same_prompt_twice_in_one_step_keeps_one_copy_and_both_outputs() -> None:
    """R02: both miss, one copy wins; every other page is overwritten before they decode on."""
    prompt = random_prompts(1, seed=14, shortest=16, longest=16)[0]
    engine = engine_of(share_in_batch=False)
    names = [engine.add_request(prompt, greedy(7)) for _ in range(2)]
    engine.step()
    tables = [r.lease.page_table[0, :4].tolist() for r in engine.scheduler.requests()]
    free = set(engine.cache.pools[0].free_pages().tolist())
    assert len(tables) == 2 and tables[0] == tables[1] and not free & set(tables[0])
    assert sum(node.num_pages for node in engine.cache.tree.nodes()) == 4
    outputs = drain(engine, poison=1e4)
    for name in names:
        assert outputs[name].num_cached_tokens == 0
        toy_lm().assert_greedy(prompt, outputs[name].outputs[0].token_ids, 7)


@pytest.mark.parametrize("length, chunk, whole_pages", [(12, 64, 8), (13, 64, 12), (20, 8, 16)])
def test_whole_prompt_cached_still_runs_its_last_token(length: int, chunk: int, whole_pages: int) -> None:
    """R16: the second run takes at most length - 1 tokens from the cache and gives the same output."""
    prompt = random_prompts(1, seed=15, shortest=length, longest=length)[0]
    engine = engine_of(prefill_chunk_tokens=chunk)
    first, second, third = (check_greedy(engine, [prompt], 6)[0] for _ in range(3))
    assert first.num_cached_tokens == 0
    for out in (second, third):
        assert whole_pages <= out.num_cached_tokens <= length - 1
        assert out.metrics.num_computed_tokens == length - out.num_cached_tokens
    assert tokens_of([first]) == tokens_of([second]) == tokens_of([third])


def test_samples_of_one_prompt_compute_it_once() -> None:
    """n = 4 computes the prompt once, up to the last page of each sample; S12: its tokens count once."""
    prompt = random_prompts(1, seed=16, shortest=30, longest=30)[0]
    engine = engine_of()
    output = run_all(engine, [prompt], SamplingParams(n=4, temperature=0.0, max_tokens=5), poison=np.nan)[0]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 1
    toy_lm().assert_greedy(prompt, output.outputs[0].token_ids, 5)
    page_tail = 30 - 28
    assert 30 <= output.metrics.num_computed_tokens <= 30 + 3 * page_tail
    assert output.num_cached_tokens == 0
    again = run_all(engine, [prompt], SamplingParams(n=4, temperature=0.0, max_tokens=5))[0]
    assert 28 <= again.num_cached_tokens <= 29 and again.metrics.num_computed_tokens <= 4 * page_tail


# -- preemption

def test_preempted_requests_lose_and_double_nothing() -> None:
    """S04: two requests on too small a pool, streamed with log-probabilities; all as with room for both."""
    prompts = random_prompts(2, seed=17, shortest=4, longest=4)
    params = greedy(12, logprobs=1)
    ample = run_all(engine_of(), prompts, params)
    engine = engine_of(num_pages=20, reserve_tokens=0)
    names = [engine.add_request(p, params, is_streamed=True) for p in prompts]
    seen: dict[str, list[int]] = {name: [] for name in names}
    final = {}
    for batch in steps(engine, poison=np.nan):
        for out in batch:
            tokens = out.outputs[0].token_ids
            assert tokens[:len(seen[out.request_id])] == seen[out.request_id]
            seen[out.request_id] = list(tokens)
            if out.finished:
                final[out.request_id] = out
    assert_idle(engine)
    assert engine.stats()["requests"]["preemptions"] >= 1
    assert sum(out.metrics.num_preemptions for out in final.values()) == engine.stats()["requests"]["preemptions"]
    for name, expected in zip(names, ample):
        completion = final[name].outputs[0]
        assert seen[name] == completion.token_ids == expected.outputs[0].token_ids
        assert len(completion.token_ids) == len(completion.logprobs) == 12
        np.testing.assert_allclose(logprobs_of(final[name]), logprobs_of(expected), atol=LOGPROB_TOLERANCE)


def test_cached_tokens_do_not_change_by_preemption() -> None:
    """S12: 12 tokens run twice, the second time with a preemption; the hit rate counts no resumed request."""
    engine = engine_of(num_pages=32, reserve_tokens=0)
    prompt, other = random_prompts(2, seed=18, shortest=12, longest=12)
    run_all(engine, [prompt], greedy(1))
    lookups = engine.stats()["cache"]["lookups"]
    outputs = run_all(engine, [other, prompt], greedy(14))
    assert outputs[1].metrics.num_preemptions + outputs[0].metrics.num_preemptions >= 1
    assert 8 <= outputs[1].num_cached_tokens <= 11 and outputs[0].num_cached_tokens == 0
    assert engine.stats()["cache"]["lookups"] == lookups + 2
    assert outputs[1].metrics.num_computed_tokens == 12 - outputs[1].num_cached_tokens
    for given, out in zip((other, prompt), outputs):
        toy_lm().assert_greedy(given, out.outputs[0].token_ids, 14)


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_counts_its_need_in_pages(overlap: bool) -> None:
    """S13: four requests of two full pages each want a ninth to twelfth page in the same step; one is left."""
    prompts = random_prompts(4, seed=19, shortest=8, longest=8)
    engine = engine_of(num_pages=36, reserve_tokens=0, overlap=overlap)
    names = [engine.add_request(p, greedy(4)) for p in prompts]
    preemptions = []
    outputs = {}
    for batch in steps(engine, poison=np.nan):
        outputs.update((out.request_id, out) for out in batch)
        preemptions.append(engine.stats()["requests"]["preemptions"])
    assert preemptions[-1] == 1
    for name, prompt in zip(names, prompts):
        toy_lm().assert_greedy(prompt, outputs[name].outputs[0].token_ids, 4)


# -- prompt log-probabilities

@functools.cache
def expected_prompt_logprobs(prompt: tuple[int, ...]) -> np.ndarray:
    return toy_lm().logprobs(prompt)[np.arange(len(prompt) - 1), list(prompt[1:])]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("chunk", [64, 5])
def test_prompt_logprobs_do_not_depend_on_the_cache(order: tuple[int, ...], chunk: int) -> None:
    """P12: a prompt plain, with log-probabilities, and one that shares 8 tokens with it, in any order."""
    q, r = random_prompts(2, seed=20, shortest=12, longest=12)
    requests = [(q, greedy(3)), (q, greedy(3, prompt_logprobs=1)), ([*q[:8], *r[8:]], greedy(3, prompt_logprobs=1))]
    engine = engine_of(prefill_chunk_tokens=chunk)
    for i in order:
        prompt, params = requests[i]
        out = run_all(engine, [prompt], params, poison=np.nan)[0]
        toy_lm().assert_greedy(prompt, out.outputs[0].token_ids, 3)
        if i:
            assert out.num_cached_tokens == 0, "a request for prompt log-probabilities reads no cached pages"
            assert len(out.prompt_logprobs) == 12 and out.prompt_logprobs[0] is None
            found = [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], prompt[1:])]
            np.testing.assert_allclose(found, expected_prompt_logprobs(tuple(prompt)), atol=REF_TOLERANCE)
    assert run_all(engine, [q], greedy(3))[0].num_cached_tokens >= 8, "it fills the cache all the same"


def test_prompt_logprobs_longer_than_a_logit_block_are_complete() -> None:
    prompt = random_prompts(1, seed=21, shortest=101, longest=101)[0]
    out = run_all(engine_of(), [prompt], greedy(0, prompt_logprobs=0))[0]
    found = [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)]
    np.testing.assert_allclose(found, expected_prompt_logprobs(tuple(prompt)), atol=REF_TOLERANCE)
    assert out.outputs[0].token_ids == [] and out.outputs[0].finish_reason == "length"


def test_prompt_logprobs_survive_preemption() -> None:
    """The request is preempted inside or after its prompt and still has each position once."""
    prompts = random_prompts(3, seed=22, shortest=20, longest=20)
    engine = engine_of(num_pages=56, reserve_tokens=0, prefill_chunk_tokens=6)
    outputs = run_all(engine, prompts, greedy(14, prompt_logprobs=0), poison=np.nan)
    assert engine.stats()["requests"]["preemptions"] >= 1
    for prompt, out in zip(prompts, outputs):
        found = [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)]
        np.testing.assert_allclose(found, expected_prompt_logprobs(tuple(prompt)), atol=REF_TOLERANCE)
        toy_lm().assert_greedy(prompt, out.outputs[0].token_ids, 14)
