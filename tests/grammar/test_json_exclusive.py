"""`oneOf` as `anyOf` where alternatives exclude each other, and only there."""
from __future__ import annotations

from typing import Any

import pytest

from jradix.errors import GrammarError
from jradix.grammar.json_exclusive import exclusive_as_any


def kind(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


@pytest.mark.parametrize(("alternatives", "is_exclusive"), [
    ([{"type": "string"}, {"type": "array"}], True),
    ([{"type": "integer"}, {"type": "number"}], False),
    ([kind("a"), kind("b"), kind("c")], True),
    ([kind("a"), {"type": "object"}], False),
    ([{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4, "maximum": 9}], True),
    ([{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}], True),
    ([{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}], False),
    ([{"pattern": "(?=a)"}, {"type": "string"}], False),
], ids=str)
def test_one_of_becomes_any_of_when_no_value_satisfies_two(alternatives: list[Any], is_exclusive: bool) -> None:
    schema = {"properties": {"x": {"oneOf": alternatives}}, "title": "t"}
    found = exclusive_as_any(schema)
    assert found == {"properties": {"x": {"anyOf" if is_exclusive else "oneOf": alternatives}}, "title": "t"}
    assert "oneOf" in schema["properties"]["x"]


def test_one_of_beside_any_of_becomes_a_part_of_all_of() -> None:
    first, second = {"type": "string"}, {"type": "null"}
    schema = {"anyOf": [{"minLength": 1}], "oneOf": [first, second], "allOf": [True]}
    assert exclusive_as_any(schema) == {"anyOf": [{"minLength": 1}], "allOf": [True, {"anyOf": [first, second]}]}


def test_values_that_look_like_schemas_stay_as_they_are() -> None:
    value = {"oneOf": [{"type": "string"}, {"type": "null"}]}
    schema = {"const": value, "properties": {"oneOf": {"default": value}}}
    assert exclusive_as_any(schema) == schema


def test_references_are_followed() -> None:
    schema = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": kind("a"), "b": kind("b")}}
    assert "anyOf" in exclusive_as_any(schema)
    assert exclusive_as_any(True) is True


def test_malformed_schema_raises() -> None:
    with pytest.raises(GrammarError, match="known drafts"):
        exclusive_as_any({"$schema": "http://json-schema.org/draft-99/schema", "oneOf": [True]})
