"""deterministic=True: the same tokens have the same log-probabilities to the last bit, whatever else happens.

Bits are compared as such, never within a tolerance. The reference is one request alone in an empty engine.
"""
from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jradix.config import EngineConfig, StepShape, StepShapes
from jradix.engine import Engine
from jradix.ops import matmul_native
from jradix.outputs import RequestOutput
from jradix.runner.runner import ModelRunner
from jradix.sampling_params import SamplingParams
from jradix.sched.scheduler import MAX_CHUNK_STEPS
from toy_engine import CPU, drain, greedy, make_engine, run_all, toy_decoder, toy_lm, toy_runner

GRID, PAGE = 8, 4
NUM_OUTPUT = 10
FIXED = dict(deterministic=True, shared_attention=False, jump_decoding=False, prefill_chunk_tokens=GRID, page_size=PAGE,
             num_pages=256, max_model_len=128, max_num_seqs=4, grammar_bytes=0)
HOW = {"no overlap": dict(overlap=False), "cache off": dict(enable_prefix_caching=False),
       "preemption": dict(num_pages=20, reserve_tokens=0), "no sharing in batch": dict(share_in_batch=False),
       "one after the other": dict(admission_window=1), "small pool": dict(num_pages=24, reserve_tokens=64)}
WAYS = {"greedy": greedy(NUM_OUTPUT, logprobs=3),
        "drawn": SamplingParams(temperature=1.2, top_p=0.9, seed=7, max_tokens=NUM_OUTPUT, logprobs=3),
        "penalties": greedy(NUM_OUTPUT, logprobs=3, repetition_penalty=1.3, presence_penalty=0.4)}
Bits = tuple[tuple[int, tuple[tuple[int, float], ...]], ...]


@functools.cache
def runner_of(implementation: str | None = None, number: int = 0, **sizes: Any) -> ModelRunner:
    """A shared runner; engines that live at the same time need runners of different `number`."""
    lm = toy_lm()
    return ModelRunner(toy_decoder(lm.config, lm.weights), lm.config, EngineConfig(**{**FIXED, **sizes}), device=CPU,
                       kv_dtype=jnp.dtype(jnp.float32), implementation=implementation)


def fixed_engine(**sizes: Any) -> Engine:
    return make_engine(runner_of(), **sizes)


def bits(output: RequestOutput) -> Bits:
    """Tokens with all log-probabilities that came with them."""
    completion = output.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids) > 0
    return tuple((token, tuple((other, entry.logprob) for other, entry in found.items()))
                 for token, found in zip(completion.token_ids, completion.logprobs))


def related_prompts(num: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to 60 tokens; most go on from some place of an earlier one."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randint(20, 40))]]
    while len(prompts) < num:
        base = rng.choice(prompts)
        prompts.append((base[:rng.randint(0, len(base))] + [rng.randrange(3, 64) for _ in range(rng.randint(1, 20))])
                       [:60])
    return prompts


def alone(prompts: Sequence[Sequence[int]], params: SamplingParams, engine_of: Any = fixed_engine) -> list[Bits]:
    """Each prompt by itself in an engine that has seen nothing."""
    return [bits(run_all(engine_of(), [prompt], params)[0]) for prompt in prompts]


@functools.cache
def reference(way: str) -> tuple[list[list[int]], list[Bits]]:
    prompts = related_prompts(14, seed=3)
    return prompts, alone(prompts, WAYS[way])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("way", WAYS)
def test_bits_are_equal_cold_warm_alone_and_in_a_batch(way: str, how: str) -> None:
    prompts, expected = reference(way)
    engine = fixed_engine(**HOW[how])
    for _ in range(2):       # cold, then warm
        outputs = run_all(engine, prompts, WAYS[way], poison=np.nan)
        assert [bits(output) for output in outputs] == expected
    if how == "preemption":
        assert engine.stats()["requests"]["preemptions"] > 0
    if how == "small pool":
        assert engine.stats()["cache"]["evicted_pages"] > 0


def test_preemption_replays_output_token_by_token() -> None:
    """The given-up output is computed again as decode rows, and counted as computed again."""
    prompts, expected = reference("greedy")
    engine = fixed_engine(num_pages=20, reserve_tokens=0, enable_prefix_caching=False)
    assert [bits(output) for output in run_all(engine, prompts, WAYS["greedy"])] == expected
    stats = engine.stats()
    assert stats["requests"]["preemptions"] > 0 and stats["tokens"]["recomputed"] > 0


def test_conversation_over_turns_equals_its_turns_alone() -> None:
    """A generated turn is computed again as part of the next prompt; hits are whole chunks of the prompt before."""
    engine, rng = make_engine(runner_of(number=1)), random.Random(1)
    prompt, before = [rng.randrange(3, 64) for _ in range(21)], 0
    for _ in range(5):
        output, = run_all(engine, [prompt], WAYS["greedy"])
        assert output.num_cached_tokens == min(before, len(prompt) - 1) // GRID * GRID
        assert [bits(output)] == alone([prompt], WAYS["greedy"])
        before = len(prompt)
        prompt = [*prompt, *output.outputs[0].token_ids, rng.randrange(3, 64)]
        assert engine.stats()["cache"]["granularity"] == GRID


def test_scores_of_a_prompt_are_equal_cold_and_warm() -> None:
    prompt = related_prompts(1, seed=9)[0]
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)

    def scores(engine: Engine, first: int) -> list[Any]:
        name = engine.add_request(prompt, params, first_logit=first)
        outputs = {}
        while engine.has_unfinished:
            outputs |= {out.request_id: out for out in engine.step()}
        return [None if found is None else {token: entry.logprob for token, entry in found.items()}
                for found in outputs[name].prompt_logprobs][first + 1:]

    for first in (0, 5, len(prompt) - 3):
        warm = fixed_engine()
        cold = scores(fixed_engine(), first)
        run_all(warm, [prompt, prompt[:GRID + 1]], greedy(4))
        assert scores(warm, first) == cold and cold


