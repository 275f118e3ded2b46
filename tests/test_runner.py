"""The runner: how many programs are compiled and when, staging buffers, donation, memory, failures."""
from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jradix.engine as engine_module
from jradix.config import MAX_PROGRAMS, EngineConfig, StepShapes
from jradix.engine import Engine
from jradix.errors import EngineError
from jradix.runner.runner import ModelRunner
from jradix.sampling_params import SamplingParams
from toy_engine import (ToyLM, assert_idle, counted_compilations, drain, greedy, make_engine, new_runner,
                        random_prompts, run_all, toy_decoder, toy_lm, tokens_of)

WORKSPACE_BYTES = 2**18   # inputs and results of the two steps in flight, of this toy size


def lm() -> ToyLM:
    return toy_lm(num_hidden_layers=1)


@pytest.fixture(scope="module")
def warm() -> ModelRunner:
    """All shapes of 1 to 8 rows and of chunks up to 40, compiled; a pool that is large beside the workspace."""
    runner = new_runner(lm(), prefill_chunk_tokens=40, num_pages=4096, all_shapes=True)
    runner.warmup()
    return runner


def cache_sizes(runner: ModelRunner) -> dict[tuple, int]:
    return {key: program._cache_size() for key, program in runner._programs.items()}


# -- programs

@pytest.mark.parametrize("max_num_seqs", [1, 4, 32, 100, 256])
@pytest.mark.parametrize("chunk_tokens", [8, 512, 2000, 8192])
def test_step_shapes_stay_within_the_number_of_programs(max_num_seqs: int, chunk_tokens: int) -> None:
    """A forward program per shape, a sampler per row bucket, prompt log-probabilities, slot reset, page copies and the
    upload of grammars."""
    config = EngineConfig(max_num_seqs=max_num_seqs, prefill_chunk_tokens=chunk_tokens)
    shapes = StepShapes.for_engine(config)
    assert len(shapes.all()) + len(shapes.row_buckets) + 4 == shapes.num_programs <= MAX_PROGRAMS == 24
    for num_rows in (1, max_num_seqs // 2 + 1, max_num_seqs):
        for num_chunk in (0, 1, chunk_tokens // 2 + 1, chunk_tokens):
            shape = shapes.fit(num_rows, num_rows - 1 + num_chunk, num_rows - 1)
            assert shape.num_rows >= num_rows and shape.num_chunk_tokens >= num_chunk and shape in shapes.all()


@pytest.mark.parametrize("budget, largest", [(2000, 2000), (7, 8), (33, 40), (512, 512)])
def test_step_shapes_of_an_odd_chunk_budget_are_rounded_up(budget: int, largest: int) -> None:
    """F01: a budget that is no power of two is served, by a bucket at least as large."""
    assert StepShapes.for_engine(EngineConfig(prefill_chunk_tokens=budget)).chunk_buckets[-1] == largest


def test_warmup_compiles_each_program_once(warm: ModelRunner) -> None:
    assert set(cache_sizes(warm).values()) == {1}
    assert warm.num_compiled == warm.shapes.num_programs - 1, "all but the setting of a row, which is counted apart"


@pytest.mark.slow
def test_warmup_of_the_default_configuration_compiles_at_most_24_programs() -> None:
    runner = new_runner(lm(), all_shapes=True, **dataclasses.asdict(EngineConfig(num_pages=64)))
    with counted_compilations() as compiled:
        runner.warmup()
    kinds = ("forward", "sampling", "logprobs", "reset_rows", "copy_pages", "upload_grammar")
    ours = [name for name in compiled if any(kind in name for kind in kinds)]
    assert len(ours) == runner.num_compiled + 1 <= MAX_PROGRAMS
    assert set(cache_sizes(runner).values()) == {1}


def test_warmup_reports_its_progress_and_leaves_the_state_neutral(warm: ModelRunner) -> None:
    seen: list[tuple[int, int]] = []
    warm.reset_state()
    warm.warmup(lambda done, total: seen.append((done, total)))
    total = len(warm.shapes.all())
    assert seen == [(i, total) for i in range(total + 1)]
    assert all(not np.asarray(a)[1:].any() for a in (*warm.kv.k, *warm.kv.v)), "warm-up wrote beyond the scratch page"
    counts = np.asarray(warm._rows.output_counts)
    assert not counts[:warm.spare_slot].any()


def test_no_prompt_length_batch_size_or_budget_compiles_after_warmup(warm: ModelRunner, caplog: pytest.LogCaptureFixture
                                                                     ) -> None:
    """F01: every prompt length 1 to 60, batches of 1 to 9, odd chunk budgets."""
    run_all(make_engine(warm), [[5, 6]], greedy(2))
    with counted_compilations() as compiled, caplog.at_level(logging.WARNING, "jradix"):
        engine = make_engine(warm)
        for length in range(1, 61):
            run_all(engine, [random_prompts(1, seed=length, shortest=length, longest=length)[0]], greedy(2))
        for size in range(1, 10):
            run_all(engine, random_prompts(size, seed=size), greedy(3))
        for budget in (1, 3, 13, 40):
            run_all(make_engine(warm, prefill_chunk_tokens=budget), random_prompts(3, seed=budget), greedy(2))
    assert compiled == [] and not caplog.records
    assert set(cache_sizes(warm).values()) == {1}


def test_no_sampling_option_compiles_after_warmup(warm: ModelRunner) -> None:
    """F02: the structure of a step's inputs never changes: log-probabilities, penalties, seeds, bias on and off."""
    options = [{}, dict(logprobs=3), dict(seed=7, temperature=1.0), dict(repetition_penalty=1.3),
               dict(prompt_logprobs=1), dict(logit_bias={4: 2.0}), dict(presence_penalty=1.0, frequency_penalty=-1.0),
               dict(min_tokens=2), dict(top_k=3, top_p=0.5, min_p=0.1, temperature=0.8), dict(stop_token_ids=[3, 4]),
               dict(n=2, temperature=1.0)]
    prompts = random_prompts(3, seed=1)
    with counted_compilations() as compiled:
        engine = make_engine(warm)
        for option in options:
            for rows in (1, 3):
                params = [SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **option}), *[greedy(4)] * (rows - 1)]
                run_all(engine, prompts[:rows], params)
    assert compiled == []


