"""Jump decoding: tokens that a grammar leaves no choice about are appended, and nothing else changes."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jradix import LLM, SamplingParams
from jradix.outputs import RequestOutput
from test_llm import compiled, folder  # noqa: F401  (fixtures)
from test_structured import GRAMMARS, PERSON, SIZES, check, params

RECORD = {"type": "object", "properties": {"identifier": {"type": "integer", "minimum": 0, "maximum": 99},
          "is_available": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
          "required": ["identifier", "is_available", "colour"], "additionalProperties": False}
MIXED: list[dict[str, Any] | None] = [dict(json_schema=RECORD), GRAMMARS[1], None, dict(json_schema=PERSON),
                                      GRAMMARS[2], dict(json_schema=RECORD), None, GRAMMARS[3]]


@pytest.fixture(scope="module")
def pair(folder: Path, compiled: Path) -> Iterator[tuple[LLM, LLM]]:  # noqa: F811
    """One LLM that jumps and one that does not."""
    with (LLM(folder, compile_cache_dir=compiled, **SIZES) as jumping,
          LLM(folder, compile_cache_dir=compiled, jump_decoding=False, **SIZES) as plain):
        yield jumping, plain


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def forced(outputs: list[RequestOutput]) -> int:
    return sum(sample.num_forced_tokens for output in outputs for sample in output.outputs)


ASKED = {"greedy": dict(temperature=0.0), "hot": dict(temperature=1.5), "few tokens": dict(max_tokens=9),
         "samples": dict(n=3), "penalties": dict(frequency_penalty=1.5, repetition_penalty=1.3, logit_bias={40: 3.0}),
         "stop text": dict(stop=["able"]), "log-probabilities": dict(logprobs=2), "minimum": dict(min_tokens=30)}


@pytest.mark.parametrize("how", ASKED)
def test_jump_changes_no_token(how: str, pair: tuple[LLM, LLM]) -> None:
    jumping, plain = pair
    prompts = [f"item {i}" for i in range(len(MIXED))]
    asked = [params(grammar, i, **ASKED[how]) for i, grammar in enumerate(MIXED)]
    found, expected = jumping.generate(prompts, asked), plain.generate(prompts, asked)
    assert tokens(found) == tokens(expected)
    assert [[(s.text, s.finish_reason, s.stop_reason, s.valid) for s in out.outputs] for out in found] == [
        [(s.text, s.finish_reason, s.stop_reason, s.valid) for s in out.outputs] for out in expected]
    assert forced(expected) == 0
    assert (forced(found) > 0) == (how != "log-probabilities")     # they are wanted of every token
    jumping.engine.check_invariants()
    again = jumping.generate(prompts, asked)                        # on the cache, forced tokens in it
    assert tokens(again) == tokens(expected)


SOME, OTHERS = ((dict(overlap=False), dict(decode_steps=3), dict(kv_cache_bytes=2**13), dict(max_num_seqs=1)),
                (dict(enable_prefix_caching=False), dict(page_size=16), dict(prefill_chunk_tokens=8),
                 dict(grammar_bytes=2 * 10**5)))


@pytest.mark.parametrize("changes", [*SOME, *(pytest.param(changes, marks=pytest.mark.slow) for changes in OTHERS)],
                         ids=lambda changes: next(iter(changes)))
def test_jump_tokens_do_not_depend_on_how_it_is_run(changes: dict[str, Any], folder: Path,  # noqa: F811
                                                    compiled: Path, pair: tuple[LLM, LLM]) -> None:  # noqa: F811
    prompts = [f"thing {i}" for i in range(len(MIXED))]
    asked = [params(grammar, i, temperature=0.0) for i, grammar in enumerate(MIXED)]
    expected = pair[1].generate(prompts, asked)
    with LLM(folder, compile_cache_dir=compiled, **{**SIZES, **changes}) as llm:
        found = llm.generate(prompts, asked)
        llm.engine.check_invariants()
    assert tokens(found) == tokens(expected) and forced(found) > 0


def test_forced_tokens_cost_no_pass(pair: tuple[LLM, LLM]) -> None:
    """Every pass draws a token that had a choice; what must come next is computed beside it."""
    steps = []
    for llm in pair:
        llm.cache.clear()
        before = llm.stats()
        output, = llm.generate("one", params(dict(json_schema=RECORD), 3))
        sample, after = output.outputs[0], llm.stats()
        assert sample.valid and sample.parsed == json.loads(sample.text)
        steps.append(after["steps"] - before["steps"])
        assert after["tokens"]["forced"] - before["tokens"]["forced"] == sample.num_forced_tokens
        assert after["tokens"]["recomputed"] == before["tokens"]["recomputed"]
    num_drawn = len(sample.token_ids) - pair[0].generate("one", params(dict(json_schema=RECORD), 3)
                                                         )[0].outputs[0].num_forced_tokens
    num_long_jumps = 4      # runs of forced bytes longer than a short step of one row has room for
    assert steps[0] <= num_drawn + 2 + num_long_jumps < steps[1]


def test_text_without_any_choice_takes_no_pass(pair: tuple[LLM, LLM]) -> None:
    jumping, _ = pair
    before = jumping.stats()
    output, = jumping.generate("say it", params(dict(choices=["exactly this"]), 0))
    sample, after = output.outputs[0], jumping.stats()
    assert sample.text == "exactly this" and sample.valid and sample.finish_reason == "stop"
    assert sample.num_forced_tokens == len(sample.token_ids)
    assert after["tokens"]["computed"] == before["tokens"]["computed"]


def test_streamed_pieces_with_jumps_make_the_text(pair: tuple[LLM, LLM]) -> None:
    jumping, plain = pair
    asked = params(dict(json_schema=RECORD), 7)
    expected, = plain.generate("stream", asked)
    pieces = list(jumping.stream("stream", asked))
    assert "".join(piece.text for piece in pieces) == expected.outputs[0].text
    assert sum((piece.token_ids for piece in pieces), []) == expected.outputs[0].token_ids


def test_output_cut_by_its_limit_is_marked(pair: tuple[LLM, LLM]) -> None:
    """X10: never closed silently."""
    for llm in pair:
        sample = llm.generate("cut", params(dict(json_schema=RECORD), 1, max_tokens=10))[0].outputs[0]
        assert sample.finish_reason == "length" and sample.valid is False and sample.parsed is None
        assert "max_tokens=10" in sample.error and len(sample.token_ids) == 10


def test_enough_tokens_are_what_the_longest_text_needs(pair: tuple[LLM, LLM]) -> None:
    sample = pair[0].generate("e", params(dict(json_schema=RECORD), 2, max_tokens="enough"))[0].outputs[0]
    assert sample.valid and sample.error is None
    refused, = pair[0].generate("e", params(dict(regex="a*"), 2, max_tokens="enough"))
    assert "any length" in refused.error


def test_host_waits_for_tokens_only_where_a_jump_may_follow(pair: tuple[LLM, LLM]) -> None:
    jumping, plain = pair
    free = SamplingParams(temperature=0.0, max_tokens=20)
    for llm in pair:
        before = llm.stats()["synchronous_steps"]
        llm.generate("a", free)
        llm.generate("a", params(dict(regex="[a-z]{30}[0-9]"), 0))
        assert llm.stats()["synchronous_steps"] - before <= 4
    before = [llm.stats()["synchronous_steps"] for llm in pair]
    for llm in pair:
        llm.generate("a", params(dict(json_schema=RECORD), 0))
    assert jumping.stats()["synchronous_steps"] > before[0] and plain.stats()["synchronous_steps"] == before[1]


def test_mixed_grammars_follow_their_own(pair: tuple[LLM, LLM]) -> None:
    outputs = pair[0].generate([f"p {i % 5}" for i in range(40)],
                               [params(MIXED[i % len(MIXED)], i) for i in range(40)])
    check(outputs, [MIXED[i % len(MIXED)] for i in range(40)])
