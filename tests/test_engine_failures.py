"""Interrupts and errors at every line of a step: nothing is lost or doubled, pages add up, the engine works on."""
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import jradix
import jradix.engine as engine_module
from jradix.engine import Engine
from jradix.errors import EngineError
from jradix.outputs import RequestOutput
from jradix.sampling_params import SamplingParams
from toy_engine import assert_idle, drain, greedy, rigged_engine, run_all, steps, tokens_of
from toy_tokenizers import make_byte_tokenizer

PACKAGE = str(Path(jradix.__file__).parent)
OUTPUTS = {f: [(f * 7 + i) % 50 + 1 for i in range(12)] for f in range(8)}
TOKENIZER = make_byte_tokenizer([bytes([i]) for i in range(64)])


class Interrupt(KeyboardInterrupt):
    """Told from a person's own Ctrl-C."""


class LineTrace:
    """Counts the lines of jradix that run inside its block, and raises `Interrupt` at number `at`.

    Attributes:
      count: lines run.
      place: "function:line" of the interrupt, None when it did not come.
    """

    def __init__(self, at: int | None = None):
        self.at, self.count, self.place = at, 0, None

    def __enter__(self) -> LineTrace:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                sys.settrace(None)
                raise Interrupt
        return self._trace


def submit(engine: Engine) -> list[str]:
    """Eight requests of several kinds, more than fit at once."""
    kinds = [greedy(3), greedy(12), greedy(7, stop="\x05"), greedy(5, presence_penalty=0.1), greedy(12, logprobs=1),
             greedy(4, logit_bias={63: 0.5}), greedy(0, prompt_logprobs=1), greedy(6, n=2)]
    return [engine.add_request([f, 1, 2, f, 4, 5], kind, is_streamed=f % 2 == 0) for f, kind in enumerate(kinds)]


def expect_tokens(engine: Engine) -> dict[str, list[list[int]]]:
    names = submit(engine)
    outputs = drain(engine)
    return {name: [c.token_ids for c in outputs[name].outputs] for name in names}


def new_engine(**sizes: object) -> Engine:
    return rigged_engine(OUTPUTS, prompt_len=6, tokenizer=TOKENIZER, num_pages=14, max_num_seqs=4, reserve_tokens=0,
                         prefill_chunk_tokens=16, **sizes)


def check_interrupt(line: int, expected: dict[str, list[list[int]]], **sizes: object) -> str | None:
    """Interrupts one run at a line; returns where, or None when the run was over before."""
    engine = new_engine(**sizes)
    names = submit(engine)
    returned: dict[str, RequestOutput] = {}
    with LineTrace(line) as trace:
        try:
            while engine.has_unfinished:
                for out in engine.step():
                    if out.finished:
                        assert out.request_id not in returned
                        returned[out.request_id] = out
        except Interrupt:
            pass
    place = trace.place
    if place is None:
        return None
    engine.check_invariants()
    dropped = {out.request_id: out for out in engine.dropped_outputs if out.finished}
    assert not returned.keys() & dropped.keys(), place
    later = drain(engine)      # empty, unless the interrupt came where nothing had to be dropped
    assert not later.keys() & {*returned, *dropped}, place
    found = {**returned, **dropped, **later}
    assert found.keys() == set(names) or "_take_ready" in place, (place, set(names) - found.keys())
    for name, out in found.items():
        for completion, tokens in zip(out.outputs, expected[name]):
            assert completion.token_ids == tokens[:len(completion.token_ids)], place
            if completion.finish_reason != "abort":
                assert completion.token_ids == tokens, place
    again = submit(engine)
    outputs = drain(engine)
    for name, other in zip(again, names):
        assert [c.token_ids for c in outputs[name].outputs] == expected[other], place
    return place


def count_lines(**sizes: object) -> int:
    engine = new_engine(**sizes)
    submit(engine)
    with LineTrace() as trace:
        while engine.has_unfinished:
            engine.step()
    return trace.count


