"""AsyncLLM on a tiny model: the results of the sync calls, shared steps, cancellation, failures, threads, loops."""
from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import smollm
from jradix import LLM, AsyncLLM, SamplingParams
from jradix.calls import Turn
from jradix.config import StepShapes
from jradix.errors import EngineError, RequestError
from jradix.outputs import RequestOutput, StreamDelta
from test_llm import SIZES, folder, greedy, ids_of, interrupt_at  # noqa: F401
from toy_engine import assert_idle, counted_compilations

NUM_SEQS = 8
OPTIONS = {**SIZES, "max_num_seqs": NUM_SEQS, "compile_cache_dir": None}
PROMPTS = ["one", "two two", "three three three", "four"]


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:  # noqa: F811
    with LLM(folder, **OPTIONS) as llm:
        shapes = llm._runner.shapes       # compiling is what these tests cost: one bucket of rows, one of chunk tokens
        llm._runner.shapes = StepShapes(shapes.row_buckets[-1:], shapes.row_buckets[-1:], shapes.chunk_buckets[-1:])
        llm.engine._reset_scheduler()
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared LLM with an empty cache; afterwards no request and no thread may be left."""
    shared.cache.clear()
    yield shared
    assert_idle(shared.engine)
    assert not shared._sinks and not workers()


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "jradix-async"]


def run(work: Callable[[AsyncLLM], Awaitable[Any]], llm: LLM) -> Any:
    """Runs work(AsyncLLM(llm)) in a loop of its own."""
    async def main() -> Any:
        async with AsyncLLM(llm) as allm:
            return await asyncio.wait_for(work(allm), 60)
    return asyncio.run(main())


def slow_down(llm: LLM, patch: pytest.MonkeyPatch, step_s: float) -> None:
    """Steps take longer, so that what is done to running calls finds them running."""
    real = llm.engine.step

    def step() -> list[RequestOutput]:
        time.sleep(step_s)
        return real()

    patch.setattr(llm.engine, "step", step)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


async def first_delta(allm: AsyncLLM, **fields: object) -> tuple[Any, StreamDelta]:
    """A stream that has begun, and its first delta."""
    stream = allm.stream(PROMPTS, greedy(90, **fields))
    return stream, await anext(stream)


def facts(outputs: list[RequestOutput]) -> list[Any]:
    """What two runs of the same requests have in common, log-probabilities aside."""
    return [(out.prompt_token_ids, out.error, [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason, c.valid,
                                                c.parsed, c.num_forced_tokens) for c in out.outputs])
            for out in outputs]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    chosen = [entry[token].logprob for out in outputs for c in out.outputs
              for token, entry in zip(c.token_ids, c.logprobs or [])]
    inside = [entry[token].logprob for out in outputs
              for token, entry in zip(out.prompt_token_ids, out.prompt_logprobs or []) if entry]
    return chosen + inside


# -- the results of the sync calls

REQUESTS = {
    "greedy": greedy(12), "sampled": SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=9),
    "stop": SamplingParams(temperature=1.0, seed=2, n=2, stop=[chr(c) for c in range(97, 123)], max_tokens=30),
    "logprobs": greedy(5, logprobs=2, prompt_logprobs=1),
    "regex": SamplingParams(temperature=1.0, seed=3, regex="[a-c]{3}-(yes|no)", max_tokens=20),
    "json": SamplingParams(temperature=1.0, seed=4, json_schema={"type": "integer", "minimum": 1, "maximum": 9},
                           max_tokens="enough"),
}


@pytest.mark.parametrize("params", REQUESTS.values(), ids=REQUESTS)
def test_generate_gives_the_results_of_the_sync_call(params: SamplingParams, llm: LLM) -> None:
    expected = llm.generate([*PROMPTS, ""], params)
    llm.cache.clear()
    outputs = run(lambda allm: allm.generate([*PROMPTS, ""], params), llm)
    assert facts(outputs) == facts(expected) and "empty prompt" in outputs[4].error
    assert logprobs(outputs) == pytest.approx(logprobs(expected), abs=1e-4)
    assert bool(logprobs(expected)) == (params.logprobs is not None)


@pytest.mark.parametrize("params", REQUESTS.values(), ids=REQUESTS)
def test_stream_adds_up_to_the_results_of_the_sync_call(params: SamplingParams, llm: LLM) -> None:
    expected = llm.generate([*PROMPTS, ""], params)
    texts: dict[tuple[int, int], str] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    finals: dict[int, RequestOutput] = {}

    async def work(allm: AsyncLLM) -> None:
        async for delta in allm.stream([*PROMPTS, ""], params):
            assert delta.index not in finals, "a delta after the last of its prompt"
            key = delta.index, delta.sample
            texts[key] = texts.get(key, "") + delta.text
            tokens[key] = tokens.get(key, []) + delta.token_ids
            if delta.output is not None:
                finals[delta.index] = delta.output

    run(work, llm)
    assert facts([finals[i] for i in range(5)]) == facts(expected)
    for i, out in enumerate(expected[:4]):
        for completion in out.outputs:
            assert (texts[i, completion.index], tokens[i, completion.index]) == (completion.text, completion.token_ids)


def test_chat_and_score_give_the_results_of_the_sync_calls(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}
    short = SamplingParams(temperature=0, max_tokens=8)
    expected = llm.chat(chats, greedy(8)), llm.chat(chats[0], short, response_format=form)
    scores = llm.score("the prompt ", ["yes", "no", ""])

    async def work(allm: AsyncLLM) -> Any:
        return await asyncio.gather(allm.chat(chats, greedy(8)), allm.chat(chats[0], short, response_format=form),
                                    allm.score("the prompt ", ["yes", "no", ""]))

    many, one, scored = run(work, llm)
    assert facts(many) == facts(expected[0]) and facts(one) == facts(expected[1])
    for found, score in zip(scored, scores):
        assert (found.token_ids, found.error) == (score.token_ids, score.error)
        assert found.logprobs == pytest.approx(score.logprobs, abs=1e-4)


def test_bad_arguments_raise_what_the_sync_calls_raise(llm: LLM) -> None:
    async def work(allm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match=r"2 of 3 prompts cannot be served: \[0\] empty prompt.*\[2\]"):
            await allm.generate(["", "good", "x" * 300], greedy(2), on_error="raise")
        with pytest.raises(ValueError, match="on_error='other'"):
            await allm.generate("x", on_error="other")
        with pytest.raises(ValueError, match="2 prompts and 1 sampling parameters"):
            await anext(allm.stream(["a", "b"], [greedy()]))
        with pytest.raises(ValueError, match="2 prompts and 3 completions"):
            await allm.score(["a", "b"], ["1", "2", "3"])

    run(work, llm)


# -- many calls, one engine

def test_calls_made_together_share_the_steps(llm: LLM) -> None:
    prompts = [f"prompt number {i}" for i in range(NUM_SEQS)]
    expected = [ids_of(llm.generate(prompt, greedy(20))) for prompt in prompts]
    llm.cache.clear()
    before = llm.stats()["steps"]
    llm.generate(prompts[0], greedy(20))
    alone = llm.stats()["steps"] - before

    async def work(allm: AsyncLLM) -> Any:
        return await asyncio.gather(*(allm.generate(prompt, greedy(20)) for prompt in prompts))

    outputs = run(work, llm)
    assert [ids_of(out) for out in outputs] == expected
    assert llm.stats()["steps"] - before - alone < 2 * alone, "the calls ran one after the other"


def test_worker_compiles_nothing_that_the_sync_calls_have_compiled(llm: LLM) -> None:
    llm.generate(PROMPTS, greedy(5))
    llm.cache.clear()
    with counted_compilations() as compiled_programs:
        run(lambda allm: allm.generate(PROMPTS, greedy(5)), llm)
    assert not compiled_programs


def test_event_loop_runs_on_during_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step cannot end before the loop has turned ten times."""
    real, may_end = llm.engine.step, threading.Event()
    ended_in_time = []

    def step() -> list[RequestOutput]:
        ended_in_time.append(may_end.wait(10))
        return real()

    async def work(allm: AsyncLLM) -> Any:
        call = asyncio.create_task(allm.generate("x", greedy(2)))
        await until(workers)
        for _ in range(10):
            await asyncio.sleep(0.001)
        may_end.set()
        return await call

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", step)
        assert len(ids_of(run(work, llm))[0]) == 2
    assert all(ended_in_time)


