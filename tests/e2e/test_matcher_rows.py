"""Grammars beyond automata, and grammars in the making: neither costs the other requests anything."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jradix import LLM, SamplingParams
from test_llm import compiled, folder  # noqa: F401  (fixtures)
from test_structured import GRAMMARS, SIZES, check, fits, llm, params, shared  # noqa: F401  (llm, shared: fixtures)

TREE = {"$ref": "#/$defs/node", "$defs": {"node": {
    "type": "object", "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"type": "null"},
                                                                                   {"$ref": "#/$defs/node"}]}},
    "required": ["v", "next"], "additionalProperties": False}}}
ENDLESS: dict[str, Any] = dict(json_schema=TREE, grammar_options={"max_depth": None})
LARK: dict[str, Any] = dict(grammar='start: "(" item ("," item)* ")"\nitem: "x" | "y" start\n')
HOSTILE: dict[str, Any] = dict(regex="(a|b)*a(a|b){18}")


def balanced(text: str) -> bool:
    return text.startswith("(") and text.endswith(")") and text.count("(") == text.count(")") == 1 + text.count("y")


def test_matcher_rows_follow_their_grammar_beside_all_others(llm: LLM) -> None:
    mixed: list[dict[str, Any] | None] = [LARK, None, ENDLESS, GRAMMARS[0], LARK, None, GRAMMARS[1], ENDLESS]
    prompts = [f"text {i}" for i in range(len(mixed))]
    asked = [params(grammar, i, max_tokens=60) for i, grammar in enumerate(mixed)]
    outputs = llm.generate(prompts, asked)
    for grammar, output in zip(mixed, outputs):
        sample = output.outputs[0]
        assert output.error is None
        assert (sample.grammar == "matcher") == (grammar in (LARK, ENDLESS))
        if grammar is LARK and sample.valid:
            assert balanced(sample.text), sample.text
        if grammar is ENDLESS and sample.valid:
            assert fits(sample.text, dict(json_schema=TREE)) and sample.parsed == json.loads(sample.text)
    for i in (1, 3, 5, 6):
        alone, = llm.generate(prompts[i], asked[i])
        assert alone.outputs[0].token_ids == outputs[i].outputs[0].token_ids
    llm.engine.check_invariants()


@pytest.mark.parametrize("changes", [dict(overlap=False), dict(decode_steps=3), dict(kv_cache_bytes=2**13)],
                         ids=lambda changes: next(iter(changes)))
def test_matcher_tokens_do_not_depend_on_how_it_is_run(changes: dict[str, Any], folder: Path,  # noqa: F811
                                                       compiled: Path, llm: LLM) -> None:  # noqa: F811
    prompts = [f"text {i}" for i in range(6)]
    asked = [params((LARK, ENDLESS, GRAMMARS[0])[i % 3], i, temperature=0.0, max_tokens=50) for i in range(6)]
    expected = llm.generate(prompts, asked)
    with LLM(folder, compile_cache_dir=compiled, **{**SIZES, **changes}) as other:
        found = other.generate(prompts, asked)
    assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in expected]


def test_matcher_row_ends_at_its_end_tokens_only(llm: LLM) -> None:
    """X09, on the matcher: a stop token of the request is possible exactly where the text may end."""
    stop = llm.encode("x")[-1]
    for seed in range(6):
        sample = llm.generate("n", params(LARK, seed, stop_token_ids=[stop], max_tokens=40))[0].outputs[0]
        assert "x" not in sample.text.rstrip("x")


def test_structural_tag_opens_a_schema_after_its_mark(llm: LLM) -> None:
    tag = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}],
           "triggers": ["<f"]}
    start = llm.encode("<f>")
    sample = llm.generate("call", params(dict(structural_tag=tag), 1, max_tokens=60, logit_bias={start[0]: 100.0})
                          )[0].outputs[0]
    assert sample.grammar == "matcher"
    head, mark, rest = sample.text.partition("<f")
    if mark and len(rest) > 8:
        assert rest.startswith((">true</f>", ">false</f>"))


def test_grammar_in_the_making_holds_nobody_up(folder: Path, compiled: Path) -> None:  # noqa: F811
    """X13: a request whose grammar takes long is overtaken by the others, and gets its answer all the same."""
    with LLM(folder, compile_cache_dir=compiled, **{**SIZES, "grammar_workers": 1}) as llm:
        llm.generate("warm", SamplingParams(max_tokens=2))
        order = [place for place, _ in llm.generate_iter(
            [("first", params(HOSTILE, 0, max_tokens=30)), ("free", SamplingParams(max_tokens=5)),
             ("second", params(HOSTILE, 1, max_tokens=30)), ("small", params(GRAMMARS[2], 3))])]
        assert order.index(1) < order.index(0) and llm.stats()["grammars"]["compiled"] == 2
        hostile, = llm.generate("first", params(HOSTILE, 0, max_tokens=40))
        assert hostile.error is None and hostile.outputs[0].grammar == "matcher"
        assert set(hostile.outputs[0].text) <= {"a", "b"}


def test_start_on_the_matcher_needs_no_table(folder: Path, compiled: Path) -> None:  # noqa: F811
    with LLM(folder, compile_cache_dir=compiled, grammar_start="matcher", **SIZES) as llm:
        prompts, asked = ["a", "b", "c"], [SamplingParams(max_tokens=3), params(dict(regex="[a-z]{40}"), 1),
                                           params(GRAMMARS[0], 2)]
        outputs = llm.generate(prompts, asked)
        check(outputs, [None, dict(regex="[a-z]{40}"), GRAMMARS[0]])
        assert {out.outputs[0].grammar for out in outputs[1:]} == {"matcher"}
        while llm.stats()["grammars"]["in_work"]:
            llm.generate("x", SamplingParams(max_tokens=1))
        assert llm.generate("b", asked[1])[0].outputs[0].grammar == "dfa"


def test_grammar_found_wrong_later_is_a_record(folder: Path, compiled: Path) -> None:  # noqa: F811
    with LLM(folder, compile_cache_dir=compiled, **SIZES) as llm:
        asked = [SamplingParams(max_tokens=4), params(dict(regex="(?=a)b"), 0), params(GRAMMARS[2], 1)]
        free, wrong, right = llm.generate(["a", "b", "c"], asked)
        assert free.error is None and "look-ahead" in wrong.error and wrong.outputs[0].finish_reason == "error"
        check([right], [GRAMMARS[2]])
        with pytest.raises(ValueError, match="look-ahead"):
            llm.generate(["a", "b"], [SamplingParams(max_tokens=4), params(dict(regex="(?=a)b"), 0)], on_error="raise")
