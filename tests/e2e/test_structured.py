"""Structured output on a tiny random model, which left alone would write noise: every text fits its grammar."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from jradix import LLM, SamplingParams
from jradix.outputs import RequestOutput
from test_llm import compiled, folder  # noqa: F401  (fixtures)

SIZES = dict(dtype="float32", max_num_seqs=4, prefill_chunk_tokens=32, page_size=4, kv_cache_bytes=2**18, quiet=True,
             max_model_len=128, grammar_cache_dir=None)
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer",
          "minimum": 0, "maximum": 120}, "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2}},
          "required": ["name", "age"], "additionalProperties": False}
GRAMMARS: list[dict[str, Any]] = [
    dict(json_schema=PERSON), dict(regex=r"[a-c]{3}-\d{2}"), dict(choices=["yes", "no", "no way"]),
    dict(json_schema={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4})]


@pytest.fixture(scope="module")
def shared(folder: Path, compiled: Path) -> Iterator[LLM]:  # noqa: F811
    with LLM(folder, compile_cache_dir=compiled, **SIZES) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> LLM:
    shared.cache.clear()
    return shared


def fits(text: str, grammar: dict[str, Any]) -> bool:
    if "regex" in grammar:
        return re.fullmatch(grammar["regex"], text) is not None
    if "choices" in grammar:
        return text in grammar["choices"]
    try:
        jsonschema.validate(json.loads(text), grammar["json_schema"])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def params(grammar: dict[str, Any] | None, seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{**dict(temperature=1.5, seed=seed, max_tokens=90), **(grammar or {}), **fields})


def check(outputs: list[RequestOutput], grammars: list[dict[str, Any] | None]) -> None:
    for output, grammar in zip(outputs, grammars):
        assert output.error is None
        for sample in output.outputs:
            if grammar is not None and sample.finish_reason == "stop":
                assert fits(sample.text, grammar), (sample.text, grammar)
            assert (sample.grammar is None) == (grammar is None)


def run_many(llm: LLM, num: int) -> None:
    grammars = [GRAMMARS[i % len(GRAMMARS)] for i in range(num)]
    outputs = llm.generate([f"prompt {i % 7}" for i in range(num)], [params(g, i) for i, g in enumerate(grammars)])
    check(outputs, grammars)
    assert sum(out.outputs[0].finish_reason == "stop" for out in outputs) > 0.9 * num


def test_hot_samples_fit_their_grammars(llm: LLM) -> None:
    run_many(llm, 60)
    assert llm.stats()["grammars"]["compiled"] == len(GRAMMARS)


@pytest.mark.slow
def test_a_thousand_hot_samples_fit_their_grammars(llm: LLM) -> None:
    run_many(llm, 1000)


def test_free_neighbours_are_untouched(llm: LLM) -> None:
    """X07: constrained and free rows side by side, ending and joining at different times."""
    prompts = [f"text {i}" for i in range(10)]
    mixed = [GRAMMARS[i % 4] if i % 2 else None for i in range(10)]
    asked = [params(grammar, i, max_tokens=20 + 3 * i) for i, grammar in enumerate(mixed)]
    outputs = llm.generate(prompts, asked)
    check(outputs, mixed)
    for i in range(0, 10, 2):
        alone, = llm.generate(prompts[i], asked[i])
        assert alone.outputs[0].token_ids == outputs[i].outputs[0].token_ids


HOW = {"steps of one": dict(overlap=False), "multi-step": dict(decode_steps=3),
       "cache off": dict(enable_prefix_caching=False),
       "tight": dict(kv_cache_bytes=2**13), "few grammars at a time": dict(grammar_bytes=2 * 10**5)}


@pytest.mark.parametrize("how", HOW)
def test_greedy_text_does_not_depend_on_how_it_is_run(how: str, folder: Path, compiled: Path,  # noqa: F811
                                                      llm: LLM) -> None:
    prompts = [f"question {i}" for i in range(8)]
    grammars = [GRAMMARS[i] for i in (0, 0, 1, 0, 3, 0, 2, 0)]
    asked = [params(grammar, i, temperature=0.0) for i, grammar in enumerate(grammars)]
    expected = llm.generate(prompts, asked)
    check(expected, grammars)
    with LLM(folder, compile_cache_dir=compiled, **{**SIZES, **HOW[how]}) as other:
        if how == "tight":
            object.__setattr__(other.engine.config, "reserve_tokens", 0)     # admit more than can end
        found = other.generate(prompts, asked)
        other.engine.check_invariants()
        if how == "tight":
            assert other.stats()["requests"]["preemptions"] > 0
    assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in expected]


def test_samples_of_one_prompt_walk_on_their_own(llm: LLM) -> None:
    output, = llm.generate("pick", params(GRAMMARS[1], 5, n=4))
    assert len({sample.text for sample in output.outputs}) > 1
    check([output], [GRAMMARS[1]])


def test_limit_cuts_the_text_and_says_so(llm: LLM) -> None:
    """X10: never closed silently."""
    output, = llm.generate("x", params(GRAMMARS[0], 0, max_tokens=4))
    assert output.outputs[0].finish_reason == "length" and not fits(output.outputs[0].text, GRAMMARS[0])


def test_end_tokens_come_at_the_end_only(llm: LLM) -> None:
    """X09: end tokens, and stop tokens of the request, are possible exactly where the text may end."""
    stop = llm.encode("7")[-1]
    for seed in range(8):
        sample = llm.generate("n", params(dict(regex=r"[0-9]{6}"), seed, stop_token_ids=[stop]))[0].outputs[0]
        assert sample.finish_reason == "stop" and re.fullmatch(r"[0-9]{6}", sample.text.removesuffix("7") if
                                                               len(sample.text) > 6 else sample.text)


def test_chosen_token_follows_the_masked_distribution(llm: LLM) -> None:
    """With two equally long choices the first token follows the model's own ratio between them."""
    ids = [llm.encode(letter)[-1] for letter in "ab"]
    free, = llm.generate("ratio", SamplingParams(temperature=0.0, max_tokens=1, logprobs=20))
    scores = llm.score("ratio", [[i] for i in ids])
    weight = np.exp([score.logprob for score in scores])
    expected = weight[0] / weight.sum()
    samples, = llm.generate("ratio", SamplingParams(temperature=1.0, n=400, seed=3, max_tokens=3, choices=["a", "b"]))
    share = np.mean([sample.text == "a" for sample in samples.outputs])
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / 400) and free.error is None