@pytest.mark.slow
@pytest.mark.skipif(not smollm.is_installed(), reason="needs the embedded model")
def test_event_loop_keeps_ticking_during_a_long_prefill_of_a_real_model() -> None:
    gaps = []

    async def heartbeat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.01)
            gaps.append(time.perf_counter() - last)
            last += gaps[-1]

    async def main() -> tuple[list[RequestOutput], float]:
        async with AsyncLLM("demo", quiet=True, kv_cache_bytes=2**27) as allm:
            await allm.generate("Warm up.", greedy(2))
            task = asyncio.create_task(heartbeat())
            started = time.perf_counter()
            outputs = await allm.generate([list(range(100, 1700))], greedy(2))
            took_s = time.perf_counter() - started
            task.cancel()
            return outputs, took_s

    outputs, took_s = asyncio.run(main())
    assert outputs[0].metrics.num_computed_tokens == 1600
    assert len(gaps) > 5 and max(gaps) < took_s / 3, (took_s, len(gaps), max(gaps))


def test_slow_consumer_holds_nobody_up_and_gets_merged_deltas(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, greedy(60, n=2))

    async def work(allm: AsyncLLM) -> list[StreamDelta]:
        stream = allm.stream(PROMPTS, greedy(60, n=2))
        deltas = [await anext(stream)]
        await allm.generate("other", greedy(40))
        await until(lambda: not workers())       # everything is computed and nobody has asked
        return deltas + [delta async for delta in stream]

    deltas = run(work, llm)
    assert len(deltas) <= 1 + 2 * len(PROMPTS)
    for i, out in enumerate(expected):
        for completion in out.outputs:
            mine = [d for d in deltas if (d.index, d.sample) == (i, completion.index)]
            assert sum((d.token_ids for d in mine), []) == completion.token_ids
            assert "".join(d.text for d in mine) == completion.text and mine[-1].finish_reason == "length"
    last = {delta.index: delta for delta in deltas}
    assert all(delta.output is not None for delta in last.values())