def check_interrupts(num_places: int, **sizes: object) -> None:
    expected = expect_tokens(new_engine(**sizes))
    assert expected == expect_tokens(new_engine(**sizes))
    total = count_lines(**sizes)
    places = {check_interrupt(line, expected, **sizes) for line in range(1, total, max(total // num_places, 1))}
    functions = {place.split(":")[0] for place in places if place}
    assert len(functions) > 10 and {"Scheduler", "Engine"} <= {name.split(".")[0] for name in functions}


@pytest.mark.parametrize("sizes", [{}, dict(overlap=False), dict(decode_steps=3)])
def test_interrupt_at_any_line_of_a_step_loses_and_doubles_nothing(sizes: dict) -> None:
    """A08: about 40 places per configuration; afterwards the accounting holds and the next call is right."""
    check_interrupts(40, **sizes)


@pytest.mark.slow
def test_interrupt_at_a_thousand_lines_loses_and_doubles_nothing() -> None:
    check_interrupts(1000)


@pytest.mark.parametrize("error", [AssertionError("bookkeeping"), MemoryError("host"), ValueError("in a callback")])
@pytest.mark.parametrize("where", ["schedule", "update"])
def test_other_errors_in_a_step_are_raised_as_they_are_and_leave_a_working_engine(
        error: Exception, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    expected = expect_tokens(engine)
    names = submit(engine)
    for _ in range(3):
        engine.step()

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, where, fail)
        with pytest.raises(type(error), match=str(error)):
            drain(engine)
    assert not engine.has_unfinished and len(engine.dropped_outputs) == len(names)
    assert_idle(engine)
    again = submit(engine)
    outputs = drain(engine)
    assert [[c.token_ids for c in outputs[name].outputs] for name in again] == list(expected.values())


def test_interrupt_between_booking_and_dispatch_empties_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages booked as computed whose step never ran must not be served to anyone."""
    engine = new_engine()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine.add_request(prompt, greedy(4))

    def interrupt(*_: object, **__: object) -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "build_step_batch", interrupt)
        with pytest.raises(Interrupt):
            engine.step()
    assert_idle(engine)
    assert engine.stats()["pool"]["cached"] == 0
    assert run_all(engine, [prompt], greedy(2), poison=np.nan)[0].num_cached_tokens == 0


def test_interrupt_while_waiting_for_the_device_keeps_the_cache_and_what_was_ready(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual place of a Ctrl-C: results that had been fetched are kept, and so is the cache."""
    engine = rigged_engine(OUTPUTS, prompt_len=6)
    names = [engine.add_request([f, 1, 2, f, 4, 5], greedy(12)) for f in range(3)]
    for _ in range(5):
        engine.step()

    def interrupt(_: object) -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "_fetch", interrupt)
        with pytest.raises(Interrupt):
            engine.step()
    assert [out.request_id for out in engine.dropped_outputs] == names
    assert tokens_of(engine.dropped_outputs) == [OUTPUTS[f][:4] for f in range(3)]
    assert all(out.finished and out.outputs[0].finish_reason == "abort" and out.metrics.latency_s >= 0
               for out in engine.dropped_outputs)
    assert_idle(engine)
    outputs = run_all(engine, [[f, 1, 2, f, 4, 5] for f in range(3)], greedy(12), poison=np.nan)
    assert all(out.num_cached_tokens >= 4 for out in outputs)
    assert tokens_of(outputs) == [OUTPUTS[f] for f in range(3)]


def test_requests_that_can_never_run_raise_instead_of_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    engine.add_request([1, 2, 3], greedy(2))
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: None)
    with pytest.raises(EngineError, match="1 requests wait and none can run"):
        engine.step()


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_with_aborts_and_late_arrivals_keeps_the_accounting(seed: int) -> None:
    """Arrivals, aborts, samples, stop ids and a tight pool at random; the survivors' tokens are the prescribed ones."""
    random = np.random.default_rng(seed)
    engine = rigged_engine(
        OUTPUTS, prompt_len=6, num_pages=int(random.integers(8, 20)), max_num_seqs=5, reserve_tokens=0,
        prefill_chunk_tokens=int(random.integers(3, 30)), overlap=bool(seed % 2), decode_steps=1 + 2 * (seed // 2))
    live: dict[str, tuple[int, int]] = {}
    aborted: set[str] = set()
    finished: dict[str, RequestOutput] = {}
    for number in range(400):
        if number < 300 and random.random() < 0.4:
            first, length = int(random.integers(0, 8)), int(random.integers(0, 13))
            params = SamplingParams(temperature=0.0, max_tokens=length, n=1 + int(random.random() < 0.2),
                                    logprobs=2 if random.random() < 0.2 else None,
                                    prompt_logprobs=0 if random.random() < 0.2 else None)
            name = engine.add_request([first, *random.integers(0, 3, 2), 2, 3, 4], params,
                                      is_streamed=random.random() < 0.3)
            live[name] = first, length
        if live and random.random() < 0.1:
            name = str(random.choice(sorted(live)))
            engine.abort(name)
            aborted.add(name)
        for out in engine.step():
            if out.finished:
                assert out.request_id not in finished
                finished[out.request_id] = out
        engine.check_invariants()
        for name in finished.keys() & live.keys():
            first, length = live.pop(name)
            for completion in finished[name].outputs:
                tokens = OUTPUTS[first][:length]
                if name in aborted:
                    tokens = tokens[:len(completion.token_ids)]
                assert completion.token_ids == tokens
                assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
    for batch in steps(engine):
        pass
    assert_idle(engine)
    assert len(finished) > 60 and aborted
