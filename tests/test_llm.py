"""The LLM class on a tiny checkpoint: order, errors in place, streams, score, interrupts, memory, devices."""
from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import jradix.llm as llm_module
from jradix import LLM, SamplingParams, convert
from jradix.errors import DeviceError, EngineError, RequestError, TokenizerError
from jradix.outputs import RequestOutput
from toy_engine import ToyLM, assert_idle, toy_model_config
from toy_models import make_checkpoint
from toy_tokenizers import make_chat_tokenizer

MODEL = dict(vocab_size=272, num_hidden_layers=1, max_position_embeddings=128, bos_token_id=256, eos_token_id=258)
SIZES = dict(dtype="float32", max_num_seqs=4, prefill_chunk_tokens=32, page_size=4, kv_cache_bytes=2**17, quiet=True)
PROMPTS = ["one", "two two", "three three three", "four"]


def save_model(folder: Path, *, generation_config: dict | None = None, add_bos: bool = False, chat: bool = True
               ) -> dict[str, np.ndarray]:
    weights = make_checkpoint(folder, **MODEL)
    make_chat_tokenizer(add_bos=add_bos, **({} if chat else {"chat_template": None})).save(folder)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return weights


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A compilation cache for this module, so that further LLMs of the same sizes start fast."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs, jax.config.jax_compilation_cache_dir
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    reset_cache()           # JAX keeps the folder that it used first
    yield tmp_path_factory.mktemp("compiled")
    reset_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[0])
    jax.config.update("jax_compilation_cache_dir", before[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "toy"
    save_model(path, generation_config=dict(temperature=0.0, eos_token_id=[257, 258]))
    return path


@pytest.fixture(scope="module")
def shared(folder: Path, compiled: Path) -> Iterator[LLM]:
    with LLM(folder, compile_cache_dir=compiled, **SIZES) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared LLM with an empty cache; afterwards no request may be left in it."""
    shared.cache.clear()
    yield shared
    while shared.engine._in_flight:
        shared.engine.step()
    assert_idle(shared.engine)
    assert not shared._sinks


@pytest.fixture(scope="module")
def ref(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ToyLM:
    weights = make_checkpoint(tmp_path_factory.mktemp("ref"), **MODEL)
    return ToyLM(toy_model_config(**MODEL), weights)


def greedy(max_tokens: int | None = 6, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


# -- generate

def test_generate_gives_the_tokens_of_ref_with_text(llm: LLM, ref: ToyLM) -> None:
    outputs = llm.generate(PROMPTS, greedy())
    for prompt, out in zip(PROMPTS, outputs):
        assert out.prompt == prompt and out.prompt_token_ids == list(prompt.encode()) and out.error is None
        completion = out.outputs[0]
        if max(completion.token_ids) < 260:
            assert completion.text == llm.tokenizer.decode(completion.token_ids)
        masked = ref.logits([*out.prompt_token_ids, *completion.token_ids])[len(prompt) - 1:-1, :260]
        assert (masked.argmax(axis=1) == completion.token_ids).all()


def test_generate_takes_one_prompt_many_texts_ids_and_arrays(llm: LLM) -> None:
    expected = ids_of(llm.generate(["two"], greedy()))
    ids = list(b"two")
    for prompts in ("two", [ids], ids, tuple(ids), np.array(ids), np.array([ids]), iter(["two"])):
        assert ids_of(llm.generate(prompts, greedy())) == expected
    assert llm.generate([]) == []
    with pytest.raises(ValueError, match="2 prompts and 1 sampling parameters"):
        llm.generate(["a", "b"], [greedy()])


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    """A06: ten prompts that end in reverse, one of them twice."""
    prompts = [f"prompt number {i}" for i in range(9)] + ["prompt number 3"]
    outputs = llm.generate(prompts, [greedy(n) for n in range(10, 0, -1)])
    assert [out.prompt for out in outputs] == prompts
    assert [len(out.outputs[0].token_ids) for out in outputs] == list(range(10, 0, -1))
    assert outputs[9].outputs[0].token_ids == outputs[3].outputs[0].token_ids[:1]


def test_empty_prompt_is_a_record_in_its_place(llm: LLM) -> None:
    """A01: among texts, among ids, alone, and as an empty conversation; white space is a prompt."""
    for prompts in (["ok", "", "ok2"], [[1], [], [2]]):
        outputs = llm.generate(prompts, greedy())
        assert "empty prompt" in outputs[1].error and outputs[1].finished and not outputs[1].outputs
        assert outputs[0].error is None is outputs[2].error and len(outputs[2].outputs[0].token_ids) == 6
    assert all("empty prompt" in out.error for out in llm.generate(["", ""], greedy()))
    assert llm.generate("  ", greedy())[0].error is None
    assert "expected a non-empty list" in llm.chat([], greedy())[0].error
    assert ids_of(llm.generate("ok", greedy())) == ids_of(llm.generate(["ok"], greedy()))


@pytest.mark.parametrize("bad", [None, 3.5, {"prompt": "x"}, [[1], 2], ["x"], [99999], "\ud800", b""])
def test_prompt_of_a_wrong_kind_is_a_record_in_its_place(bad: object, llm: LLM) -> None:
    outputs = llm.generate([[65], bad, [66]], greedy(2))
    assert outputs[1].error and len(outputs) == 3
    assert all(len(outputs[i].outputs[0].token_ids) == 2 for i in (0, 2))


@pytest.mark.parametrize("on_error", ["record", "raise", "truncate_left", "truncate_right"])
def test_over_long_prompt_in_every_mode(on_error: str, llm: LLM, ref: ToyLM) -> None:
    """A02: five prompts, the third too long."""
    prompts = ["a", "b", "".join(chr(97 + i % 26) for i in range(200)), "d", "e"]
    computed = llm.stats()["tokens"]["computed"]
    if on_error == "raise":
        with pytest.raises(RequestError, match=r"1 of 5 prompts cannot be served: \[2\] prompt of 200 tokens"):
            llm.generate(prompts, greedy(1), on_error=on_error)
        assert llm.stats()["tokens"]["computed"] == computed, "nothing may be computed before the error"
        return
    outputs = llm.generate(prompts, greedy(1), on_error=on_error)
    assert [out.prompt for out in outputs] == prompts
    assert all(len(outputs[i].outputs[0].token_ids) == 1 and not outputs[i].num_truncated_tokens for i in (0, 1, 3, 4))
    if on_error == "record":
        assert "max_model_len=128 leaves room for 127" in outputs[2].error
        return
    ids = list(prompts[2].encode())
    kept = ids[-127:] if on_error == "truncate_left" else ids[:127]
    assert outputs[2].error is None and outputs[2].num_truncated_tokens == 73
    assert outputs[2].prompt_token_ids == kept
    assert outputs[2].outputs[0].token_ids == [ref.logits(kept)[-1, :260].argmax()]


def test_raise_lists_every_bad_prompt_before_any_work(llm: LLM) -> None:
    steps = llm.stats()["steps"]
    message = r"3 of 4 prompts.*\[0\] empty prompt.*\[2\] token id 300.*\[3\] prompt is int"
    with pytest.raises(RequestError, match=message):
        llm.generate(["", "ok", [300], 5], on_error="raise")
    assert llm.stats()["steps"] == steps
    with pytest.raises(ValueError, match="on_error='ignore'"):
        llm.generate("x", on_error="ignore")


def test_scoring_call_without_output(llm: LLM) -> None:
    """A04: max_tokens=0 with and without prompt_logprobs; -1 is refused."""
    for num_logprobs in (None, 1):
        out = llm.generate("hello", greedy(0, prompt_logprobs=num_logprobs))[0]
        assert out.outputs[0].text == "" and out.outputs[0].finish_reason == "length"
        assert (out.prompt_logprobs is None) == (num_logprobs is None)
    with pytest.raises(ValueError, match="max_tokens=-1"):
        greedy(-1)


def test_output_without_limit_runs_to_max_model_len(llm: LLM) -> None:
    out = llm.generate("abcdef", greedy(None))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason, out.stop_reason) == (122, "length", "max_model_len")


def test_warm_cache_gives_the_same_tokens(llm: LLM) -> None:
    first, second = (llm.generate(PROMPTS, greedy(10)) for _ in range(2))
    assert ids_of(first) == ids_of(second)
    assert all(out.num_cached_tokens <= 1 for out in first)     # the begin-of-sequence token
    assert [out.num_cached_tokens for out in second] == [len(out.prompt_token_ids) - 1 for out in second]
    assert llm.stats()["cache"]["hit_rate"] > 0


def test_generation_config_is_merged_field_by_field(folder: Path, compiled: Path, tmp_path: Path) -> None:
    """P09, T11: the checkpoint's defaults for fields left out, in generate and chat; its end tokens join the others."""
    path = tmp_path / "model"
    save_model(path, generation_config=dict(temperature=0.1, top_k=1, repetition_penalty=1.05, eos_token_id=[70, 71]))
    for use, expected in ((True, (0.1, 1, 1.05)), (False, (1.0, 0, 1.0))):
        with LLM(path, compile_cache_dir=compiled, use_generation_config=use, **SIZES) as llm:
            assert llm.engine._eos_ids == {70, 71, 258}
            plain, hot = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, temperature=1.0)
            outputs = [*llm.generate(["x", "x"], [plain, hot]), *llm.chat([{"role": "user", "content": "x"}], plain)]
            values = [(p.temperature, p.top_k, p.repetition_penalty) for p in (o.sampling_params for o in outputs)]
            assert values == [expected, (1.0, *expected[1:]), expected]


def test_bos_adding_tokenizer_makes_the_empty_text_a_prompt(compiled: Path, tmp_path: Path) -> None:
    """A01"""
    save_model(tmp_path / "m", add_bos=True)
    with LLM(tmp_path / "m", compile_cache_dir=compiled, **SIZES) as llm:
        out = llm.generate("", greedy(2))[0]
        assert out.error is None and out.prompt_token_ids == [256] and len(out.outputs[0].token_ids) == 2


# -- chat

def test_chat_answers_one_and_many_conversations(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    ids = llm.render_chat(one)
    assert ids[0] == 257 and ids[-1] == 10
    single = llm.chat(one, greedy())
    many = llm.chat([one, [{"role": "user"}], one], greedy())
    assert ids_of(single) == ids_of([many[0]]) == ids_of([many[2]]) == ids_of(llm.generate([ids], greedy()))
    assert many[1].error and single[0].prompt_token_ids == ids
    with pytest.raises(RequestError, match=r"1 of 2 prompts.*\[1\]"):
        llm.chat([one, []], greedy(), on_error="raise")


def test_chat_without_a_template_is_one_error_before_any_work(compiled: Path, tmp_path: Path) -> None:
    """T09"""
    save_model(tmp_path / "base", chat=False)
    with LLM(tmp_path / "base", compile_cache_dir=compiled, **SIZES) as llm:
        with pytest.raises(TokenizerError, match=r"base has no chat template.*chat_template=.*generate\(\)"):
            llm.chat([[{"role": "user", "content": "hi"}]] * 100)
        assert llm.stats()["steps"] == 0


# -- streams

def test_stream_gives_the_tokens_of_generate(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, greedy(8, n=2))
    texts: dict[tuple[int, int], str] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    reasons, finals = {}, {}
    for delta in llm.stream(PROMPTS, greedy(8, n=2)):
        key = delta.index, delta.sample
        assert key not in reasons, "a delta after the last"
        texts[key] = texts.get(key, "") + delta.text
        tokens[key] = tokens.get(key, []) + delta.token_ids
        if delta.finish_reason is not None:
            reasons[key] = delta.finish_reason
        if delta.output is not None:
            finals[delta.index] = delta.output
    for i, out in enumerate(expected):
        for completion in out.outputs:
            key = i, completion.index
            assert (texts[key], tokens[key], reasons[key]) == (completion.text, completion.token_ids, "length")
        assert finals[i].outputs[1].token_ids == out.outputs[1].token_ids


def test_stream_reports_a_bad_prompt_in_its_place(llm: LLM) -> None:
    deltas = list(llm.stream(["", "ok"], greedy(2)))
    assert deltas[0].index == 0 and "empty prompt" in deltas[0].output.error
    assert {d.index for d in deltas[1:]} == {1} and deltas[-1].output.finished


def test_dropped_stream_leaves_nothing_behind(llm: LLM) -> None:
    """A08: the next call returns only its own result, at its own speed."""
    stream = llm.stream(PROMPTS, greedy(50))
    next(stream)
    assert llm.engine.num_unfinished == 4
    stream.close()
    assert llm.engine.num_unfinished == 0
    outputs = llm.generate("x", greedy(3))
    assert [out.prompt for out in outputs] == ["x"] and len(outputs[0].outputs[0].token_ids) == 3


def test_half_consumed_stream_goes_on_after_other_calls(llm: LLM) -> None:
    """Whichever call drives the engine, each result goes to the call that waits for it."""
    expected = ids_of(llm.generate(PROMPTS, greedy(9)))
    stream = llm.stream(PROMPTS[:2], greedy(9))
    first = next(stream)
    many = llm.generate_iter(iter([(p, greedy(9)) for p in PROMPTS]), max_inflight=2)
    index, out = next(many)
    assert out.outputs[0].token_ids == expected[index]
    assert ids_of(llm.generate(PROMPTS[2:], greedy(9))) == expected[2:]
    assert llm.score("a", "b")[0].error is None
    tokens: dict[int, list[int]] = {first.index: list(first.token_ids)}
    for delta in stream:
        tokens.setdefault(delta.index, []).extend(delta.token_ids)
    assert [tokens[0], tokens[1]] == expected[:2]
    rest = dict([(index, out), *many])
    assert ids_of([rest[i] for i in range(4)]) == expected


def test_generate_iter_reads_its_requests_lazily(llm: LLM) -> None:
    """K02 in small: at most max_inflight requests are open; bad ones come back as records."""
    pulled = 0

    def requests() -> Iterator[tuple[str, SamplingParams]]:
        nonlocal pulled
        for i in range(40):
            pulled += 1
            yield "" if i == 5 else f"request {i}", greedy(1 + i % 3)

    seen = {}
    for index, out in llm.generate_iter(requests(), max_inflight=6):
        seen[index] = out
        assert pulled - len(seen) <= 6 and llm.engine.num_unfinished <= 6
    assert sorted(seen) == list(range(40)) and "empty prompt" in seen[5].error
    assert all(seen[i].prompt == f"request {i}" for i in seen if i != 5)
    with pytest.raises(ValueError, match="max_inflight=0"):
        llm.generate_iter([], max_inflight=0)


def test_closed_generate_iter_aborts_what_runs(llm: LLM) -> None:
    many = llm.generate_iter((("x", greedy(40)) for _ in range(100)), max_inflight=8)
    next(many)
    many.close()
    assert llm.engine.num_unfinished == 0


def test_abort_ends_the_call_with_partial_outputs(llm: LLM) -> None:
    seen = []
    for delta in llm.stream(PROMPTS, greedy(60)):
        seen.append(delta)
        if len(seen) == 12:
            llm.abort()
    finals = [d.output for d in seen if d.output is not None]
    assert len(finals) == 4 and {out.outputs[0].finish_reason for out in finals} == {"abort"}
    assert all(0 < len(out.outputs[0].token_ids) < 60 for out in finals)


# -- score

def test_score_equals_prompt_logprobs_and_reads_the_cache(llm: LLM) -> None:
    prompt, completions = "the same long prompt: ", ["yes", "no", "it depends"]
    scores = llm.score(prompt, completions)
    again = llm.score([prompt] * 3, [list(c.encode()) for c in completions])
    for completion, score, second in zip(completions, scores, again):
        whole = llm.generate(prompt + completion, greedy(0, prompt_logprobs=0))[0]
        expected = [entry[t].logprob for entry, t in zip(whole.prompt_logprobs, whole.prompt_token_ids) if entry]
        np.testing.assert_allclose(score.logprobs, expected[-len(completion):], atol=1e-4)
        np.testing.assert_allclose(second.logprobs, score.logprobs, atol=1e-4)
        assert score.logprob == pytest.approx(sum(score.logprobs)) and score.token_ids == list(completion.encode())
        assert 16 <= second.num_cached_tokens < len(prompt)
        assert not score.is_greedy
    best = llm.generate(prompt, greedy(4))[0].outputs[0].token_ids
    assert llm.score(prompt, [best])[0].is_greedy


def test_score_records_bad_items_in_their_place(llm: LLM) -> None:
    results = llm.score("prompt", ["ok", "", "x" * 300])
    assert results[0].error is None
    assert "nothing to score" in results[1].error and "prompt of 306 tokens" in results[2].error
    with pytest.raises(ValueError, match="2 prompts and 3 completions"):
        llm.score(["a", "b"], ["1", "2", "3"])


# -- interrupts and failures

def interrupt_at(llm: LLM, monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """The engine's `step`-th step from now raises inside."""
    real, calls = llm.engine._take_in, []

    def take_in(*args: object) -> object:
        calls.append(1)
        if len(calls) == step:
            raise error
        return real(*args)

    monkeypatch.setattr(llm.engine, "_take_in", take_in)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("INTERNAL: lost device")])
def test_interrupted_call_leaves_partial_results_and_a_clean_engine(error: BaseException, llm: LLM,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """A08, F04: six requests, stopped in the fourth step; the next call returns only its own result."""
    prompts = [*PROMPTS, "", ""]
    expected = ids_of(llm.generate(prompts[:4], greedy(50)))
    with monkeypatch.context() as patch:
        interrupt_at(llm, patch, 4, error)
        with pytest.raises((KeyboardInterrupt, EngineError)) as caught:
            llm.generate(prompts, [greedy(1), *[greedy(50)] * 5])
    partial = caught.value.partial_results
    assert [out.prompt for out in partial] == prompts
    assert partial[0].outputs[0].finish_reason == "length" and partial[0].outputs[0].token_ids == expected[0][:1]
    assert "empty prompt" in partial[4].error and "empty prompt" in partial[5].error
    for out, tokens in zip(partial[1:4], expected[1:4]):
        assert out.finished and out.outputs[0].finish_reason == "abort"
        assert out.outputs[0].token_ids == tokens[:len(out.outputs[0].token_ids)]
    assert any(out.outputs[0].token_ids for out in partial[1:4])
    assert llm.engine.num_unfinished == 0 and not llm._sinks
    after = llm.generate("x", greedy(3))
    assert len(after) == 1 and after[0].prompt == "x" and len(after[0].outputs[0].token_ids) == 3


def test_interrupt_outside_a_step_leaves_partial_results_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        def update(*_: object) -> None:
            raise KeyboardInterrupt
        patch.setattr(llm_module.ProgressBar, "update", update)
        with pytest.raises(KeyboardInterrupt) as caught:
            llm.generate(PROMPTS[:3], [greedy(30), greedy(4), greedy(30)])
    partial = caught.value.partial_results
    assert [out.prompt for out in partial] == PROMPTS[:3]
    assert [out.outputs[0].finish_reason for out in partial] == ["abort", "length", "abort"]
    assert llm.engine.num_unfinished == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("INTERNAL: lost device")])