@pytest.mark.parametrize("seed", range(3))
def test_host_tier_and_eviction_keep_the_bits(seed: int) -> None:
    runner = runner_of(num_host_pages=64)
    prompts = related_prompts(10, seed=20 + seed)
    expected = alone(prompts, WAYS["greedy"], lambda: make_engine(runner))
    engine = make_engine(runner, num_pages=24, max_num_seqs=4, reserve_tokens=0)
    order = random.Random(seed)
    for _ in range(4):
        places = order.sample(range(len(prompts)), len(prompts))
        outputs = run_all(engine, [prompts[i] for i in places], WAYS["greedy"], poison=np.nan)
        for i, output in zip(places, outputs):
            assert bits(output) == expected[i]
            assert output.num_cached_tokens % GRID == 0
    assert engine.stats()["cache"]["host_hit_tokens"] > 0


def test_bits_are_equal_without_any_c_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's products and attention: fixed shapes alone must do."""
    monkeypatch.setattr(matmul_native, "why_not", lambda dtype: "not in this test")
    runner = runner_of("xla")      # a runner of its own: it compiles under the patch
    prompts = related_prompts(8, seed=5)
    expected = alone(prompts, WAYS["greedy"], lambda: make_engine(runner))
    engine = make_engine(runner)
    for _ in range(2):
        assert [bits(output) for output in run_all(engine, prompts, WAYS["greedy"])] == expected


def test_without_it_bits_differ() -> None:
    """The control: this test's comparison sees the difference that a warm cache makes otherwise."""
    prompts, _ = reference("greedy")
    engine_of = functools.partial(make_engine, toy_runner(page_size=PAGE))
    expected = alone(prompts, WAYS["greedy"], engine_of)
    engine = engine_of()
    found = [[bits(output) for output in run_all(engine, prompts, WAYS["greedy"])] for _ in range(2)]
    assert found[0] != expected or found[1] != expected


def test_steps_have_one_shape_of_either_kind() -> None:
    config = EngineConfig(**FIXED)
    shapes = StepShapes.for_engine(config)
    decode, chunk = StepShape(4, 0), StepShape(4, GRID)
    assert shapes.all() == [decode, chunk]
    assert {shapes.fit(rows, rows, rows) for rows in (1, 2, 4)} == {decode}
    assert {shapes.fit(1, n, 0, is_short=True) for n in (1, 2, GRID)} == {chunk}


@pytest.mark.parametrize("wrong, text", [
    (dict(decode_steps=2), "decode_steps=2 with deterministic=True"),
    (dict(jump_decoding=True), "jump_decoding=True with deterministic=True"),
    (dict(shared_attention=True), "shared_attention=True with deterministic=True"),
    (dict(prefill_chunk_tokens=10), "expected a multiple of page_size=4"),
])
def test_what_cannot_go_with_it_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EngineConfig(**{**FIXED, **wrong})


def test_engine_and_runner_must_agree() -> None:
    with pytest.raises(ValueError, match="deterministic=True, prefill_chunk_tokens=4, but the runner was made with"):
        fixed_engine(prefill_chunk_tokens=4)


@pytest.mark.parametrize("overlap", [True, False])
def test_samples_that_outgrow_the_pool_one_after_the_other_all_end(overlap: bool) -> None:
    """The first sample ends while decode rows are planned; the second one must be admitted in the same step."""
    engine = fixed_engine(num_pages=10, overlap=overlap)
    output, = run_all(engine, [[5, 6, 7, 8, 9, 10, 11, 12]], greedy(100, n=2))
    assert [(len(sample.token_ids), sample.stop_reason) for sample in output.outputs] == [(33, "kv_capacity")] * 2


def test_decoding_goes_on_beside_requests_that_only_need_their_prompts() -> None:
    engine = fixed_engine()
    name = engine.add_request([3, 4, 5], greedy(4))
    for i in range(100):
        engine.add_request([6, 7, i % 60 + 3], SamplingParams(max_tokens=0))
    ended = 0
    while True:
        outputs = {out.request_id: out for out in engine.step()}
        if name in outputs:
            break
        ended += len(outputs)
    assert ended <= 5 * MAX_CHUNK_STEPS
    drain(engine)