def test_compiling_after_warmup_is_logged_with_its_cause(warm: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    program = warm._programs.pop(("forward", 1, 0))
    try:
        with caplog.at_level(logging.WARNING, "jradix"):
            run_all(make_engine(warm), [[5, 6, 7]], greedy(2))
    finally:
        warm._programs["forward", 1, 0] = program
    assert [r.getMessage() for r in caplog.records] == [
        "compiling after warm-up: ('forward', 1, 0) was not among the warmed programs"]


def test_all_buckets_give_the_tokens_of_ref(warm: ModelRunner) -> None:
    engine = make_engine(warm)
    for num, seed in ((1, 0), (9, 1), (2, 2)):
        prompts = random_prompts(num, seed=seed)
        for prompt, out in zip(prompts, run_all(engine, prompts, greedy(5), poison=np.nan)):
            lm().assert_greedy(prompt, out.outputs[0].token_ids, 5)


# -- buffers

def recorded_batches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list:
    """Every PackedBatch the engine dispatches from now on."""
    batches = []
    real = engine_module.build_step_batch

    def build(*args: object, **kwargs: object) -> tuple:
        built = real(*args, **kwargs)
        batches.append(built[0])
        return built

    monkeypatch.setattr(engine_module, "build_step_batch", build)
    return batches


def test_step_buffers_are_fresh_every_step(warm: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU a running step reads its NumPy arguments in place: two steps may share only what nobody can write."""
    engine = make_engine(warm)
    batches = recorded_batches(engine, monkeypatch)
    run_all(engine, random_prompts(3), SamplingParams(max_tokens=6, logprobs=1, seed=1))
    assert len(batches) >= 6
    for one, other in zip(batches, batches[1:]):
        assert not any(np.shares_memory(a, b) for a in one for b in other if a.flags.writeable or b.flags.writeable)


@pytest.mark.parametrize("overlap", [True, False])
def test_overwriting_the_buffers_of_a_fetched_step_changes_nothing(warm: ModelRunner, overlap: bool,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = random_prompts(3), SamplingParams(max_tokens=8, seed=1, temperature=1.0)
    expected = tokens_of(run_all(make_engine(warm), prompts, params))
    engine = make_engine(warm, overlap=overlap)
    batches = recorded_batches(engine, monkeypatch)
    for prompt in prompts:
        engine.add_request(prompt, params)
    outputs = {}
    while engine.has_unfinished:
        outputs.update((out.request_id, out) for out in engine.step())
        for batch in batches[:-1]:      # all but the newest step were fetched
            for array in batch:
                if array.flags.writeable:
                    array.fill(63)
    assert tokens_of(outputs[f"request-{i}"] for i in sorted(int(name.split("-")[1]) for name in outputs)) == expected


def test_overwriting_host_arrays_right_after_dispatch_does_not_reach_the_running_step(
        warm: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and page tables are copied into the step's own buffers, which nothing writes after dispatch."""
    prompts = random_prompts(4, seed=3, shortest=30)
    engine = make_engine(warm, prefill_chunk_tokens=16)
    real = engine._runner.dispatch

    def dispatch(*args: object, **kwargs: object) -> object:
        output = real(*args, **kwargs)
        held = [(array, array.copy()) for request in engine.scheduler.requests() if request.lease is not None
                for array in (request.tokens, request.lease.page_table)]
        for array, _ in held:
            array.fill(1)
        jax.block_until_ready(output.tokens)
        for array, kept in held:
            array[...] = kept
        return output

    monkeypatch.setattr(engine._runner, "dispatch", dispatch)
    for prompt, out in zip(prompts, run_all(engine, prompts, greedy(6))):
        lm().assert_greedy(prompt, out.outputs[0].token_ids, 6)


def test_kv_is_written_in_place(warm: ModelRunner) -> None:
    """Donation works: no array of the pool moves, in prefill, decode, sampling and multi-step decode."""
    engine = make_engine(warm)
    runner = engine._runner

    def places() -> list[int]:
        return [a.unsafe_buffer_pointer() for a in (*runner.kv.k, *runner.kv.v)]

    before = places()
    engine.add_request(random_prompts(1)[0], greedy(6, logprobs=1))
    engine.add_request(random_prompts(1)[0], greedy(6))
    while engine.has_unfinished:
        engine.step()
        assert places() == before
    counts = runner._rows.output_counts.unsafe_buffer_pointer()
    run_all(engine, random_prompts(2), greedy(4, repetition_penalty=1.2))
    assert runner._rows.output_counts.unsafe_buffer_pointer() == counts and places() == before


# -- memory

def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def test_memory_stays_at_weights_and_pool_over_fifty_steps(warm: ModelRunner) -> None:
    """F04: never two pools at once, nor two row states, nor results that pile up."""
    engine = make_engine(warm)
    pool = sum(a.nbytes for a in (*warm.kv.k, *warm.kv.v))
    assert pool > 4 * WORKSPACE_BYTES, "the pool is too small to be told from the workspace"
    gc.collect()
    weights_and_pool = live_bytes()
    for prompt in random_prompts(8, seed=1):
        engine.add_request(prompt, greedy(60, logprobs=2))
    num_steps = peak = 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
        peak = max(peak, live_bytes())
    assert num_steps >= 50
    assert peak <= weights_and_pool + 0.1 * pool + WORKSPACE_BYTES
    assert live_bytes() <= weights_and_pool + WORKSPACE_BYTES


def test_close_deletes_weights_and_state_and_may_be_repeated() -> None:
    """B03: explicitly, although the caller still holds references to the arrays."""
    runner = new_runner(num_pages=16)
    held = [*runner._leaves, *jax.tree.leaves((runner.kv, runner._rows))]
    runner.close()
    runner.close()
    assert all(array.is_deleted() for array in held) and not runner.is_intact


# -- failures

class Fault:
    """A runner's program that raises at its n-th call, after it has consumed the donated arrays."""

    def __init__(self, program: Callable, error: BaseException, after: int):
        self.program, self.error, self.after = program, error, after

    def __call__(self, *args: object) -> object:
        result = self.program(*args)
        self.after -= 1
        if self.after == 0:
            raise self.error
        return result


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("message", ["INTERNAL: the kernel hung", "RESOURCE_EXHAUSTED: out of memory"])
def test_failure_after_donation_is_an_engine_error_and_the_engine_works_on(warm: ModelRunner, message: str, after: int,
                                                                           overlap: bool) -> None:
    """F04: the user sees the cause, never "Array has been deleted"; the cache is empty, the next call is right."""
    prompts = random_prompts(3, seed=5)
    engine = make_engine(warm, overlap=overlap)
    run_all(engine, prompts, greedy(3))
    computed = engine.stats()["tokens"]["computed"]
    programs = engine._runner._programs
    key = ("forward", 8, 0)
    real = programs[key]
    programs[key] = Fault(real, jax.errors.JaxRuntimeError(message), after)
    try:
        names = [engine.add_request(p, greedy(9)) for p in prompts]
        with pytest.raises(EngineError, match=message.split(":")[0]) as caught:
            drain(engine)
    finally:
        programs[key] = real
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    assert sorted(out.request_id for out in engine.dropped_outputs) == sorted(names)
    for out in engine.dropped_outputs:
        assert out.finished and out.outputs[0].finish_reason == "abort" and len(out.outputs[0].token_ids) < 9
    assert not engine.has_unfinished
    assert_idle(engine)
    assert engine.stats()["pool"]["cached"] == 0 and engine.stats()["requests"]["failures"] == 1
    assert engine.stats()["tokens"]["computed"] > computed, "the totals go on"
    for prompt, out in zip(prompts, run_all(engine, prompts, greedy(9), poison=np.nan)):
        assert out.num_cached_tokens == 0
        lm().assert_greedy(prompt, out.outputs[0].token_ids, 9)


def test_failure_while_results_are_fetched_is_an_engine_error(warm: ModelRunner, monkeypatch: pytest.MonkeyPatch
                                                              ) -> None:
    """An asynchronous failure shows up only where the host waits."""
    engine = make_engine(warm)
    real, calls = engine_module._fetch, []

    def fetch(arrays: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise jax.errors.JaxRuntimeError("INTERNAL: lost device")
        return real(arrays)

    monkeypatch.setattr(engine_module, "_fetch", fetch)
    prompts = random_prompts(2)
    for prompt in prompts:
        engine.add_request(prompt, greedy(5))
    with pytest.raises(EngineError, match="lost device"):
        drain(engine)
    for prompt, out in zip(prompts, run_all(engine, prompts, greedy(5))):
        lm().assert_greedy(prompt, out.outputs[0].token_ids, 5)


def test_failure_to_make_new_state_closes_the_engine_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = new_runner(num_pages=16)
    engine = make_engine(runner)
    engine.add_request([5, 6, 7], greedy(4))

    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(runner, "dispatch", fail)
    monkeypatch.setattr(runner, "reset_state", fail)
    with pytest.raises(EngineError, match="the engine is closed, make a new one"):
        engine.step()
    assert len(engine.dropped_outputs) == 1 and not engine.has_unfinished
    with pytest.raises(EngineError, match="closed"):
        engine.add_request([5], greedy(1))


# -- weights

def test_replacing_weights_by_themselves_keeps_them(warm: ModelRunner) -> None:
    model = toy_decoder(lm().config, lm().weights)
    warm.replace_weights(model)
    warm.replace_weights(model)
    prompt = random_prompts(1)[0]
    lm().assert_greedy(prompt, tokens_of(run_all(make_engine(warm), [prompt], greedy(4)))[0], 4)


def test_replacing_weights_of_another_shape_is_refused(warm: ModelRunner) -> None:
    other = toy_lm()
    with pytest.raises(ValueError, match="differ in number, shape or dtype"):
        warm.replace_weights(toy_decoder(other.config, other.weights))


def test_prompt_ids_that_are_not_int32_are_converted(warm: ModelRunner) -> None:
    prompt = random_prompts(1)[0]
    outputs = [tokens_of(run_all(make_engine(warm), [given], greedy(3))) for given in (
        prompt, tuple(prompt), np.array(prompt, np.int64), np.array(prompt, np.uint8), jnp.array(prompt))]
    assert all(out == outputs[0] for out in outputs)
