"""Sampling through the engine on a model with prescribed logits: seeds, penalties, filters, log-probabilities."""
from __future__ import annotations

import random

import numpy as np
import pytest

from jradix.engine import Engine
from jradix.sampling_params import SamplingParams
from toy_engine import RIGGED_SHAPE, greedy, random_prompts, rigged_engine, run_all, steps, tokens_of

PROMPT = [5, 6, 7]
VOCAB = 64
UNIFORM = np.zeros(RIGGED_SHAPE + (VOCAB,), np.float32)
ROUGH = np.random.default_rng(0).standard_normal(RIGGED_SHAPE + (VOCAB,)).astype(np.float32) * 2
TIGHT = dict(num_pages=14, reserve_tokens=0)


def warm(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 8, **fields})


def sampled(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> list[list[int]]:
    return [c.token_ids for c in run_all(engine, [prompt], params)[0].outputs]


# -- seeds

def test_samples_of_a_seed_differ_repeat_and_do_not_depend_on_their_number() -> None:
    """P01: four samples are pairwise different, the same again, and the first three of them alone as well."""
    four = sampled(rigged_engine(UNIFORM), warm(n=4, seed=7))
    assert len({tuple(tokens) for tokens in four}) == 4
    assert sampled(rigged_engine(UNIFORM, seed=99), warm(n=4, seed=7)) == four
    assert sampled(rigged_engine(UNIFORM), warm(n=3, seed=7)) == four[:3]
    assert sampled(rigged_engine(UNIFORM), warm(n=1, seed=8)) != four[:1]


def test_engine_seed_decides_and_no_seed_differs() -> None:
    """P03: two engines without a seed differ, with the same seed they agree; requests of one engine differ."""
    prompts = [PROMPT, PROMPT]
    one, same, other, free, free_too = (
        tokens_of(run_all(rigged_engine(UNIFORM, seed=seed), prompts, warm())) for seed in (1, 1, 2, None, None))
    assert one == same and one[0] != one[1]
    assert len({str(x) for x in (one, other, free, free_too)}) == 4


def test_sampling_leaves_the_users_random_streams_alone() -> None:
    """P03"""
    def draw() -> tuple:
        return random.random(), np.random.random()

    random.seed(3), np.random.seed(3)
    expected = draw(), draw()
    random.seed(3), np.random.seed(3)
    first = draw()
    sampled(rigged_engine(UNIFORM, seed=None), warm())
    assert (first, draw()) == expected


@pytest.mark.parametrize("sizes", [dict(max_num_seqs=1), dict(overlap=False), dict(decode_steps=4), TIGHT,
                                   {**TIGHT, "decode_steps": 4}, {**TIGHT, "overlap": False},
                                   dict(prefill_chunk_tokens=5), dict(enable_prefix_caching=False)])
def test_seeded_samples_do_not_depend_on_batch_preemption_or_steps(sizes: dict) -> None:
    """The draw is a function of (seed, position); penalties count the same tokens after a preemption as before."""
    prompts = [[f, 1, 2, f] for f in range(8)]
    params = [warm(seed=f, max_tokens=20, top_p=0.9 if f % 2 else 1.0, top_k=20 if f % 3 else 0,
                   presence_penalty=0.7 if f > 5 else 0.0, frequency_penalty=0.3 if f > 4 else 0.0,
                   repetition_penalty=1.4 if f in (2, 5) else 1.0, min_p=0.05 if f == 3 else 0.0,
                   logit_bias={9: 3.0} if f == 4 else None) for f in range(8)]
    alone = [sampled(rigged_engine(ROUGH), given, prompt)[0] for prompt, given in zip(prompts, params)]
    engine = rigged_engine(ROUGH, **sizes)
    order = [3, 0, 7, 5, 1, 6, 2, 4]
    outputs = run_all(engine, [prompts[i] for i in order], [params[i] for i in order], poison=np.nan)
    assert tokens_of(outputs) == [alone[i] for i in order]
    if "num_pages" in sizes:
        assert engine.stats()["requests"]["preemptions"] >= 2


# -- filters

def test_plain_temperature_draws_from_the_whole_vocabulary() -> None:
    """P06: 200 draws from 64 equal tokens; every spelling of "off" draws the same; top_k=1 is greedy."""
    def draws(**fields: object) -> list[int]:
        return sum(sampled(rigged_engine(UNIFORM), warm(n=4, max_tokens=50, seed=1, **fields)), [])

    plain = draws()
    assert len(plain) == 200 and len(set(plain)) >= 30
    for fields in (dict(top_k=0), dict(top_k=-1), dict(top_k=None), dict(top_k=64), dict(top_k=1000), dict(top_p=1.0),
                   dict(min_p=0.0)):
        assert draws(**fields) == plain, fields
    assert set(draws(top_k=1)) == {0}


@pytest.mark.parametrize("fields, allowed", [(dict(top_k=3), {1, 2, 3}), (dict(top_p=0.8), {1, 2}),
                                             (dict(min_p=0.3), {1, 2}), (dict(top_k=2, top_p=0.1), {1})])
def test_filters_allow_only_the_tokens_they_keep(fields: dict, allowed: set) -> None:
    table = np.full_like(UNIFORM, -30)
    for token, probability in {1: 0.5, 2: 0.3, 3: 0.12, 4: 0.08}.items():
        table[:, :, token] = np.log(probability)
    drawn = sum(sampled(rigged_engine(table), warm(n=4, max_tokens=50, seed=2, **fields)), [])
    assert set(drawn) == allowed


def test_min_tokens_holds_back_end_tokens_and_stop_ids() -> None:
    table = np.full_like(UNIFORM, -30)
    table[:, :, [2, 9, 11]] = 0
    params = warm(n=8, max_tokens=30, min_tokens=5, stop_token_ids=[9], seed=3)
    outputs = sampled(rigged_engine(table, eos_ids=(2,)), params)
    assert all(len(tokens) > 5 and set(tokens[:-1]) == {11} and tokens[-1] in (2, 9) for tokens in outputs)


# -- penalties and bias

def rigged(values: dict[int, float]) -> np.ndarray:
    """The same logits after every token; all others are far below."""
    table = np.full_like(UNIFORM, -100)
    for token, value in values.items():
        table[:, :, token] = value
    return table


@pytest.mark.parametrize("prompt, expected", [
    ([1, 1, 1], [10, 11, 12, 10]),     # 2/1.5 < 1.9, then 1.9/1.5 < 1.4, then 2/1.5 = 1.33 leads again
    ([10, 1, 1], [11, 12, 10, 10])])   # a token of the prompt counts as seen
def test_repetition_penalty_divides_positive_logits_of_seen_tokens(prompt: list[int], expected: list[int]) -> None:
    """P07: +2 becomes 2 / 1.5 once the token is in prompt or output."""
    params = greedy(4, repetition_penalty=1.5)
    assert sampled(rigged_engine(rigged({10: 2.0, 11: 1.9, 12: 1.4})), params, prompt)[0] == expected


def test_repetition_penalty_multiplies_negative_logits_of_seen_tokens() -> None:
    """P07: -2 becomes -3, below -2.9."""
    table = rigged({10: -2.0, 11: -2.9})
    assert sampled(rigged_engine(table), greedy(3, repetition_penalty=1.5))[0] == [10, 11, 10]
    assert sampled(rigged_engine(table), greedy(3))[0] == [10, 10, 10]


def test_presence_and_frequency_penalties_count_output_tokens_only() -> None:
    """P07: presence once, frequency by count; the prompt's tokens are not output."""
    table = rigged({10: 2.0, 11: 1.6})
    assert sampled(rigged_engine(table), greedy(4, presence_penalty=0.5), [10, 11, 10])[0] == [10, 11, 10, 10]
    assert sampled(rigged_engine(table), greedy(6, frequency_penalty=0.3), [10, 11, 10])[0] == [10, 10, 11, 10, 11, 10]
    assert sampled(rigged_engine(table), greedy(3, presence_penalty=-1.0))[0] == [10, 10, 10]


def test_logit_bias_moves_its_tokens_and_leaves_the_next_request_alone() -> None:
    """P07: also when the next request takes the same slot, and is drawn by the full sampler."""
    engine = rigged_engine(rigged({10: 2.0, 11: 1.6}), max_num_seqs=1)
    assert tokens_of(run_all(engine, [PROMPT] * 4, [
        greedy(2, logit_bias={11: 1.0}), greedy(2, logprobs=0), greedy(2, logit_bias={10: -np.inf}), greedy(2)])) == [
            [11, 11], [10, 10], [11, 11], [10, 10]]


def test_penalties_of_one_row_do_not_touch_its_neighbours() -> None:
    table = rigged({10: 2.0, 11: 1.9, 12: 1.8})
    params = [greedy(3), greedy(3, repetition_penalty=1.5), greedy(3), greedy(3, presence_penalty=1.0)]
    assert tokens_of(run_all(rigged_engine(table), [PROMPT] * 4, params)) == [
        [10, 10, 10], [10, 11, 12], [10, 10, 10], [10, 11, 12]]


def test_penalties_survive_preemption() -> None:
    """The history of a preempted request is set again when it comes back, in whatever slot."""
    table = rigged({token: 2.0 - 0.01 * token for token in range(30)})
    params = greedy(20, presence_penalty=2.0)
    engine = rigged_engine(table, **TIGHT)
    outputs = run_all(engine, [[f, 1, 2] for f in range(6)], params)
    assert engine.stats()["requests"]["preemptions"] >= 2
    assert tokens_of(outputs) == [list(range(20))] * 6


# -- log-probabilities

@pytest.mark.parametrize("fields", [dict(temperature=0.5), dict(temperature=1.0), dict(temperature=2.0),
                                    dict(temperature=1.0, top_p=0.1), dict(repetition_penalty=1.5, temperature=0.7),
                                    dict(logit_bias={20: 4.0})])
def test_logprobs_are_raw_and_list_the_chosen_token(fields: dict) -> None:
    """P10: from the logits as the model gave them, whatever is done to draw; the chosen one is always there."""
    engine = rigged_engine(ROUGH)
    out = run_all(engine, [PROMPT], warm(**fields, seed=4, logprobs=2, max_tokens=12))[0].outputs[0]
    logits = ROUGH[5, 2:2 + len(out.token_ids)].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ranks = (-expected).argsort(axis=1).argsort(axis=1) + 1
    for i, (token, entry) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        assert list(entry)[0] == token and len(entry) == (2 if ranks[i, token] <= 2 else 3)
        for other, value in entry.items():
            assert value.logprob == pytest.approx(expected[i, other], abs=1e-4)
            assert value.rank == ranks[i, other]
    assert out.cumulative_logprob == pytest.approx(sum(e[t].logprob for t, e in zip(out.token_ids, out.logprobs)))


def test_optional_outputs_go_to_the_requests_that_asked() -> None:
    """P13: log-probabilities and prompt log-probabilities by request, not by row of the batch."""
    prompts = [[f, f + 1, f + 2, f + 3] for f in range(5)]
    params = [greedy(3), greedy(3, logprobs=2), greedy(3), greedy(3, prompt_logprobs=1), greedy(3)]
    outputs = run_all(rigged_engine(ROUGH), prompts, params)
    assert [out.outputs[0].logprobs is not None for out in outputs] == [False, True, False, False, False]
    assert [out.prompt_logprobs is not None for out in outputs] == [False, False, False, True, False]
    logits = ROUGH[3, :3].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = [e[t].logprob for e, t in zip(outputs[3].prompt_logprobs[1:], prompts[3][1:])]
    np.testing.assert_allclose(found, expected[np.arange(3), prompts[3][1:]], atol=1e-4)


def test_generation_config_fills_only_the_fields_left_out() -> None:
    """P09: with nothing, with max_tokens only, with a temperature; the values in force are on the result."""
    defaults = dict(temperature=0.1, top_k=1, repetition_penalty=1.05, eos_token_id=3)
    engine = rigged_engine(UNIFORM, generation_config=defaults)
    for params, expected in ((SamplingParams(max_tokens=2), (0.1, 1, 1.05, 1.0)),
                             (SamplingParams(max_tokens=2, temperature=1.0), (1.0, 1, 1.05, 1.0)),
                             (SamplingParams(max_tokens=2, top_k=0, top_p=0.5), (0.1, 0, 1.05, 0.5))):
        used = run_all(engine, [PROMPT], params)[0].sampling_params
        assert (used.temperature, used.top_k, used.repetition_penalty, used.top_p) == expected
    used = run_all(rigged_engine(UNIFORM), [PROMPT], SamplingParams(max_tokens=2))[0].sampling_params
    assert (used.temperature, used.top_k, used.repetition_penalty, used.top_p, used.min_p) == (1.0, 0, 1.0, 1.0, 0.0)


def test_requests_of_all_kinds_in_one_batch_give_their_solo_tokens() -> None:
    """Greedy rows beside sampled ones, arriving while others run."""
    prompts = random_prompts(10, seed=1, shortest=3, longest=9)
    prompts = [[p[0] % 16, *p[1:]] for p in prompts]
    params = [greedy(12), warm(seed=1), greedy(5, logprobs=1), warm(seed=2, top_k=5), greedy(9, presence_penalty=0.5),
              warm(seed=3, logprobs=3), greedy(12, min_tokens=4), warm(n=1, seed=5, top_p=0.7), greedy(3), warm(seed=9)]
    solo = [sampled(rigged_engine(ROUGH), given, prompt)[0] for prompt, given in zip(prompts, params)]
    engine = rigged_engine(ROUGH, max_num_seqs=5)
    names, outputs = [engine.add_request(prompts[0], params[0])], {}
    for batch in steps(engine):
        outputs.update((out.request_id, out) for out in batch)
        if len(names) < 10:
            names.append(engine.add_request(prompts[len(names)], params[len(names)]))
    assert [outputs[name].outputs[0].token_ids for name in names] == solo
