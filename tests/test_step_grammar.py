"""Grammar masks and state steps inside the compiled programs, under the real scheduler.

The engine's own part, what it tells the device about a row's grammar, is played by `Constrained`: the state where the
host knows the row's tokens, and -1 where the row runs ahead of the host.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from scipy import stats

import jradix.engine as engine_module
import jradix.sched.plan as plan_module
from jradix.batch import GrammarTables, PackedBatch, StepLayout
from jradix.engine import Engine
from jradix.ops.grammar import REJECTED, pack_ids
from jradix.runner.runner import ModelRunner
from jradix.sampling_params import SamplingParams
from jradix.sched.plan import StepNeeds, StepPlan
from jradix.sched.request import Request
from toy_engine import (RIGGED_SHAPE, TIE, ToyLM, counted_compilations, drain, greedy, make_engine, new_runner,
                        random_prompts, rigged_engine, run_all, tokens_of, toy_lm)

VOCAB, EOS = 64, 2


class Grammar:
    """An automaton over token ids, with its places in the arena.

    Args:
      number: from 1.
      edges: of each state, token -> next state.
      accepting: states where the end token is allowed as well.
    """

    def __init__(self, number: int, edges: Sequence[Mapping[int, int]], accepting: set[int], *,
                 vocab_size: int = VOCAB):
        self.edges, self.accepting = edges, accepting
        num_states = len(edges)
        self.first_state, self.first_row = 2 + 100 * number, 2 + 100 * number
        following = np.full((num_states, vocab_size), REJECTED, np.uint16)
        for state, row in enumerate(edges):
            for token, target in row.items():
                following[state, token] = target
        self.tables = GrammarTables(
            number, self.first_state, 6000 * number, np.arange(num_states, dtype=np.int32) + self.first_row,
            pack_ids([np.array(sorted(self.allowed(s))) for s in range(num_states)], vocab_size),
            np.arange(num_states, dtype=np.int32) + self.first_row,
            np.array([s in accepting for s in range(num_states)]), following, np.arange(vocab_size, dtype=np.uint16))

    def allowed(self, state: int) -> set[int]:
        return set(self.edges[state]) | ({EOS} if state in self.accepting else set())

    def walk(self, tokens: Iterable[int]) -> int:
        """The state after these tokens, all allowed."""
        state = 0
        for token in tokens:
            state = self.edges[state][token]
        return state


CHOICE = Grammar(1, [{10: 1}, {11: 2, 12: 2}, {}], {2})
DIGITS = Grammar(2, [{t: 1 for t in range(20, 30)}, {t: 1 for t in range(20, 30)}], {1})
# Counts to 12 in a cycle of two alphabets, so that a state that lags by one is a violation at once.
LADDER = Grammar(3, [{t: s + 1 for t in (range(30, 40) if s % 2 else range(40, 50))} for s in range(12)] + [{}], {12})


class Constrained:
    """What the engine tells the device about constrained requests, by request object."""

    def __init__(self, engine: Engine, uploaded: Iterable[Grammar] = (CHOICE, DIGITS, LADDER), *,
                 by_mask: bool = False):
        self.engine, self.by_mask = engine, by_mask
        self.grammars: dict[int, Grammar] = {}      # request_id of the scheduler
        self.num_ahead = 0
        for grammar in uploaded:
            engine._runner.upload_grammar(grammar.tables)

    def add(self, prompt: Sequence[int], params: SamplingParams, grammar: Grammar | None) -> str:
        name = self.engine.add_request(prompt, params)
        if grammar is not None:
            for request in self.engine._groups[name].samples:
                self.grammars[request.request_id] = grammar
        return name

    def fill(self, plan: StepPlan, layout: StepLayout, packed: PackedBatch) -> PackedBatch:
        params = layout.row_params(packed.row_ints, packed.row_floats)
        if self.by_mask:
            packed = packed._replace(row_masks=layout.allocate(with_masks=True).row_masks)
        for i, row in enumerate(plan.rows):
            grammar = self.grammars.get(row.request.request_id)
            if grammar is None or not row.num_samples:
                continue
            if row.is_input_on_device:
                params.grammar_states[i] = -1
                self.num_ahead += 1
            elif not self.by_mask:
                params.grammar_states[i] = grammar.first_state + grammar.walk(row.request.output_ids)
            if self.by_mask:
                assert not row.is_input_on_device
                allowed = grammar.allowed(grammar.walk(row.request.output_ids))
                packed.row_masks[-1 - i] = pack_ids([np.array(sorted(allowed))], VOCAB)[0]
                params.mask_places[i] = len(packed.row_masks) - i
        return packed


@contextmanager
def constrained(engine: Engine, *uploaded: Grammar, **options: bool) -> Iterator[Constrained]:
    told = Constrained(engine, *[uploaded] * bool(uploaded), **options)
    build, takes_best = engine_module.build_step_batch, plan_module._takes_best

    def build_step_batch(plan: StepPlan, layout: StepLayout, *, spare_slot: int) -> tuple[PackedBatch, StepNeeds]:
        packed, needs = build(plan, layout, spare_slot=spare_slot)
        return (told.fill(plan, layout, packed), needs) if needs.sampling else (packed, needs)

    def takes_best_token(request: Request, output_position: int) -> bool:
        return request.request_id not in told.grammars and takes_best(request, output_position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "build_step_batch", build_step_batch)
        patch.setattr(plan_module, "_takes_best", takes_best_token)
        yield told


def lm() -> ToyLM:
    return toy_lm(num_hidden_layers=1)


@functools.cache
def runner() -> ModelRunner:
    """All programs compiled, those of several steps in a call included."""
    made = new_runner(lm(), max_num_seqs=4, decode_steps=3)
    made.warmup()
    return made


def toy_engine(*, decode_steps: int = 1, **sizes: Any) -> Engine:
    return make_engine(runner(), decode_steps=decode_steps, eos_ids=[EOS], **sizes)


def text_of(output: Sequence[int]) -> list[int]:
    """The output without the end token, whether it is listed or not."""
    return list(output[:-1] if output[-1] == EOS else output)


def assert_best_allowed(prompt: Sequence[int], output: Sequence[int], grammar: Grammar) -> None:
    """Each token is the best of those the grammar allows, by REF."""
    logits = lm().logits([*prompt, *output])[len(prompt) - 1:-1]
    for i, (row, token) in enumerate(zip(logits, output)):
        allowed = sorted(grammar.allowed(grammar.walk(output[:i])))
        assert token in allowed and row[token] >= row[allowed].max() - TIE, (i, output)


@pytest.mark.parametrize("decode_steps", [1, 3])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_mixed_batch_free_rows_as_alone_constrained_rows_in_their_language(temperature: float, overlap: bool,
                                                                           decode_steps: int) -> None:
    """X07: a choice, a free row, digits, a free row; the choice ends first, rows move up, a new grammar joins."""
    prompts = random_prompts(5, seed=3)
    grammars = [CHOICE, None, DIGITS, None, LADDER]
    params = [SamplingParams(temperature=temperature, max_tokens=16, seed=i) for i in range(5)]
    engine = toy_engine(overlap=overlap, decode_steps=decode_steps)
    alone = {i: tokens_of(run_all(engine, [prompts[i]], params[i]))[0] for i in (1, 3)}
    engine = toy_engine(overlap=overlap, decode_steps=decode_steps)
    with constrained(engine) as told:
        names = [told.add(*each) for each in zip(prompts, params, grammars)]
        outputs = drain(engine, poison=np.nan)
    for i, (name, grammar) in enumerate(zip(names, grammars)):
        done = outputs[name].outputs[0]
        if grammar is None:
            assert done.token_ids == alone[i]
            continue
        text = text_of(done.token_ids)
        assert grammar.walk(text) in grammar.accepting if done.finish_reason == "stop" else len(text) == 16
        if temperature == 0:
            assert_best_allowed(prompts[i], text, grammar)
    assert len(text_of(outputs[names[0]].outputs[0].token_ids)) == 2
    assert (told.num_ahead > 0) == overlap


def test_modes_of_running_ahead_give_the_same_tokens() -> None:
    """One step ahead or not, one or several steps in a call."""
    prompts, found = random_prompts(4, seed=8), []
    for decode_steps, overlap in ((1, True), (1, False), (3, True), (3, False)):
        engine = toy_engine(overlap=overlap, decode_steps=decode_steps)
        with constrained(engine) as told:
            names = [told.add(prompt, SamplingParams(temperature=0.9, max_tokens=20, seed=i), grammar)
                     for i, (prompt, grammar) in enumerate(zip(prompts, (LADDER, DIGITS, LADDER, None)))]
            outputs = drain(engine)
        found.append(tokens_of(outputs[name] for name in names))
    assert all(tokens == found[0] for tokens in found)
    assert len(text_of(found[0][0])) == 12


def test_preempted_row_resumes_in_its_state() -> None:
    prompts = random_prompts(4, seed=5, shortest=20, longest=24)
    engine = toy_engine(num_pages=28, reserve_tokens=0)
    with constrained(engine) as told:
        names = [told.add(prompt, greedy(13), LADDER) for prompt in prompts]
        outputs = drain(engine, poison=np.nan)
    assert engine.stats()["requests"]["preemptions"] > 0, "the pool was large enough"
    for name, prompt in zip(names, prompts):
        text = text_of(outputs[name].outputs[0].token_ids)
        assert len(text) == 12
        assert_best_allowed(prompt, text, LADDER)


def test_masks_that_come_with_the_step_equal_those_of_the_arena() -> None:
    """Rows of a host matcher among free ones, fetched before the next step is planned."""
    prompts, grammars = random_prompts(4, seed=9), (LADDER, None, DIGITS, CHOICE)
    params = [SamplingParams(temperature=0.9, max_tokens=14, seed=i) for i in range(4)]
    found = []
    for by_mask in (False, True):
        engine = toy_engine(overlap=False)
        with constrained(engine, by_mask=by_mask) as told:
            names = [told.add(*each) for each in zip(prompts, params, grammars)]
            outputs = drain(engine)
        found.append(tokens_of(outputs[name] for name in names))
    assert found[0] == found[1]


def test_min_tokens_beyond_the_end_of_the_text_gives_way_to_the_grammar() -> None:
    engine = toy_engine()
    with constrained(engine) as told:
        name = told.add(random_prompts(1)[0], greedy(9, min_tokens=8), CHOICE)
        tokens = drain(engine)[name].outputs[0].token_ids
    assert CHOICE.walk(text_of(tokens)) in CHOICE.accepting


def test_logprobs_of_constrained_rows_are_those_of_the_raw_logits() -> None:
    prompt = random_prompts(1, seed=2)[0]
    engine = toy_engine()
    with constrained(engine) as told:
        names = [told.add(prompt, greedy(6, logprobs=2), LADDER), told.add(prompt[:4], greedy(6), None)]
        outputs = drain(engine)
    done = outputs[names[0]].outputs[0]
    expected = lm().logprobs([*prompt, *done.token_ids])[len(prompt) - 1:]
    for i, (token, each) in enumerate(zip(done.token_ids, done.logprobs)):
        assert abs(each[token].logprob - expected[i, token]) < 1e-4
    assert outputs[names[1]].outputs[0].logprobs is None


@pytest.mark.parametrize("by_mask", [False, True])
def test_grammars_compile_nothing_after_warmup(by_mask: bool) -> None:
    engine = toy_engine(overlap=not by_mask)
    run_all(engine, random_prompts(2), greedy(2))
    with counted_compilations() as compiled, constrained(engine, by_mask=by_mask) as told:
        for grammar in (LADDER, CHOICE, DIGITS, None):
            for temperature in (0.0, 1.0):
                params = SamplingParams(temperature=temperature, max_tokens=5, logprobs=1)
                told.add(random_prompts(1)[0], params, grammar)
        drain(engine)
    assert compiled == []


def test_steps_without_grammars_run_the_forward_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    Constrained(engine)
    calls: list[tuple] = []
    real = engine._runner._program
    monkeypatch.setattr(engine._runner, "_program", lambda key, *rest: (calls.append(key), real(key, *rest))[1])
    run_all(engine, random_prompts(3), greedy(5))
    assert {key[0] for key in calls} == {"forward"}


def test_upload_while_a_step_runs_does_not_reach_it() -> None:
    """The tables of a grammar that has ended are overwritten right after its last step was started."""
    made, prompt = runner(), random_prompts(1)[0]
    engine = toy_engine()
    with constrained(engine) as told:
        name = told.add(prompt, greedy(12), LADDER)
        real = made.dispatch

        def dispatch(*args: object, **kwargs: object) -> object:
            output = real(*args, **kwargs)
            none = LADDER.tables._replace(mask_rows=np.zeros_like(LADDER.tables.mask_rows),
                                          next_state=np.zeros_like(LADDER.tables.next_state))
            made.upload_grammar(none)
            made.upload_grammar(LADDER.tables)
            return output

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(made, "dispatch", dispatch)
            tokens = drain(engine)[name].outputs[0].token_ids
    assert_best_allowed(prompt, tokens, LADDER)


# -- prescribed logits: a head of 96, of which 50 are tokens

HEAD, VALID = 96, 50


def test_padded_head_never_gives_an_id_beyond_the_tokenizer() -> None:
    """X01: 57 and 80 lead by 1e4; greedy and drawn, constrained and free, in one batch."""
    table = np.zeros(RIGGED_SHAPE + (HEAD,), np.float32)
    table[:, :, [57, 80]] = 1e4
    engine = rigged_engine(table, vocab_size=HEAD, num_valid_tokens=VALID, eos_ids=[EOS])
    text = Grammar(1, [{t: 0 for t in range(3, VALID)}], {0}, vocab_size=HEAD)
    with constrained(engine, text) as told:
        for temperature in (0.0, 1.0):
            for grammar in (None, text):
                told.add([5, 6, 7], SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True), grammar)
        outputs = drain(engine)
    for out in outputs.values():
        assert len(out.outputs[0].token_ids) == 12 and max(out.outputs[0].token_ids) < VALID


def test_constrained_draws_follow_the_renormalised_softmax() -> None:
    """A first token that decides between two alphabets for the second."""
    row = (np.random.default_rng(0).normal(size=HEAD) * 1.2).astype(np.float32)
    row[[47, 3, 57]] = 8     # favourites that no state allows
    engine = rigged_engine(np.broadcast_to(row, RIGGED_SHAPE + (HEAD,)), vocab_size=HEAD, num_valid_tokens=VALID)
    forked = Grammar(1, [{10: 1, 11: 2}, {t: 3 for t in range(20, 26)}, {t: 3 for t in range(30, 38)}, {}], {3},
                     vocab_size=HEAD)
    pairs: list[tuple[int, ...]] = []
    with constrained(engine, forked) as told:
        for part in range(8):
            for i in range(15):
                told.add([1 + i, 6, 7], SamplingParams(temperature=0.8, max_tokens=2, seed=15 * part + i, n=16), forked)
            while engine.has_unfinished:
                pairs += [tuple(sample.token_ids) for out in engine.step() for sample in out.outputs]
    assert len(pairs) == 1920

    def softmax(ids: Sequence[int]) -> np.ndarray:
        weights = np.exp(row[list(ids)].astype(np.float64) / 0.8)
        return weights / weights.sum()

    first = dict(zip((10, 11), softmax((10, 11))))
    expected = {(fork, t): first[fork] * p * len(pairs) for fork, ids in ((10, range(20, 26)), (11, range(30, 38)))
                for t, p in zip(ids, softmax(ids))}
    assert set(pairs) <= set(expected)
    chi_square = sum((pairs.count(pair) - e) ** 2 / e for pair, e in expected.items())
    assert stats.chi2.sf(chi_square, len(expected) - 1) > 1e-3, chi_square
