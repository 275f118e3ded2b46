"""Schemas of Python types, checked by the documents their automata accept."""
from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any, Literal, Optional, TypedDict

import pytest

from jradix.errors import GrammarError
from jradix.grammar.dfa import Dfa, compile_language
from jradix.grammar.json_schema import schema_to_language
from jradix.grammar.python_types import json_schema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Tree:
    value: int
    colour: Colour = Colour.RED
    left: Optional["Tree"] = None


class Movie(TypedDict, total=False):
    title: str
    year: Annotated[int, "of the release", {"minimum": 1900}]


def search(query: str, limit: int = 10, tags: list[Literal["a", "b"]] | None = None) -> None:
    """A function whose arguments a model is to write."""


def automaton(source: Any) -> Dfa:
    return compile_language(schema_to_language(json_schema(source)))


def test_dataclass_becomes_a_closed_object_that_may_recur() -> None:
    dfa = automaton(Tree)
    assert dfa.accepts('{"value":1}') and dfa.accepts('{"value":1,"colour":"blue","left":{"value":2,"left":null}}')
    assert not any(dfa.accepts(text) for text in ('{}', '{"value":1,"colour":"green"}', '{"value":1,"x":1}'))


def test_typed_dict_keeps_totality_and_annotations() -> None:
    dfa = automaton(Movie)
    assert dfa.accepts("{}") and dfa.accepts('{"title":"x","year":1999}') and not dfa.accepts('{"year":1899}')


def test_function_signature_becomes_an_object_of_its_parameters() -> None:
    dfa = automaton(search)
    assert dfa.accepts('{"query":"q"}') and dfa.accepts('{"query":"q","limit":3,"tags":["a"]}')
    assert not dfa.accepts('{"limit":3}') and not dfa.accepts('{"query":"q","tags":["c"]}')


@pytest.mark.parametrize("source, yes, no", [
    (tuple[int, str], '[1,"a"]', "[1]"), (tuple[int, ...], "[1,2,3]", '["a"]'),
    (dict[str, int], '{"a":1}', '{"a":"b"}'), (Literal[1, "x", None], "null", "2"), (Optional[bool], "true", "1"),
    (set[Literal["a", "b"]], '["b","a"]', '["a","a"]'),
])
def test_annotation_gives_its_schema(source: Any, yes: str, no: str) -> None:
    assert automaton(source).accepts(yes) and not automaton(source).accepts(no)


def test_pydantic_model_speaks_for_itself() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Point", x=(int, ...), y=(float, 0.0))
    assert automaton(model).accepts('{"x":1,"y":2.5}') and not automaton(model).accepts('{"y":2.5}')
    assert automaton(list[model]).accepts('[{"x":1}]')


@pytest.mark.parametrize("source, word", [
    (complex, "no JSON schema"), (dict[int, str], "keys"), (lambda x: x, "annotation")])
def test_type_without_a_schema_raises(source: Any, word: str) -> None:
    with pytest.raises(GrammarError, match=word):
        json_schema(source)
