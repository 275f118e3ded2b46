"""The engine's contract: what it accepts and refuses, how outputs end, abort, samples, weights, statistics."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jradix.engine import Engine
from jradix.errors import EngineError, RequestError
from jradix.outputs import RequestOutput
from jradix.sampling_params import SamplingParams
from jradix.tokenizer import Tokenizer
from toy_engine import (ToyLM, assert_idle, drain, greedy, make_engine, new_runner, random_prompts, rigged_engine,
                        run_all, steps, toy_decoder, toy_lm, toy_runner)
from toy_tokenizers import make_byte_tokenizer

PROMPT = [5, 6, 7]


def lm(seed: int = 0) -> ToyLM:
    return toy_lm(seed=seed, num_hidden_layers=1)


def toy(**options: object) -> Engine:
    return make_engine(toy_runner(lm()), **options)


def one(engine: Engine, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> RequestOutput:
    return run_all(engine, [prompt], params)[0]


# -- what is accepted

@pytest.mark.parametrize("prompt, message", [
    ([], "empty prompt"), ([[5, 6]], "flat list"), ([1.5], "integers"), (["a"], "integers"), ([True], "integers"),
    ([5, [6]], "flat list"), (5, "flat list"), (None, "flat list"), ([2**40], "outside the vocabulary of 64"),
    ([64], "token id 64 is outside the vocabulary of 64"), ([3, -1], "token id -1 is outside"),
    ([5] * 128, "prompt of 128 tokens, but max_model_len=128 leaves room for 127")])
def test_bad_prompt_is_refused_and_harms_nobody(prompt: object, message: str) -> None:
    """A01, A02: the error names what was given; requests before and after it are served."""
    engine = toy()
    first = engine.add_request(PROMPT, greedy(4))
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, greedy(4))
    with pytest.raises(RequestError, match=message):
        engine.check_request(prompt, greedy(4))
    second = engine.add_request(PROMPT, greedy(4))
    outputs = drain(engine)
    assert outputs.keys() == {first, second}
    lm().assert_greedy(PROMPT, outputs[first].outputs[0].token_ids, 4)


@pytest.mark.parametrize("fields, message", [
    (dict(stop_token_ids=[64]), "token id 64"), (dict(logit_bias={99: 1.0}), "token id 99"),
    (dict(stop=["x"]), "stop strings need a tokenizer"),
    (dict(min_tokens=2, stop_token_ids=list(range(33))), "33 stop token ids: at most 32")])
def test_bad_parameter_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        toy().add_request(PROMPT, greedy(4, **fields))


def test_request_ids_are_unique_and_outputs_go_to_their_requests() -> None:
    """A05: an id in use is refused without harm; ids made by the engine never repeat, nor meet the user's."""
    engine = rigged_engine({f: [f + 10, f + 20] for f in range(8)})
    mine = engine.add_request([5, 0, 0], greedy(2), request_id="request-7")
    with pytest.raises(RequestError, match="request-7.* is in use"):
        engine.add_request([6, 0, 0], greedy(2), request_id="request-7")
    prompts = [[i % 8, i % 64, i // 64] for i in range(1000)]
    names = [engine.add_request(p, greedy(2)) for p in prompts]
    assert len({mine, *names}) == 1001
    outputs = drain(engine)
    assert outputs[mine].outputs[0].token_ids == [15, 25]
    assert [outputs[n].outputs[0].token_ids for n in names] == [[p[0] + 10, p[0] + 20] for p in prompts]


def test_request_id_is_free_again_once_the_aborted_output_was_returned() -> None:
    """A05: not before: its late results could be taken for the new request's."""
    engine = rigged_engine({5: [1, 2, 3], 6: [4, 4, 4]})
    engine.add_request([5, 6, 7], greedy(3), request_id="x")
    engine.step()
    engine.abort("x")
    with pytest.raises(RequestError, match="in use"):
        engine.add_request([6, 6, 7], greedy(3), request_id="x")
    assert [o.request_id for o in engine.step()] == ["x"]
    engine.add_request([6, 6, 7], greedy(3), request_id="x")
    assert drain(engine)["x"].outputs[0].token_ids == [4, 4, 4]


def test_prompt_that_can_never_fit_is_refused_and_the_queue_moves_on() -> None:
    """S01: a pool of 32 tokens, a prompt of 40: the error has both numbers; three short ones finish soon."""
    engine = toy(num_pages=8, max_model_len=64)
    with pytest.raises(RequestError, match=r"needs room for 41 tokens, but the KV pool holds 32 \(8 pages of 4\)"):
        engine.add_request(list(range(3, 43)), greedy(4))
    for prompt in random_prompts(3, shortest=4, longest=4):
        engine.add_request(prompt, greedy(4))
    finished = [out for batch in list(steps(engine))[:50] for out in batch]
    assert len(finished) == 3
    assert engine.longest_prompt() == 31


# -- how outputs end

@pytest.mark.parametrize("overlap", [True, False])
def test_request_that_outgrows_the_pool_ends_with_kv_capacity(overlap: bool) -> None:
    """S03: 12 slots, prompt of 4, 50 tokens wanted: 8 or 9 come, and the next request works."""
    engine = toy(num_pages=3, overlap=overlap)
    out = one(engine, greedy(50), [5, 6, 7, 8]).outputs[0]
    assert len(out.token_ids) in (8, 9) and (out.finish_reason, out.stop_reason) == ("length", "kv_capacity")
    lm().assert_greedy([5, 6, 7, 8], out.token_ids)
    again = one(engine, greedy(3), [9, 6, 7, 8]).outputs[0]
    lm().assert_greedy([9, 6, 7, 8], again.token_ids, 3)
    assert (again.finish_reason, again.stop_reason) == ("length", None)


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_output_ends_at_max_model_len_and_says_so(max_tokens: int | None) -> None:
    out = one(toy(max_model_len=20), greedy(max_tokens)).outputs[0]
    assert (len(out.token_ids), out.finish_reason, out.stop_reason) == (17, "length", "max_model_len")


@pytest.mark.parametrize("max_tokens, num_prompt_logprobs", [(0, None), (0, 2)])
def test_no_output_wanted_samples_nothing(max_tokens: int, num_prompt_logprobs: int | None) -> None:
    """A04: an empty completion, prompt log-probabilities where asked for; a prompt may fill max_model_len."""
    engine = toy(max_model_len=20)
    prompt = random_prompts(1, shortest=20, longest=20)[0]
    out = one(engine, greedy(max_tokens, prompt_logprobs=num_prompt_logprobs), prompt)
    assert (out.outputs[0].token_ids, out.outputs[0].finish_reason) == ([], "length")
    assert engine.stats()["tokens"]["generated"] == 0
    assert (out.prompt_logprobs is None) == (num_prompt_logprobs is None)
    if num_prompt_logprobs:
        assert len(out.prompt_logprobs) == 20 and all(2 <= len(e) <= 3 for e in out.prompt_logprobs[1:])


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("fields, expected", [
    ({}, ([11, 6], "stop", None)),                                       # an end token of the model
    (dict(ignore_eos=True), ([11, 6, 12, 7, 13, 5, 0, 0], "length", None)),
    (dict(stop_token_ids=[11]), ([11], "stop", 11)),
    (dict(stop_token_ids=[12], ignore_eos=True), ([11, 6, 12], "stop", 12)),
    (dict(min_tokens=3), ([11, 0, 12, 7], "stop", None)),                # 6 is held back, 0 is next best
    (dict(min_tokens=8), ([11, 0, 12, 0, 13, 0, 0, 0], "length", None))])
def test_stop_ids_end_the_output(fields: dict, expected: tuple, decode_steps: int) -> None:
    """T11: the model's end tokens are 5, 6 and 7, any of them ends; ignore_eos turns off all three."""
    engine = rigged_engine({5: [11, 6, 12, 7, 13, 5]}, eos_ids=(5, 6, 7), decode_steps=decode_steps)
    out = one(engine, greedy(8, **fields)).outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == expected


@pytest.mark.parametrize("eos", [5, 6, 7])
def test_each_end_token_of_the_model_ends_the_output(eos: int) -> None:
    out = one(rigged_engine({5: [11, 12, eos, 13]}, eos_ids=(5, 6, 7)), greedy(8)).outputs[0]
    assert (out.token_ids, out.finish_reason) == ([11, 12, eos], "stop")


@pytest.mark.parametrize("eos_first", [False, True])
def test_requests_that_end_in_their_prefill_step_leak_nothing(eos_first: bool) -> None:
    """S11: fifty one-token outputs beside running decodes, by length or because the first token ends them."""
    engine = rigged_engine({5: [9] * 50, 6: [2 if eos_first else 9]}, eos_ids=(2,), max_num_seqs=4)
    long = [engine.add_request([5, 1, i], greedy(50)) for i in range(2)]
    names = [engine.add_request([6, i % 60, i // 60], greedy(8 if eos_first else 1)) for i in range(50)]
    outputs = drain(engine)
    assert {outputs[n].outputs[0].finish_reason for n in names} == {"stop" if eos_first else "length"}
    assert all(len(outputs[n].outputs[0].token_ids) == 1 for n in names)
    assert all(outputs[n].outputs[0].token_ids == [9] * 50 for n in long)


# -- text

@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """0 'AB', 1 'CD', 2 'EF', 3 'GH', then 4 to 9 the bytes of a character in parts, 10 a special token."""
    return make_byte_tokenizer([b"AB", b"CD", b"EF", b"GH", b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd", b"a", b"b", b"c"],
                               special=["<|e|>"])


@pytest.mark.parametrize("overlap, decode_steps", [(True, 1), (False, 1), (True, 4)])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_several_tokens_ends_the_output(include: bool, overlap: bool, decode_steps: int,
                                                         letters: Tokenizer) -> None:
    """T03: tokens AB CD EF GH and stop "DEFG": the stream never shows a part of it."""
    engine = rigged_engine({5: [0, 1, 2, 3, 7, 7]}, tokenizer=letters, overlap=overlap, decode_steps=decode_steps)
    params = greedy(6, stop=["never", "DEFG"], include_stop_str_in_output=include)
    name = engine.add_request(PROMPT, params, is_streamed=True)
    texts = []
    for batch in steps(engine):
        texts += [out.outputs[0].text for out in batch]
    final = "ABCDEFG" if include else "ABC"
    assert texts[-1] == final and set(texts) <= {"", "AB", "ABC", final}
    plain = one(engine, params)
    assert plain.request_id != name
    out = plain.outputs[0]
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == (final, [0, 1, 2, 3], "stop", "DEFG")


def test_stop_string_spelled_by_a_special_token_ends_the_output(letters: Tokenizer) -> None:
    """T11: although the text leaves special tokens out."""
    out = one(rigged_engine({5: [0, 10, 1]}, tokenizer=letters), greedy(6, stop="<|e|>")).outputs[0]
    assert (out.text, out.stop_reason, out.token_ids) == ("AB", "<|e|>", [0, 10])


def test_stop_string_before_min_tokens_is_passed_over(letters: Tokenizer) -> None:
    out = one(rigged_engine({5: [0, 1, 0, 1]}, tokenizer=letters), greedy(6, stop="B", min_tokens=3)).outputs[0]
    assert (out.text, out.token_ids) == ("ABCDA", [0, 1, 0])


def test_streamed_text_has_whole_characters_only(letters: Tokenizer) -> None:
    """T01 through the engine: one token ends a character and begins the next."""
    engine = rigged_engine({5: [4, 5, 6, 7]}, tokenizer=letters)
    engine.add_request(PROMPT, greedy(4), is_streamed=True)
    texts = [out.outputs[0].text for batch in steps(engine) for out in batch]
    assert texts[-1] == "你好a" and not any("\ufffd" in text for text in texts)
    assert all(texts[-1].startswith(text) for text in texts)


def test_streamed_outputs_grow_by_every_token() -> None:
    engine = rigged_engine({5: [1, 2, 3], 6: [4, 5, 6]})
    engine.add_request(PROMPT, greedy(3), is_streamed=True)
    quiet = engine.add_request([6, 6, 6], greedy(3))
    seen, quiet_outputs = [], []
    for batch in steps(engine):
        for out in batch:
            (quiet_outputs if out.request_id == quiet else seen).append((list(out.outputs[0].token_ids), out.finished))
    assert seen == [([1], False), ([1, 2], False), ([1, 2, 3], True)]
    assert quiet_outputs == [([4, 5, 6], True)]


# -- abort

@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("overlap", [True, False])
def test_abort_between_chunks_gives_everything_back_at_once(num_steps: int, overlap: bool) -> None:
    """S05: a prompt of 20 in chunks of 4 with prompt log-probabilities; before, between and after them."""
    engine = toy(num_pages=20, prefill_chunk_tokens=4, overlap=overlap)
    name = engine.add_request(random_prompts(1, shortest=20, longest=20)[0], greedy(8, prompt_logprobs=1))
    for _ in range(num_steps):
        assert engine.step() == []
    engine.abort(name)
    engine.abort(name)
    engine.check_invariants()
    pool = engine.stats()["pool"]
    assert pool["in_use"] == 0 and pool["free"] + pool["cached"] == 20
    outputs = [out for batch in steps(engine) for out in batch]
    assert [out.request_id for out in outputs] == [name]
    assert outputs[0].finished and outputs[0].outputs[0].finish_reason == "abort"
    assert not engine._owner and not engine._groups
    while engine._in_flight:
        assert engine.step() == []
    assert_idle(engine)


def test_abort_while_its_step_is_in_flight_drops_the_late_result() -> None:
    """S07: five requests, one aborted after its step was dispatched: no late token, nothing cached, others unharmed."""
    engine = toy(enable_prefix_caching=True)
    prompts = random_prompts(5, seed=7, shortest=4, longest=7)
    names = [engine.add_request(p, greedy(10)) for p in prompts]
    outputs = {}
    for number, batch in enumerate(steps(engine, poison=np.nan)):
        outputs.update((out.request_id, out) for out in batch)
        if number == 3:
            victim = next(r for r in engine.scheduler.requests() if r.known_tokens[:4].tolist() == prompts[2][:4])
            assert engine._in_flight is not None and victim.num_in_flight == 1
            num_tokens = victim.num_output
            engine.abort(names[2])
            engine.check_invariants()
            assert engine.cache.tree.match(victim.known_tokens, victim.namespace).num_tokens <= len(prompts[2]) // 4 * 4
    assert outputs[names[2]].outputs[0].finish_reason == "abort"
    assert len(outputs[names[2]].outputs[0].token_ids) == num_tokens
    for i in (0, 1, 3, 4):
        lm().assert_greedy(prompts[i], outputs[names[i]].outputs[0].token_ids, 10)


def test_abort_of_an_unknown_or_finished_request_does_nothing() -> None:
    engine = rigged_engine({5: [1]})
    engine.abort("nobody")
    name = engine.add_request(PROMPT, greedy(1))
    drain(engine)
    engine.abort(name)
    assert engine.step() == [] and engine.take_aborted() == []


def test_abort_of_one_sample_set_ends_all_its_samples() -> None:
    engine = toy()
    name = engine.add_request(PROMPT, SamplingParams(n=3, max_tokens=20, seed=1))
    for _ in range(4):
        engine.step()
    engine.abort(name)
    (out,) = engine.take_aborted()
    assert [c.finish_reason for c in out.outputs] == ["abort"] * 3 and [c.index for c in out.outputs] == [0, 1, 2]
    assert_idle(engine)


def test_drop_all_returns_the_partial_outputs() -> None:
    engine = rigged_engine({5: [1, 2, 3, 4, 5, 6], 6: [7] * 9})
    names = [engine.add_request([f, 6, 7], greedy(6)) for f in (5, 6)]
    for _ in range(4):
        engine.step()
    outputs = engine.drop_all()
    assert [out.request_id for out in outputs] == names
    assert outputs[0].outputs[0].token_ids == [1, 2, 3] and outputs[1].outputs[0].token_ids == [7, 7, 7]
    assert_idle(engine)


# -- prefixes, samples, weights

def test_prompts_with_a_common_prefix_compute_it_once() -> None:
    """S09: eight prompts of 64 common and 4 own tokens, submitted together on a cold cache."""
    common = random_prompts(1, seed=1, shortest=64, longest=64)[0]
    prompts = [[*common, *own] for own in random_prompts(8, seed=2, shortest=4, longest=4)]
    engine = toy()
    outputs = run_all(engine, prompts, greedy(3), poison=np.nan)
    assert engine.stats()["tokens"]["computed_prompt"] <= 64 + 8 * 4 + 8 * 4
    for prompt, out in zip(prompts, outputs):
        lm().assert_greedy(prompt, out.outputs[0].token_ids, 3)


def test_prompts_computed_in_one_step_share_nothing_when_told_so() -> None:
    """S09: the switch is off: three prompts of 16 common and 4 own tokens fit into one step and are all computed."""
    common = random_prompts(1, seed=1, shortest=16, longest=16)[0]
    prompts = [[*common, *own] for own in random_prompts(3, seed=2, shortest=4, longest=4)]
    for share, most in ((True, 16 + 3 * 4 + 3 * 4), (False, 60)):
        engine = toy(share_in_batch=share)
        run_all(engine, prompts, greedy(1))
        assert engine.stats()["tokens"]["computed_prompt"] <= most
    assert engine.stats()["tokens"]["computed_prompt"] == 60


def test_new_weights_use_nothing_cached_under_the_old() -> None:
    """R14: after the update nothing is cached, the output is the new model's, old pages can be had again."""
    engine = toy()
    prompt = random_prompts(1, shortest=20, longest=20)[0]
    one(engine, greedy(5), prompt)
    engine.update_weights(toy_decoder(lm(1).config, lm(1).weights))
    try:
        assert engine.stats()["pool"]["free"] == engine.stats()["pool"]["num_pages"]
        out = one(engine, greedy(5), prompt)
        assert out.num_cached_tokens == 0
        lm(1).assert_greedy(prompt, out.outputs[0].token_ids, 5)
        assert one(engine, greedy(5), prompt).num_cached_tokens >= 16
        engine.add_request(prompt, greedy(5))
        with pytest.raises(EngineError, match="1 requests are running with the old weights; wait for them or abort"):
            engine.update_weights(toy_decoder(lm().config, lm().weights))
        assert lm(1).assert_greedy(prompt, [*drain(engine).values()][0].outputs[0].token_ids, 5) is None
    finally:
        engine.update_weights(toy_decoder(lm().config, lm().weights))


def test_new_weights_may_come_right_after_an_abort() -> None:
    engine = toy()
    name = engine.add_request(PROMPT, greedy(5))
    engine.step()
    engine.abort(name)
    engine.update_weights(toy_decoder(lm().config, lm().weights))
    assert [out.request_id for out in engine.step()] == [name]
    lm().assert_greedy(PROMPT, one(engine, greedy(5)).outputs[0].token_ids, 5)


@pytest.mark.parametrize("params", [
    greedy(4), SamplingParams(max_tokens=4, temperature=1.0, seed=3), greedy(4, logprobs=20),
    greedy(4, repetition_penalty=1.5), greedy(0, prompt_logprobs=20)])
def test_ids_beyond_the_tokenizer_are_never_sampled_nor_listed(params: SamplingParams) -> None:
    """X01: 50 tokens, a head of 96; the model prefers ids 57 and 80 by 1e4."""
    table = np.random.default_rng(0).standard_normal((16, 64, 96)).astype(np.float32)
    table[:, :, 57], table[:, :, 80] = 1e4, 2e4
    engine = rigged_engine(table, vocab_size=96, num_valid_tokens=50)
    with pytest.raises(RequestError, match="token id 50 is outside the vocabulary of 50"):
        engine.add_request([50], params)
    out = one(engine, params)
    entries = [*(out.outputs[0].logprobs or ()), *(out.prompt_logprobs or ())]
    ids = {*out.outputs[0].token_ids, *(i for entry in entries if entry for i in entry)}
    assert ids and max(ids) < 50
    assert all(np.isfinite(e.logprob) for entry in entries if entry for e in entry.values())


# -- the engine as a whole

def test_stats_count_tokens_pages_and_requests() -> None:
    engine = toy()
    prompt = random_prompts(1, shortest=20, longest=20)[0]
    for _ in range(2):
        one(engine, greedy(6), prompt)
    stats = engine.stats()
    cached = stats["tokens"]["cached_prompt"]
    assert 16 <= cached <= 19
    assert stats["tokens"] == dict(computed=2 * 25 - cached, computed_prompt=40 - cached, cached_prompt=cached,
                                   recomputed=0, generated=12, forced=0, saved_kv_reads=0)
    assert stats["cache"]["hit_rate"] == pytest.approx(cached / 40) and stats["cache"]["lookups"] == 2
    assert stats["requests"] == dict(running=0, waiting=0, finished=2, preemptions=0, failures=0)
    assert stats["cache"]["granularity"] == 4 and stats["cache"]["enabled"] and stats["device"].startswith("cpu:0")
    assert stats["steps"] == 12 and stats["compiled_programs"] >= 2
    assert set(stats["host_time"]) == {"schedule_s", "build_s", "dispatch_s", "wait_s", "output_s", "num_rows"}
    assert engine.cache.clear() == stats["pool"]["cached"] > 0
    assert engine.stats()["pool"]["cached"] == 0


def test_metrics_of_a_request_are_in_order() -> None:
    out = one(toy(), greedy(4), random_prompts(1)[0])
    metrics = out.metrics
    assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.latency_s
    assert metrics.num_computed_tokens == len(out.prompt_token_ids) and metrics.num_preemptions == 0
    assert out.sampling_params.temperature == 0.0 and out.sampling_params.top_p == 1.0


def test_closed_engine_says_so() -> None:
    engine = make_engine(new_runner(lm(), num_pages=8))
    engine.add_request(PROMPT, greedy(4))
    engine.close()
    engine.close()
    assert not engine.has_unfinished
    for call in (engine.step, lambda: engine.add_request(PROMPT)):
        with pytest.raises(EngineError, match="the engine is closed; make a new one"):
            call()