@pytest.mark.parametrize("bad, words", [
    (dict(regex="(?=a)b"), "look-ahead"), (dict(choices=[""]), "choices"),
    (dict(json_schema={"type": "integer", "minimum": 2, "maximum": 1}), "unsatisfiable"),
    (dict(json_schema={"$ref": "#/nowhere"}), "nowhere")])
def test_bad_grammar_is_a_record_and_costs_nobody_else(llm: LLM, bad: dict[str, Any], words: str) -> None:
    wrong, right = llm.generate(["a", "b"], [params(bad, 0), params(GRAMMARS[2], 1)])
    assert words in wrong.error and right.error is None
    check([right], [GRAMMARS[2]])


def test_grammar_beyond_the_arena_is_refused_every_time(folder: Path, compiled: Path) -> None:  # noqa: F811
    """Not only when it is compiled: what was refused once is not found ready the second time."""
    with LLM(folder, compile_cache_dir=compiled, **{**SIZES, "grammar_bytes": 2 * 10**5}) as llm:
        for _ in range(2):
            wrong, right = llm.generate(["a", "b"], [params(dict(regex="[ab]{3000}"), 0), params(GRAMMARS[2], 1)])
            assert "arena" in wrong.error and right.error is None
            check([right], [GRAMMARS[2]])


def test_chat_response_format_is_followed(llm: LLM) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    output, = llm.chat([{"role": "user", "content": "yes?"}], SamplingParams(temperature=1.0, seed=1, max_tokens=8),
                       response_format=form)
    assert output.outputs[0].text in ("true", "false") and output.outputs[0].grammar == "dfa"
    with pytest.raises(ValueError, match="response_format="):
        llm.chat([{"role": "user", "content": "x"}], response_format={"type": "yaml"})


def test_grammars_off_are_refused_by_name(folder: Path, compiled: Path) -> None:  # noqa: F811
    with LLM(folder, compile_cache_dir=compiled, **{**SIZES, "grammar_bytes": 0}) as llm:
        assert "grammar_bytes" in llm.generate("a", params(GRAMMARS[2], 0))[0].error