def test_interrupted_call_ends_the_other_open_calls(error: BaseException, llm: LLM, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    """A half-consumed stream whose requests another call's interrupt dropped ends; it must not wait for ever."""
    stream = llm.stream(PROMPTS[:2], greedy(40))
    next(stream)
    many = llm.generate_iter(iter([(p, greedy(1 if i == 0 else 40)) for i, p in enumerate(PROMPTS)]), max_inflight=4)
    next(many)
    with monkeypatch.context() as patch:
        interrupt_at(llm, patch, 3, error)
        with pytest.raises((KeyboardInterrupt, EngineError)) as caught:
            llm.generate("x", greedy(40))
    assert [out.prompt for out in caught.value.partial_results] == ["x"]
    finals = [delta.output for delta in stream if delta.output is not None]
    assert [out.outputs[0].finish_reason for out in finals] == ["abort"] * 2
    assert {out.outputs[0].finish_reason for _, out in many} == {"abort"}


def test_score_that_was_cut_off_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real = llm.engine.step

    def step() -> list[RequestOutput]:
        llm.abort()
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    assert llm.score("prompt", "completion")[0].error == "aborted before it was scored"


# -- notebook, threads, devices

def test_generate_inside_a_running_event_loop(llm: LLM) -> None:
    """B01: without patching the user's loop."""
    expected = ids_of(llm.generate(PROMPTS, greedy()))

    async def cell() -> list[list[int]]:
        await asyncio.sleep(0)
        return ids_of(llm.generate(PROMPTS, greedy()))

    assert asyncio.run(cell()) == expected


def test_generate_in_a_worker_thread(llm: LLM) -> None:
    """B01"""
    expected = ids_of(llm.generate(PROMPTS, greedy()))
    found: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: found.append(ids_of(llm.generate(PROMPTS, greedy()))))
    thread.start()
    thread.join(60)
    assert found == [expected] and threading.active_count() >= 1


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_close_returns_the_memory_at_once(folder: Path, compiled: Path) -> None:
    """B03: also while a traceback holds frames; a second LLM fits; use after close is a clear error."""
    before = live_bytes()
    with LLM(folder, compile_cache_dir=compiled, **SIZES) as llm:
        expected = ids_of(llm.generate("x", greedy(3)))
        stream = llm.stream("y", greedy(30))
        next(stream)
        assert live_bytes() > before + 2**16
    assert live_bytes() <= before + 2**12
    llm.close()
    calls = [lambda: llm.generate("x"), lambda: llm.chat([{"role": "user", "content": "x"}]),
             lambda: llm.score("x", "y"),
             lambda: next(llm.stream("x")), lambda: next(llm.generate_iter([("x", None)])), lambda: next(stream),
             llm.stats, llm.abort, lambda: llm.abort("x"), llm.cache.clear, llm.warmup]
    for call in calls:
        with pytest.raises(EngineError, match="this LLM is closed; make a new one"):
            call()
    held = None
    try:
        with LLM(folder, compile_cache_dir=compiled, **SIZES) as second:
            assert ids_of(second.generate("x", greedy(3))) == expected
            raise RuntimeError("in the user's own code")
    except RuntimeError as error:
        held = error
    assert held.__traceback__ is not None and live_bytes() <= before + 2**12