def test_loops_one_after_the_other_and_at_once_share_one_object(llm: LLM) -> None:
    """Jupyter restarts its loop; scripts call asyncio.run twice; threads have loops of their own."""
    expected = ids_of(llm.generate(PROMPTS, greedy(20)))
    allm = AsyncLLM(llm)
    for _ in range(2):
        assert ids_of(asyncio.run(allm.generate(PROMPTS, greedy(20)))) == expected
    found: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: found.append(ids_of(asyncio.run(allm.generate(PROMPTS, greedy(20))))))
               for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 4
    asyncio.run(allm.aclose())


def test_call_whose_loop_was_closed_is_aborted(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that was stopped by an exception and closed without cancelling its tasks."""
    allm = AsyncLLM(llm)
    loop = asyncio.new_event_loop()
    task = loop.create_task(allm.generate(PROMPTS, greedy(90)))
    loop.run_until_complete(asyncio.sleep(0.01))
    assert not task.done()
    loop.close()
    asyncio.run(until(lambda: not workers()))
    assert llm.num_unfinished == 0 and not caplog.records
    assert len(asyncio.run(allm.generate("x", greedy(3)))) == 1
    asyncio.run(allm.aclose())
    task._log_destroy_pending = False


# -- cancellation

def cancel(task: asyncio.Task[Any]) -> Coroutine[Any, Any, None]:
    async def wait() -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    return wait()


def test_cancelled_call_gives_its_pages_back_and_disturbs_nobody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(llm.generate(PROMPTS, greedy(90)))

    async def work(allm: AsyncLLM) -> None:
        other = asyncio.create_task(allm.generate(PROMPTS, greedy(90)))
        mine = asyncio.create_task(allm.generate(["mine", "too"], greedy(100)))
        await until(lambda: llm.num_unfinished == 6)
        await cancel(mine)
        assert llm.num_unfinished == 4, "the cancelled requests are still there"
        await allm.run(lambda llm: llm.engine.check_invariants())
        assert not other.done(), "nothing was cancelled while other work ran"
        assert ids_of(await other) == expected

    with monkeypatch.context() as patch:
        slow_down(llm, patch, 0.01)
        run(work, llm)


@pytest.mark.parametrize("how", ["break", "aclosing", "timeout", "cancel", "exception"])
def test_stream_that_is_left_aborts_its_requests(how: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(allm: AsyncLLM) -> None:
        async for _ in allm.stream(PROMPTS, greedy(100)):
            if how == "break":
                break
            if how == "exception":
                raise LookupError

    async def work(allm: AsyncLLM) -> None:
        if how == "aclosing":
            async with contextlib.aclosing(allm.stream(PROMPTS, greedy(100))) as stream:
                await anext(stream)
            assert llm.num_unfinished == 0
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await read(allm)
        elif how == "cancel":
            task = asyncio.create_task(read(allm))
            await until(lambda: llm.num_unfinished == 4)
            await cancel(task)
        else:
            with contextlib.suppress(LookupError):
                await read(allm)
        await until(lambda: llm.num_unfinished == 0)
        assert llm.stats()["requests"]["running"] == 0
        assert len(ids_of(await allm.generate("x", greedy(3)))[0]) == 3

    with monkeypatch.context() as patch:
        slow_down(llm, patch, 0.02)        # a timeout finds the stream waiting
        run(work, llm)


def test_timeout_ends_a_call_without_waiting_for_its_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(allm: AsyncLLM) -> float:
        started = time.perf_counter()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await allm.generate("x", greedy(50))
        return time.perf_counter() - started

    with monkeypatch.context() as patch:
        slow_down(llm, patch, 0.5)
        assert run(work, llm) < 0.4


def test_call_cancelled_before_it_starts_leaves_no_trace(llm: LLM) -> None:
    async def work(allm: AsyncLLM) -> None:
        with llm.turn.held():        # the worker cannot begin
            task = asyncio.create_task(allm.generate(PROMPTS, greedy(50)))
            await asyncio.sleep(0.01)
            await cancel(task)
        await until(lambda: not workers())

    before = llm.stats()["steps"]
    run(work, llm)
    assert llm.stats()["steps"] == before


def test_random_calls_and_cancellations_keep_the_engine_whole(llm: LLM) -> None:
    """Each call that is not cancelled gets the tokens it gets alone, whatever happens beside it."""
    texts = [f"{'shared ' * (i % 3)}{i}" for i in range(12)]
    expected = {text: ids_of(llm.generate(text, greedy(15)))[0] for text in texts}
    choice = random.Random(0)
    num_ended = 0

    async def generate(allm: AsyncLLM, text: str) -> None:
        nonlocal num_ended
        assert ids_of(await allm.generate(text, greedy(15))) == [expected[text]]
        num_ended += 1

    async def stream(allm: AsyncLLM, text: str, num_deltas: int) -> None:
        nonlocal num_ended
        tokens: list[int] = []
        async with contextlib.aclosing(allm.stream(text, greedy(15))) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                if (num_deltas := num_deltas - 1) == 0:
                    break
        assert tokens == expected[text][:len(tokens)]
        num_ended += 1

    async def work(allm: AsyncLLM) -> None:
        tasks: list[asyncio.Task[None]] = []
        for _ in range(60):
            text = choice.choice(texts)
            tasks.append(asyncio.create_task(
                generate(allm, text) if choice.random() < 0.5 else stream(allm, text, choice.randrange(1, 20))))
            await asyncio.sleep(choice.random() * 0.01)
            if choice.random() < 0.4:
                choice.choice(tasks).cancel()
            await allm.run(lambda llm: llm.engine.check_invariants())
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)]
        assert not failures, failures
        assert num_ended == results.count(None) < 60, "nothing was cancelled in time"

    run(work, llm)


# -- failures and interrupts


@pytest.fixture
def keyboard() -> Iterator[None]:
    """An interrupt raises KeyboardInterrupt, also in a process that was started to ignore it (a shell's `... &`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_failed_step_reaches_every_waiting_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(allm: AsyncLLM) -> list[Any]:
        async def read() -> list[StreamDelta]:
            return [delta async for delta in allm.stream(PROMPTS[:2], greedy(50))]

        async def main() -> list[Any]:
            with llm.turn.held():        # all are there before the first step
                calls = [asyncio.create_task(call) for call in (
                    allm.generate(PROMPTS[:2], [greedy(1), greedy(50)]), read(), allm.generate("four", greedy(50)))]
                await asyncio.sleep(0.01)
            return await asyncio.gather(*calls, return_exceptions=True)

        with monkeypatch.context() as patch:
            interrupt_at(llm, patch, 4, RuntimeError("INTERNAL: lost device"))
            results = await main()
        assert len(ids_of(await allm.generate("x", greedy(3)))[0]) == 3
        return results

    first, second, third = run(work, llm)
    for error in (first, second, third):
        assert isinstance(error, EngineError) and "lost device" in str(error)
    assert len({id(error) for error in (first, second, third)}) == 3, "calls share one error"
    assert [out.outputs[0].finish_reason for out in first.partial_results] == ["length", "abort"]
    assert [out.prompt for out in third.partial_results] == ["four"]


def test_interrupt_from_the_keyboard_leaves_a_usable_engine(llm: LLM, keyboard: None) -> None:
    allm = AsyncLLM(llm)

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGINT)
        await allm.generate(PROMPTS * 10, greedy(100))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert llm.num_unfinished == 0
    assert len(ids_of(asyncio.run(allm.generate("x", greedy(3))))[0]) == 3
    asyncio.run(allm.aclose())


# -- the LLM itself meanwhile

def test_sync_calls_work_while_async_calls_run(llm: LLM) -> None:
    """B01, with others at work: in the loop and in threads; generate, score and a half-read stream."""
    expected = ids_of(llm.generate(PROMPTS, greedy(60)))
    score = llm.score("a", "b")[0].logprob

    async def work(allm: AsyncLLM) -> None:
        with llm.turn.held():        # all are there before the first step
            mine = [asyncio.create_task(allm.generate(prompt, greedy(60))) for prompt in PROMPTS]
            threads = [asyncio.create_task(asyncio.to_thread(llm.generate, PROMPTS, greedy(60))) for _ in range(3)]
            await asyncio.sleep(0.01)
        stream = llm.stream(PROMPTS[0], greedy(60))
        tokens = list(next(stream).token_ids)
        assert ids_of(llm.generate(PROMPTS[1], greedy(60))) == [expected[1]]
        assert llm.score("a", "b")[0].logprob == pytest.approx(score, abs=1e-4)
        for delta in stream:
            tokens += delta.token_ids
            await asyncio.sleep(0)
        assert tokens == expected[0]
        for i, call in enumerate(mine):
            assert ids_of(await call) == [expected[i]]
        for thread in threads:
            assert ids_of(await thread) == expected

    run(work, llm)


def test_cache_of_a_working_engine_is_touched_between_steps_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(allm: AsyncLLM) -> None:
        call = asyncio.create_task(allm.generate(PROMPTS, greedy(100)))
        await until(lambda: llm.num_unfinished == 4)
        with pytest.raises(EngineError, match="AsyncLLM.run"):
            llm.prefix_cache.check_invariants()
        assert llm.cache.pin("another prefix") == len("another prefix")       # waits for its turn
        llm.cache.unpin("another prefix")
        assert await allm.run(lambda llm: llm.cache.pin("pinned prefix")) == len("pinned prefix")
        assert (await allm.run(LLM.stats))["cache"]["pins"] == 1
        with pytest.raises(ZeroDivisionError):
            await allm.run(lambda _: 1 / 0)
        assert not call.done()
        await call

    with monkeypatch.context() as patch:
        slow_down(llm, patch, 0.01)
        run(work, llm)
    llm.cache.unpin("pinned prefix")


def test_two_async_llms_share_one_engine(llm: LLM) -> None:
    expected = ids_of(llm.generate(PROMPTS, greedy(40)))

    async def work(allm: AsyncLLM) -> None:
        async with AsyncLLM(llm) as second:
            outputs = await asyncio.gather(allm.generate(PROMPTS, greedy(40)), second.generate(PROMPTS, greedy(40)))
        assert [ids_of(out) for out in outputs] == [expected, expected]

    run(work, llm)


# -- the end

def test_aclose_ends_running_calls_and_the_thread_but_not_a_shared_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch
                                                                       ) -> None:
    async def main() -> None:
        allm = AsyncLLM(llm)
        slow_down(llm, monkeypatch, 0.01)
        call = asyncio.create_task(allm.generate([*PROMPTS, ""], greedy(100)))
        stream, _ = await first_delta(allm)
        await allm.aclose()
        assert not workers() and llm.num_unfinished == 0
        with pytest.raises(EngineError, match="closed while this call ran") as caught:
            await call
        assert "empty prompt" in caught.value.partial_results[4].error
        with pytest.raises(EngineError, match="closed while"):
            _ = [delta async for delta in stream]
        for use in (allm.generate("x"), anext(allm.stream("x")), allm.run(LLM.stats)):
            with pytest.raises(EngineError, match="this AsyncLLM is closed"):
                await use
        await allm.aclose()

    asyncio.run(main())
    assert len(ids_of(llm.generate("x", greedy(3)))[0]) == 3


