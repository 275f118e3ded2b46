"""compile_grammar: what a user gives, what comes back, and the errors that say what is wrong."""
from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest

import jradix
from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.limits import GrammarLimits
from toy_tokenizers import make_chat_tokenizer


@dataclass
class Person:
    name: str
    age: int


class Place(TypedDict):
    city: str


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize("grammar, good, bad", [
    (dict(regex="(ab)+"), ["ab", "abab"], ["", "aba", "ababx"]),
    (dict(regex=r"[0-9]+(\.[0-9]+)?"), ["1", "1.5", "10"], ["1.", ".5"]),
    (dict(choices=["no", "no way", "yes"]), ["no", "no way", "yes"], ["n", "no ", "now", ""]),
    (dict(json_schema={"type": "integer", "minimum": 1, "maximum": 5}), ["1", "5"], ["0", "6", "5.7", "01"]),
    (dict(json_schema='{"type": "boolean"}'), ["true", "false"], ["1", "null"]),
    (dict(json_schema=Person), ['{"name":"a","age":3}'],
     ['{"name":"a"}', '{"age":3,"name":"a"}', '{"name":1,"age":3}']),
    (dict(json_schema=Place), ['{"city":"Lyon"}'], ['{"city":"Lyon","zip":1}', "{}"]),
    (dict(json_schema=Color), ['"red"'], ['"green"', "red"]),
    (dict(json_schema=list[int]), ["[]", "[1,2]"], ['["1"]', "[1,]"]),
], ids=repr)
def test_grammar_accepts_and_refuses(grammar: dict[str, Any], good: list[str], bad: list[str]) -> None:
    compiled = jradix.compile_grammar(**grammar)
    for document in good:
        assert compiled.accepts(document) and compiled.explain(document) is None, document
    for document in bad:
        assert not compiled.accepts(document) and str(compiled.explain(document)), document


def test_explain_points_at_the_character() -> None:
    refusal = jradix.compile_grammar(json_schema=Person).explain('{"name":"é","age":3.5}')
    assert (refusal.char, refusal.byte) == (19, 20) and "'.'" in refusal.message
    assert jradix.compile_grammar(regex="ab").explain("a").char == 1


def test_tables_come_with_a_tokenizer_and_follow_the_automaton() -> None:
    tokenizer = make_chat_tokenizer()
    grammar = jradix.compile_grammar(choices=["yes", "no"], tokenizer=tokenizer)
    assert grammar.num_rows >= 2 and grammar.table_bytes > 0
    state, tables = 0, grammar.tables
    for token in tokenizer.encode("yes", add_special_tokens=False):
        assert token in tables.allowed_ids(state)
        state = tables.advance(state, token)
    assert tables.accepting[state] and set(tables.allowed_ids(state)) == set(tables.eos_ids)
    with pytest.raises(GrammarError, match="tokenizer"):
        jradix.compile_grammar(choices=["yes"]).table_bytes


def test_equal_sources_have_equal_names_and_others_do_not() -> None:
    def name(**given: Any) -> str:
        return jradix.compile_grammar(**given).source

    assert name(json_schema={"type": "string", "maxLength": 3}) == name(
        json_schema='{"type": "string", "maxLength": 3}')
    ab, ba = ({"type": "object", "properties": {key: True for key in keys}} for keys in ("ab", "ba"))
    assert name(json_schema=ab) != name(json_schema=ba)      # declared order is the order of the text
    assert name(json_schema=True, whitespace=2) != name(json_schema=True)
    assert len({name(regex="a"), name(choices=["a"]), name(json_schema={"const": "a"})}) == 3


@pytest.mark.parametrize("given, words", [
    (dict(), "exactly one"), (dict(regex="a", choices=["a"]), "regex, choices"), (dict(regex=b"a"), "regex="),
    (dict(choices=[]), "choices="), (dict(choices="ab"), "choices="), (dict(choices=["a", ""]), "choices="),
    (dict(json_schema="[1"), "no JSON"), (dict(json_schema="3"), "JSON object"),
    (dict(regex="a", strict=True), "strict"),
    (dict(json_schema=True, whitspace=1), "whitspace"), (dict(json_schema=True, whitespace=-1), "whitespace"),
    (dict(regex="(?=a)b"), "look-ahead"), (dict(regex="(a"), "position"), (dict(json_schema=False), "unsatisfiable"),
    (dict(json_schema={"type": "integer", "minimum": 3, "maximum": 1}), "unsatisfiable"),
    (dict(json_schema={"$ref": "http://example.com/schema"}), "example.com"),
])
def test_bad_grammar_error_names_what_is_wrong(given: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        jradix.compile_grammar(**given)


def test_beyond_the_limits_is_refused_with_the_number() -> None:
    with pytest.raises(GrammarTooLarge, match="50"):
        jradix.compile_grammar(regex="a{100}", limits=GrammarLimits(max_states=50))
    with pytest.raises(GrammarTooLarge):
        jradix.compile_grammar(regex="(a|b)*a(a|b){20}")


def test_source_is_json() -> None:
    assert json.loads(jradix.compile_grammar(regex="é").source) == {"regex": "é"}