@pytest.mark.parametrize("device, install", [("gpu", r'pip install "jax\[cuda13\]"'),
                                             ("tpu", r'pip install "jax\[tpu\]"')])
def test_missing_device_is_an_error_with_the_install_line(device: str, install: str, folder: Path) -> None:
    """B05: never a silent run on the CPU."""
    with pytest.raises(DeviceError, match=f"device='{device}'.*only cpu.*{install}"):
        LLM(folder, device=device, **SIZES)


def test_start_says_where_it_runs_and_the_models_defaults(folder: Path, compiled: Path,
                                                          capsys: pytest.CaptureFixture) -> None:
    """B04, B05, P09: device, memory plan from what is free; quiet says nothing; no progress bar without a terminal."""
    with LLM(folder, compile_cache_dir=compiled, **{**SIZES, "quiet": False}) as llm:
        assert llm.stats()["device"].startswith("cpu:0")
        llm.generate(PROMPTS, greedy(2))
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and len(lines) == 2
    assert "toy on cpu: weights" in lines[0] and "KV pool" in lines[0] and "free" in lines[0]
    assert "sampling defaults" in lines[1] and "temperature=0.0" in lines[1]
    with LLM(folder, compile_cache_dir=compiled, **SIZES) as llm:
        llm.generate("x", greedy(1), progress=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("quiet, setting, asked, is_shown", [
    (False, None, None, None), (False, None, True, True), (False, True, None, True), (False, True, False, False),
    (True, True, True, False)])
def test_progress_setting_reaches_the_bar(quiet: bool, setting: bool | None, asked: bool | None, is_shown: bool | None,
                                          llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """None lets the bar look for a terminal; what the call says goes first, quiet before all."""
    shown = []

    class Bar(llm_module.ProgressBar):
        def __init__(self, what: str, total: int = 0, *, is_shown: bool | None = None):
            shown.append((what, total, is_shown))
            super().__init__(what, total, is_shown=False)

    monkeypatch.setattr(llm_module, "ProgressBar", Bar)
    monkeypatch.setattr(llm, "_quiet", quiet)
    monkeypatch.setattr(llm, "_progress", setting)
    llm.generate(PROMPTS, greedy(1), progress=asked)
    assert shown == [("generating", 4, is_shown)]


def test_import_touches_no_device() -> None:
    """B04: with a platform that does not exist the import succeeds, and jax is not even loaded."""
    code = "import jradix, sys; jradix.SamplingParams(); print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "nonexistent"},
                            cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "False"), result.stderr


@pytest.mark.parametrize("fields, message", [
    (dict(warmup="some"), "warmup='some'"), (dict(dtype="int8"), "dtype='int8'"),
    (dict(kv_cache_bytes=100), "kv_cache_bytes=100"), (dict(memory_fraction=1.5), "memory_fraction=1.5")])
def test_bad_option_is_refused_by_name(fields: dict, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(folder, compile_cache_dir=None, **{**SIZES, **fields})


def test_max_model_len_fits_the_pool_by_default(folder: Path, compiled: Path) -> None:
    page = 2 * 4 * 16 * 4
    with LLM(folder, compile_cache_dir=compiled, **{**SIZES, "kv_cache_bytes": 11 * page}) as llm:
        assert llm.config.num_pages == 10 and llm.config.max_model_len == 40


# -- conversion and compilation

def test_converted_model_gives_the_same_tokens(llm: LLM, folder: Path, compiled: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "converted", dtype="float32")
    expected = llm.generate(PROMPTS, greedy(8))
    with LLM(tmp_path / "converted", compile_cache_dir=compiled, **SIZES) as other:
        outputs = other.generate(PROMPTS, greedy(8))
        assert other.engine._eos_ids == llm.engine._eos_ids == {257, 258}
        messages = [{"role": "user", "content": "x"}]
        assert other.render_chat(messages) == llm.render_chat(messages)
    assert ids_of(outputs) == ids_of(expected) and [o.outputs[0].text for o in outputs] == [
        o.outputs[0].text for o in expected]


def test_full_warmup_compiles_before_the_first_request(folder: Path, compiled: Path, caplog: pytest.LogCaptureFixture
                                                       ) -> None:
    """F01, F03: "none" compiles nothing up front, "full" everything."""
    with LLM(folder, compile_cache_dir=compiled, warmup="full", **SIZES) as llm:
        num_programs = llm.stats()["compiled_programs"]
        assert num_programs == llm._runner.shapes.num_programs - 1
        llm.generate(PROMPTS, [greedy(3), greedy(3, logprobs=1), SamplingParams(max_tokens=3, seed=1), greedy(2)])
        assert llm.stats()["compiled_programs"] == num_programs and not caplog.records
    with LLM(folder, compile_cache_dir=compiled, **SIZES) as llm:
        assert llm.stats()["compiled_programs"] == 0


START = """
import sys, time, jax
from jradix import LLM, SamplingParams
longest = [0.0]
def note(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        longest[0] = max(longest[0], seconds)
jax.monitoring.register_event_duration_secs_listener(note)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
llm = LLM(sys.argv[1], compile_cache_dir=sys.argv[2], dtype="float32", max_num_seqs=4, prefill_chunk_tokens=32,
          kv_cache_bytes=2**17, quiet=True, warmup="full")
print(longest[0], llm.generate("x", SamplingParams(temperature=0.0, max_tokens=4))[0].outputs[0].token_ids)
"""


@pytest.mark.slow
def test_second_start_compiles_nothing_for_longer_than_a_second(folder: Path, tmp_path: Path) -> None:
    """F03"""
    def start() -> tuple[float, str]:
        result = subprocess.run([sys.executable, "-c", START, str(folder), str(tmp_path)], check=True, text=True,
                                stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent, timeout=300)
        longest, tokens = result.stdout.split(" ", 1)
        return float(longest), tokens

    first, second = start(), start()
    assert second[0] <= 1.0 and second[0] < first[0] / 2 and first[1] == second[1]


def test_compile_cache_folder_is_filled(shared: LLM, compiled: Path) -> None:
    shared.generate("x", greedy(1))
    deadline = time.monotonic() + 10
    while not any(compiled.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert any(compiled.iterdir())


def test_score_requests_run_in_the_order_in_which_they_share_most(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ["first head " * 3, "second head " * 3] * 3
    tails = [f"{i}!" for i in range(6)]
    add, asked = llm.engine.add_request, []

    def note(tokens: list[int], *args: object, **kwargs: object) -> str:
        asked.append(bytes(tokens).decode())
        return add(tokens, *args, **kwargs)

    monkeypatch.setattr(llm.engine, "add_request", note)
    scores = llm.score(heads, tails)
    assert sorted(asked[:3]) == sorted(h + t for h, t in zip(heads[:6:2], tails[:6:2])) or (
        sorted(asked[:3]) == sorted(h + t for h, t in zip(heads[1:6:2], tails[1:6:2])))
    alone = [llm.score(head, tail)[0].logprob for head, tail in zip(heads, tails)]
    assert [score.logprob for score in scores] == pytest.approx(alone, abs=1e-4)