def test_aclose_closes_an_llm_loaded_here(folder: Path, llm: LLM) -> None:  # noqa: F811
    async def main() -> LLM:
        async with AsyncLLM(folder, **OPTIONS) as allm:
            assert await allm.run(lambda llm: llm.num_unfinished) == 0
        return allm.llm

    with pytest.raises(EngineError, match="this LLM is closed"):
        asyncio.run(main()).generate("x")
    with pytest.raises(ValueError, match="options page_size are for an LLM to load"):
        AsyncLLM(llm, page_size=4)


def test_llm_closed_under_running_calls_is_an_error_in_each(folder: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
                                                            ) -> None:
    async def main() -> list[Any]:
        async with AsyncLLM(folder, **{**OPTIONS, "max_num_seqs": 1}) as allm:
            calls = [asyncio.create_task(allm.generate(prompt, greedy(100))) for prompt in PROMPTS]
            slow_down(allm.llm, monkeypatch, 0.01)
            await until(lambda: allm.llm.num_unfinished == 4)
            allm.llm.close()
            return await asyncio.gather(*calls, return_exceptions=True)

    assert ["this LLM is closed" in str(error) for error in asyncio.run(main())] == [True] * 4


def test_interpreter_ends_at_once_with_calls_under_way(folder: Path) -> None:  # noqa: F811
    code = textwrap.dedent(f"""
        import asyncio, atexit, time
        from jradix import AsyncLLM, SamplingParams
        allm = AsyncLLM({str(folder)!r}, **{OPTIONS!r})
        loop = asyncio.new_event_loop()
        endless = SamplingParams(temperature=0, ignore_eos=True, max_tokens=100)
        stream = allm.stream(["x"] * 5000, endless)
        loop.run_until_complete(anext(stream))
        left = time.perf_counter()
        atexit.register(lambda: print(time.perf_counter() - left))       # runs when all threads have ended
    """)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
                           env={**os.environ, "JAX_PLATFORMS": "cpu"}, cwd=Path(__file__).parent.parent)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert float(ended.stdout) < 5


