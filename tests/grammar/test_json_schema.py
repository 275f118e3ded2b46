"""JSON schema to a language: accepted and refused texts, against an independent validator where one is installed."""
from __future__ import annotations

import json
import random
from typing import Any

import pytest

from jradix.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from jradix.grammar.compiler import compile_grammar
from jradix.grammar.dfa import Dfa, compile_language
from jradix.grammar.json_schema import JsonOptions, SchemaReport, schema_to_language
from jradix.grammar.limits import GrammarLimits

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def automaton(schema: Any, **options: Any) -> Dfa:
    return compile_language(schema_to_language(schema, options=JsonOptions(**options)))


def closed(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False,
            **more}


INTEGER, STRING = {"type": "integer"}, {"type": "string"}
A_B = closed({"a": INTEGER, "b": {"enum": ["x", "y"]}}, "a")
CASES: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("type", {"type": ["integer", "null"]}, [1, None, -7], ["1", 1.5, True, [], {}]),
    ("enum", {"enum": ["a\"b", 1, None, [1, {"k": 2}]]}, ['a"b', 1, None, [1, {"k": 2}]],
     [2, [1, {"k": 3}], [1], True]),
    ("const", {"const": {"a": [False]}}, [{"a": [False]}], [{"a": [0]}, {"a": []}, {}]),
    ("minimum", {"type": "integer", "minimum": -5}, [-5, 0, 100], [-6, -50]),
    ("maximum", {"type": "number", "maximum": 2.5}, [2.5, 2, -10.25], [2.51, 3, 10]),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, [0.1, 1], [0, -0.1, -1]),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 10}, [9, -100], [10, 11, 100]),
    ("multipleOf", {"type": "integer", "multipleOf": 7}, [0, 7, -49, 700], [1, 15, -6]),
    ("multipleOf decimal", {"type": "number", "multipleOf": 0.5}, [0, 1.5, -2], [0.25, 1.75]),
    ("minLength", {"type": "string", "minLength": 2}, ["ab", "\U0001f600\n"], ["", "\U0001f600"]),
    ("maxLength", {"type": "string", "maxLength": 2}, ["", "\u00e9\u4e2d"], ["abc"]),
    ("pattern", {"type": "string", "pattern": "^a|z$"}, ["ab", "az", "z"], ["ba", "zb"]),
    ("pattern with quotes", {"type": "string", "pattern": "^[^\\\\]*\"$"}, ['say "hi"', '"'], ['"x', '\\"']),
    ("pattern and maxLength", {"type": "string", "pattern": "\\d", "maxLength": 3}, ["1", "ab1"], ["abc", "abc1"]),
    ("items", {"type": "array", "items": INTEGER}, [[], [1, 2]], [["1"], [1, None]]),
    ("prefixItems", {"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, [[], [1], [1, "a"]],
     [["a"], [1, 2], [1, "a", 3]]),
    ("minItems", {"type": "array", "items": INTEGER, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    ("maxItems", {"type": "array", "items": INTEGER, "maxItems": 1}, [[], [1]], [[1, 2]]),
    ("contains", {"type": "array", "items": INTEGER, "contains": {"minimum": 5}}, [[1, 6], [5]], [[], [1, 4]]),
    ("maxContains", {"type": "array", "items": INTEGER, "contains": {"minimum": 5}, "minContains": 0, "maxContains": 1},
     [[], [1, 6], [1]], [[5, 6], [9, 1, 9]]),
    ("uniqueItems", {"type": "array", "items": {"enum": [1, "a", None]}, "uniqueItems": True},
     [[], [1, "a"], [None, 1]], [[1, 1], ["a", 1, "a"]]),
    ("required", A_B, [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"b": "x"}, {"a": 1, "b": "z"}, {"a": 1, "c": 1}]),
    ("additionalProperties", {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": STRING},
     [{}, {"a": 1, "z": "s"}], [{"a": "s"}, {"z": 1}]),
    ("patternProperties", {"type": "object", "patternProperties": {"^x": INTEGER, "y$": {"minimum": 5}},
                           "additionalProperties": False},
     [{"x": 1}, {"xy": 6}, {"y": "s"}], [{"xy": 1}, {"z": 1}, {"x": ""}]),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": INTEGER},
     [{}, {"ab": 1}], [{"abc": 1}]),
    ("minProperties", {"type": "object", "properties": {"a": {}}, "additionalProperties": INTEGER, "minProperties": 2},
     [{"a": 1, "b": 2}], [{}, {"a": 1}]),
    ("maxProperties", closed({"a": INTEGER, "b": INTEGER}, maxProperties=1), [{}, {"b": 1}], [{"a": 1, "b": 1}]),
    ("dependentRequired", closed({"a": INTEGER, "b": INTEGER}, dependentRequired={"a": ["b"]}),
     [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    ("dependentSchemas",
     closed({"a": INTEGER, "b": INTEGER}, dependentSchemas={"a": {"properties": {"b": {"const": 1}}}}),
     [{"b": 2}, {"a": 1, "b": 1}, {"a": 1}], [{"a": 1, "b": 2}]),
    ("dependencies", {"$schema": DRAFT_7, **closed({"a": INTEGER, "b": INTEGER}, dependencies={"a": ["b"]})},
     [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    ("anyOf", {"anyOf": [INTEGER, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None]),
    ("oneOf", {"type": "integer", "oneOf": [{"minimum": 5}, {"maximum": 10}]}, [4, 11, -1], [5, 7, 10]),
    ("allOf", {"allOf": [{"type": "object", "properties": {"a": INTEGER}}, {"properties": {"a": {"minimum": 3}}},
                         {"additionalProperties": {"type": "integer"}, "required": ["a"]}]},
     [{"a": 3}], [{"a": 2}, {}]),
    ("not", {"type": "object", "properties": {"a": {"type": ["integer", "string"]}}, "additionalProperties": False,
             "not": {"properties": {"a": INTEGER}}}, [{"a": "s"}], [{}, {"a": 1}]),
    ("if", closed({"a": {"enum": [1, 2]}, "b": INTEGER}, "a", **{
        "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}, "else": {"maxProperties": 1}}),
     [{"a": 1, "b": 0}, {"a": 2}], [{"a": 1}, {"a": 2, "b": 0}]),
    ("$ref", {"$ref": "#/$defs/n", "$defs": {"n": closed({"v": INTEGER, "next": {"$ref": "#/$defs/n"}})}},
     [{}, {"v": 1, "next": {"next": {"v": 2}}}], [{"next": 1}, {"next": {"w": 1}}]),
    ("$anchor", {"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "integer"}}}, [1], ["1"]),
    ("$id", {"$id": "http://h/root", "$ref": "other", "$defs": {"x": {"$id": "other", "type": "integer"}}}, [1], ["1"]),
    ("draft-04 exclusive", {"$schema": DRAFT_4, "type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    ("draft-07 items", {"$schema": DRAFT_7, "type": "array", "items": [INTEGER], "additionalItems": STRING},
     [[], [1, "a"]], [["a"], [1, 2]]),
    ("unevaluatedProperties", {"type": "object", "allOf": [{"properties": {"a": INTEGER}}],
                               "properties": {"b": INTEGER}, "unevaluatedProperties": False},
     [{"a": 1}, {"b": 1}], [{"c": 1}, {"a": 1, "c": 1}]),
    ("format", {"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-13-01", "24-1-1"]),
]


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
@pytest.mark.parametrize("schema, valid, invalid", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_keyword_accepted_and_refused_documents_match_the_validator(schema: Any, valid: list, invalid: list,
                                                                    nested: bool) -> None:
    """Case X03: every keyword, at the root and one level down, has the verdict of an independent validator."""
    wrap = (lambda value: {"outer": value}) if nested else (lambda value: value)
    if nested and ("$ref" in schema or "$schema" in schema):
        definition = {key: value for key, value in schema.items() if key == "$schema"}
        if "$ref" in schema:
            pytest.skip("its references are from the root")
        schema = {**definition, **closed({"outer": {k: v for k, v in schema.items() if k != "$schema"}}, "outer")}
    elif nested:
        schema = closed({"outer": schema}, "outer")
    dfa = automaton(schema)
    assert [value for value in valid if not dfa.accepts(compact(wrap(value)))] == []
    assert [value for value in invalid if dfa.accepts(compact(wrap(value)))] == []
    jsonschema = pytest.importorskip("jsonschema")
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    check = cls(schema, format_checker=cls.FORMAT_CHECKER)
    assert all(check.is_valid(wrap(value)) for value in valid) and not any(check.is_valid(wrap(v)) for v in invalid)


@pytest.mark.parametrize("schema", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_random_walks_through_the_automaton_are_valid_documents(schema: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    check = cls(schema, format_checker=cls.FORMAT_CHECKER)
    dfa, rng = automaton(schema), random.Random(0)
    finished = 0
    for _ in range(30):
        state, data = 0, b""
        while len(data) < 200 and not (dfa.accepting[state] and (rng.random() < 0.3 or not dfa.allowed_bytes(state))):
            allowed = dfa.allowed_bytes(state)
            closing = [byte for byte in allowed if byte in b'"]}']
            data += bytes((rng.choice(closing if closing and rng.random() < 0.3 else allowed),))
            state = dfa.walk(0, data)
        if dfa.accepting[state]:
            finished += 1
            assert check.is_valid(json.loads(data)), data
    assert finished or "pattern" in str(schema)


def test_whitespace_default_is_none_and_bound_is_configurable() -> None:
    """Case X02: no run of blanks longer than the option allows, and none at all by default."""
    schema = closed({"a": INTEGER}, "a")
    assert automaton(schema).accepts('{"a":1}') and not automaton(schema).accepts('{"a": 1}')
    assert automaton(schema).longest() is None and automaton(schema, whitespace=0).accepts('{"a":1}')
    two = automaton(schema, whitespace=2)
    assert two.accepts('{ \n"a" : \t1}') and two.accepts('{"a":1}')
    assert not two.accepts('{   "a":1}') and not two.accepts('{"a":   1}')
    spaced = automaton(closed({"a": INTEGER, "b": INTEGER}, "a", "b"), whitespace=(", ", ": "))
    assert spaced.accepts('{"a": 1, "b": 2}') and not spaced.accepts('{"a":1,"b":2}')


@pytest.mark.parametrize("given", ["spaces", -1, 17, True, (";", ":"), (",",)])
def test_whitespace_of_another_form_raises(given: Any) -> None:
    with pytest.raises(ValueError, match="whitespace="):
        JsonOptions(whitespace=given)


@pytest.mark.parametrize("schema, path, word", [
    ({"properties": {"a": {"uniqueItems": True, "type": "array"}}}, "/properties/a/uniqueItems", "10 known values"),
    ({"properties": {"a": {"pattern": "(?=x)y"}}}, "/properties/a/pattern", "look"),
    ({"items": {"$ref": "http://elsewhere/x.json"}}, "/items/$ref", "never fetched"),
    ({"$ref": "#/$defs/no"}, "/$ref", "leads nowhere"),
    ({"type": "int"}, "/type", "expected one or several"),
    ({"minLength": -1}, "/minLength", "integer >= 0"),
    ({"minimum": "3"}, "/minimum", "expected a number"),
    ({"format": "idn-hostname"}, "/format", "not enforced"),
    ({"type": "integer", "multipleOf": 10_007}, "/multipleOf", "remainders"),
    ({"not": {"unevaluatedItems": False}}, "/not/unevaluatedItems", "complement"),
    ({"not": {"unevaluatedProperties": False}}, "/not/unevaluatedProperties", "complement"),
    ({"anyOf": []}, "/anyOf", "non-empty"),
    ({"required": True}, "/required", "property names"),
    ({"items": [{}]}, "/items", "no schema"),
    ({"allOf": [{"$ref": "#"}]}, "/", "refers to itself"),
    ({"$schema": "http://json-schema.org/draft-99/schema"}, "/$schema", "known drafts"),
])
def test_keyword_that_cannot_be_enforced_raises_with_its_path(schema: Any, path: str, word: str) -> None:
    with pytest.raises(GrammarError) as caught:
        schema_to_language(schema)
    assert str(caught.value).startswith(path) and word in str(caught.value)


@pytest.mark.parametrize(("schema", "kind"), [
    ({"uniqueItems": True}, GrammarUnsupported), ({"format": "idn-email"}, GrammarUnsupported),
    ({"pattern": "(?!a)b"}, GrammarUnsupported), ({"pattern": r"(a)\1"}, GrammarUnsupported),
    ({"patternProperties": {r"\bword": True}}, GrammarUnsupported),
    ({"pattern": "(a"}, GrammarError), ({"minimum": "3"}, GrammarError), ({"$ref": "#/$defs/no"}, GrammarError),
    ({"type": "integer", "minimum": 3, "maximum": 2}, GrammarError),
], ids=str)
def test_error_class_tells_what_another_engine_may_enforce(schema: Any, kind: type[GrammarError]) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_language(schema_to_language(schema))
    assert type(caught.value) is kind


def test_many_key_patterns_divide_the_keys_exactly() -> None:
    """Eleven patterns, of which a key can match several."""
    patterns = {f"^{letter}": {"type": "integer"} for letter in "abcdefghi"}
    patterns |= {"z$": {"minimum": 5}, "^.$": {"maximum": 9}}
    dfa = compile_language(schema_to_language({"type": "object", "patternProperties": patterns,
                                               "additionalProperties": False}))
    for document, valid in (('{"a":9}', True), ('{"a":10}', False), ('{"az":5}', True), ('{"az":4}', False),
                            ('{"az":5.5}', False), ('{"qz":5.5}', True), ('{"z":7}', True), ('{"z":10}', False),
                            ('{"qq":1}', False)):
        assert dfa.accepts(document) == valid, document


def test_key_patterns_that_overlap_in_too_many_ways_raise() -> None:
    patterns = {letter: {"maxLength": n} for n, letter in enumerate("abcdefghij")}
    with pytest.raises(GrammarTooLarge, match="overlap"):
        schema_to_language({"type": "object", "patternProperties": patterns}, limits=GrammarLimits(max_work=500_000))


def test_lenient_ignores_what_cannot_be_enforced_and_reports_it() -> None:
    report = SchemaReport()
    schema = {"type": "array", "items": {"type": "string", "maxLength": 1}, "uniqueItems": True}
    language = schema_to_language(schema, options=JsonOptions(lenient=True), report=report)
    assert compile_language(language).accepts('["a","a"]')
    assert len(report.not_enforced) == 1 and report.not_enforced[0].startswith("/uniqueItems: ")


@pytest.mark.parametrize("schema", [
    False, {"type": "integer", "minimum": 3, "maximum": 2}, {"type": "string", "minLength": 3, "maxLength": 2},
    {"allOf": [STRING, INTEGER]}, {"enum": []}, closed({"a": False}, "a"),
    {"$ref": "#/$defs/n", "$defs": {"n": closed({"n": {"$ref": "#/$defs/n"}}, "n")}},
    {"type": "string", "pattern": "^a+$", "enum": ["b"]},
], ids=["false", "numbers", "lengths", "types", "enum", "required", "self-requiring", "pattern"])
def test_unsatisfiable_schema_raises_at_compile_time(schema: Any) -> None:
    with pytest.raises(GrammarError, match="unsatisfiable|empty|no JSON value|nothing"):
        compile_language(schema_to_language(schema))


def test_strings_are_written_in_one_way() -> None:
    dfa = automaton(STRING)
    assert all(dfa.accepts(compact(value)) for value in ("\x7f", "\t\n\r\b\f", "\x1f\x00", '"\\/', "\u2028\U0010ffff"))
    wrong = (b'"\t"', b'"\\x"', b'"\\ud800"', b'"\xff"', b'"\xed\xa0\x80"', b'"\\"')
    assert not any(dfa.accepts(data) for data in wrong)


def test_numbers_follow_the_grammar_of_json() -> None:
    free, whole = automaton({"type": "number"}), automaton(INTEGER)
    assert all(free.accepts(text) for text in ("0", "-1.50", "1e9", "2.5E-07"))
    assert not any(free.accepts(text) for text in ("01", "+1", ".5", "1.", "-", "1e", "NaN"))
    assert whole.accepts("-10") and not any(whole.accepts(text) for text in ("1.0", "007", "-0", "1e3"))


def test_declared_key_cannot_be_shadowed_by_an_additional_one() -> None:
    dfa = automaton({"type": "object", "properties": {"a": INTEGER, 'q"': INTEGER}, "required": ["a"]})
    assert dfa.accepts('{"a":1,"b":[1]}') and dfa.accepts('{"a":1,"q\\"":2,"aa":""}')
    assert not any(dfa.accepts(text) for text in ('{"a":1,"a":"s"}', '{"b":1,"a":"s"}', '{"a":1,"\\u0061":"s"}',
                                                  '{"a":1,"q\\"":"s"}'))


def test_strict_closes_objects_that_declare_properties() -> None:
    schema = {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}], "type": "object"}
    assert automaton(schema, strict=True).accepts('{"a":1,"b":2}')
    assert not automaton(schema, strict=True).accepts('{"a":1,"c":2}')
    assert automaton({**schema, "additionalProperties": True}, strict=True).accepts('{"c":1}')


def test_property_order_any_accepts_each_order_and_refuses_more_than_six() -> None:
    schema = closed({"a": INTEGER, "b": INTEGER, "c": INTEGER}, "a", "b")
    dfa = automaton(schema, property_order="any")
    assert all(dfa.accepts(text) for text in ('{"b":1,"a":1}', '{"c":1,"b":1,"a":1}', '{"a":1,"b":1}'))
    assert not any(dfa.accepts(text) for text in ('{"b":1}', '{"a":1,"b":1,"a":1}', '{"a":1,"c":1}'))
    with pytest.raises(GrammarTooLarge, match="any order"):
        automaton(closed({f"p{i}": INTEGER for i in range(7)}), property_order="any")


def test_recursion_and_free_values_stop_at_the_depth_and_are_reported() -> None:
    node = closed({"next": {"$ref": "#"}})
    report = SchemaReport()
    dfa = compile_language(schema_to_language(node, options=JsonOptions(max_depth=2), report=report))
    assert dfa.accepts('{"next":{"next":{}}}') and not dfa.accepts('{"next":{"next":{"next":{}}}}')
    assert report.recursive == ["/"] and report.is_depth_limited
    report = SchemaReport()
    dfa = compile_language(schema_to_language(True, options=JsonOptions(max_depth=2), report=report))
    assert dfa.accepts('[{"a":1}]') and not dfa.accepts("[[[1]]]") and report.free_value_depth == 2


def test_unknown_keywords_and_formats_are_ignored_and_reported() -> None:
    report = SchemaReport()
    schema_to_language({"type": "string", "format": "colour", "x-order": 3, "title": "t"}, report=report)
    assert sorted(report.ignored) == ["/format", "/x-order"]


@pytest.mark.parametrize("schema", [
    {"enum": [f"value {i}" for i in range(4000)]},
    closed({f"p{i}": INTEGER for i in range(300)}),
    {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)} | {"3000": INTEGER}},
], ids=["enum of 4000", "300 optional properties", "chain"])
def test_large_schema_compiles(schema: Any) -> None:
    assert automaton(schema).num_states > 1


def nested_arrays(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("schema", [
    nested_arrays(5000), {"type": "string", "maxLength": 100_000},
    {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(8)]} for i in range(8)], "type": "object"},
    {"$ref": "#/$defs/0", "$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}, INTEGER]} for i in range(3000)}
     | {"3000": {}}},
    {"type": "integer", "multipleOf": 1_000_003},
], ids=["deep", "long", "product", "chain of references", "multiple"])
def test_hostile_schema_raises_too_large(schema: Any) -> None:
    with pytest.raises(GrammarTooLarge):
        compile_language(schema_to_language(schema))


# -- keys that repeat in the text: a reader keeps the last of them

@pytest.mark.parametrize("schema, right, wrong", [
    ({"minProperties": 2, "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
     ['{"a":1,"b":null}', '{"a":1,"b":null,"b":null}'], ['{"b":null,"b":null}', '{"a":1}']),
    ({"minProperties": 2, "patternProperties": {"^x": {"type": "null"}, "^y": {"type": "integer"}},
      "additionalProperties": False}, ['{"x":null,"y":1}', '{"y":1,"x":null,"x":null}'], ['{"x":null,"xx":null}']),
    ({"additionalProperties": {"type": ["integer", "null"]}, "not": {"additionalProperties": {"type": "integer"}}},
     ['{"a":1,"b":null}', '{"a":1,"a":null}'], ['{"a":null,"a":1}', '{"a":1}']),
    ({"patternProperties": {"^x": {"type": ["integer", "null"]}, "^y": {"type": "null"}}, "additionalProperties": False,
      "not": {"patternProperties": {"^x": {"type": "integer"}}}},
     ['{"x":null,"y":null}', '{"y":null,"x":null}', '{"x":1,"x":null}'], ['{"x":null,"x":1}', '{"y":null}']),
    ({"additionalProperties": {"type": "null"}, "not": {"propertyNames": {"maxLength": 1}}},
     ['{"aa":null,"bb":null}', '{"aa":null,"b":null,"aa":null}'], ['{"a":null}', "{}"])])
def test_repeated_keys_do_not_fulfil_what_the_last_of_them_does_not(schema: dict[str, Any], right: list[str],
                                                                    wrong: list[str]) -> None:
    grammar = compile_grammar(json_schema={"type": "object", **schema}, engine="dfa")
    assert [grammar.accepts(document) for document in right] == [True] * len(right)
    assert [grammar.accepts(document) for document in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("engine", ["dfa", "matcher", "auto"])
def test_more_undeclared_keys_than_can_be_told_apart_are_refused(engine: str) -> None:
    schema = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "null"}}
    with pytest.raises(GrammarUnsupported, match="/minProperties"):
        compile_grammar(json_schema=schema, engine=engine)


NOT_ALL_INTEGERS_NOR_ALL_NULL = {"type": "object", "additionalProperties": {"type": ["integer", "null"]}, "allOf": [
    {"not": {"additionalProperties": {"type": "integer"}}}, {"not": {"additionalProperties": {"type": "null"}}}]}


def test_conditions_that_need_several_undeclared_keys_are_refused() -> None:
    with pytest.raises(GrammarUnsupported, match="2 conditions"):
        schema_to_language(NOT_ALL_INTEGERS_NOR_ALL_NULL)
    report = SchemaReport()
    schema_to_language(NOT_ALL_INTEGERS_NOR_ALL_NULL, options=JsonOptions(lenient=True), report=report)
    assert len(report.not_enforced) == 1 and "2 conditions" in report.not_enforced[0]


def test_conditions_that_one_undeclared_key_meets_are_followed() -> None:
    kinds = [{"additionalProperties": {"type": kind}} for kind in ("string", "integer", "null")]
    dfa = automaton({"type": "object", "minProperties": 1, "oneOf": kinds})
    assert dfa.accepts('{"a":"x"}') and dfa.accepts('{"a":1,"b":2}') and not dfa.accepts('{"a":1,"b":"x"}')


@pytest.mark.parametrize("bounds", [dict(minProperties=10**9), dict(maxProperties=10**9)], ids=str)
def test_huge_number_of_properties_is_refused_at_once(bounds: dict[str, int]) -> None:
    with pytest.raises((GrammarTooLarge, GrammarUnsupported), match="properties"):
        schema_to_language({"type": "object", "properties": {"a": INTEGER}, **bounds})


def test_lenient_counts_distinct_keys_as_far_as_it_can() -> None:
    report = SchemaReport()
    schema = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "null"}}
    dfa = compile_language(schema_to_language(schema, options=JsonOptions(lenient=True), report=report))
    assert dfa.accepts('{"a":null}') and not dfa.accepts("{}") and "/minProperties" in report.not_enforced[0]


def test_keyword_of_another_draft_is_ignored() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "not": {"type": "integer", "$recursiveRef": "#/x"}}
    assert not compile_grammar(json_schema=schema).accepts("3")