# -- turns

def test_turn_visitor_gets_in_between_two_steps_of_a_worker() -> None:
    turn = Turn()
    steps: list[str] = []
    is_working, may_stop = threading.Event(), threading.Event()

    def work() -> None:
        turn.enter()
        while not may_stop.is_set():
            steps.append("begin")
            is_working.set()
            time.sleep(0.001)
            with turn.held():            # a worker is inside already
                steps.append("end")
            if turn.is_awaited:
                turn.give_way()
        turn.leave()

    thread = threading.Thread(target=work)
    thread.start()
    is_working.wait(10)
    assert turn.is_taken
    for _ in range(20):
        with turn.held(), turn.held():
            steps.append("visit")
            time.sleep(0.002)
            assert steps[-2:] == ["end", "visit"], "inside together, or twice before the worker"
            assert not turn.is_taken
    may_stop.set()
    thread.join(10)
    assert steps.count("visit") == 20 and steps.count("begin") == steps.count("end") < 200, "visitors had to wait"
    assert not turn.is_taken


def test_turn_interrupted_visitor_leaves_the_line(keyboard: None) -> None:
    turn = Turn()
    is_inside, may_leave = threading.Event(), threading.Event()

    def visit() -> None:
        with turn.held():
            is_inside.set()
            may_leave.wait(10)

    thread = threading.Thread(target=visit)
    thread.start()
    is_inside.wait(10)
    timer = threading.Timer(0.05, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        with turn.held():
            raise AssertionError("two inside")
    assert turn.is_taken and not turn.is_awaited
    may_leave.set()
    thread.join(10)
    timer.join(10)
    assert not turn.is_taken
    with turn.held():
        assert not turn.is_taken
