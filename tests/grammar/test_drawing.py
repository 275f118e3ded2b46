"""Drawings of automata: well-formed, readable, bounded; what is joined reads as the text it stands for."""
from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

import jradix
from jradix.grammar.dfa import Dfa, compile_language
from jradix.grammar.drawing import automaton_svg, to_dot
from jradix.grammar.drawn_graph import drawn_graph, edge_label
from jradix.grammar.language import nothing

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def titles(svg: str) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def labels(dfa: Dfa) -> dict[tuple[int, int], str]:
    return {(edge.source, edge.target): "".join(piece for piece, _ in edge_label(edge, 200))
            for edge in drawn_graph(dfa, 60).edges}


@pytest.mark.parametrize("given", [
    dict(json_schema=PERSON), dict(choices=["yes", "<&>", 'say "no"', "a\tb\\"]), dict(regex="(ab|c[de]*f)*"),
    dict(regex="[\U0001f600\U0001f601é]{2}x"), dict(json_schema=True), dict(regex=r"\x00|[^\n]"), dict(regex="")],
    ids=str)
def test_drawing_of_any_automaton_is_well_formed_xml(given: dict[str, Any]) -> None:
    grammar = jradix.compile_grammar(**given)
    root = ElementTree.fromstring(grammar.draw())
    assert root.tag == f"{SVG}svg" and grammar._repr_svg_() == grammar.draw()
    assert len(list(root.iter(f"{SVG}circle"))) > 1
    width, height = float(root.get("width")), float(root.get("height"))
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.get("cx")) < width and 0 < float(circle.get("cy")) < height


def test_text_without_a_choice_is_one_coloured_edge() -> None:
    grammar = jradix.compile_grammar(json_schema={"type": "object", "properties": {"name": {"enum": ["x", "yes"]}},
                                                  "required": ["name"], "additionalProperties": False})
    edges = [edge_label(edge, 99) for edge in drawn_graph(grammar.dfa, 60).edges]
    assert edges == [[("'{\"name\":\"'", True)], [("'x', 'y", False), ("es'", True)], [("'\"}'", True)]]
    root = ElementTree.fromstring(grammar.draw())
    assert [one.text for one in root.iter(f"{SVG}tspan") if one.get("fill")] == ["'{\"name\":\"'", "es'", "'\"}'"]


def test_labels_show_ranges_of_characters_and_whole_characters() -> None:
    assert labels(jradix.compile_grammar(regex=r"[0-9a]+\.").dfa)[0, 1] == "'0' to '9', 'a'"
    few, = labels(jradix.compile_grammar(regex="[é\U0001f600\U0001f601x]").dfa).values()
    assert few == "'x', 'é', '\U0001f600', '\U0001f601'"
    any_character, = labels(jradix.compile_grammar(regex="(?s:.)").dfa).values()
    assert any_character == "'\\x00' to '\\x7f', a character beyond ASCII"
    greek, = labels(jradix.compile_grammar(regex="[Α-Ω\U00010000-\U0001ffff]").dfa).values()
    assert greek == "65,561 characters beyond ASCII"


def test_labels_and_titles_are_escaped() -> None:
    svg = jradix.compile_grammar(choices=["<b>&amp;", "x"]).draw()
    assert "<b>" not in svg and any("<b>&amp;" in title for title in titles(svg))
    assert any("<b>&amp;" in text for text in texts(svg))


def test_accepting_states_are_double_circles() -> None:
    root = ElementTree.fromstring(jradix.compile_grammar(regex="ab?").draw())
    circles = [(one.get("cx"), one.get("cy")) for one in root.iter(f"{SVG}circle")]
    legend = 2
    assert len(circles) - legend == 3 + 2 and len(set(circles)) == 3 + 1      # states 0, 1, 2; the last two accept


@pytest.mark.parametrize("max_states", [1, 2, 7])
def test_large_automaton_is_shown_in_part_and_says_so(max_states: int) -> None:
    grammar = jradix.compile_grammar(regex="([ab][cd]){20}")
    svg = grammar.draw(max_states=max_states)
    numbers = [text for text in texts(svg) if text.isdecimal()]
    assert len(numbers) == max_states
    assert any(f"{max_states} of 41 are drawn" in text and f"{41 - max_states} are left out" in text
               for text in texts(svg))
    assert any("not drawn" in text for text in texts(svg))
    assert not any("left out" in text for text in texts(grammar.draw(max_states=41)))


@pytest.mark.parametrize("draw", [lambda g: g.draw(0), lambda g: to_dot(g.dfa, max_states=0)])
def test_drawing_no_states_raises(draw: Any) -> None:
    with pytest.raises(ValueError, match="max_states=0"):
        draw(jradix.compile_grammar(regex="a"))


def test_matcher_grammar_draws_a_note_with_the_reason() -> None:
    grammar = jradix.compile_grammar(grammar='start: "<" start ">" | "x"')
    shown = texts(grammar.draw())
    assert "matcher" in shown[0] and grammar.reason in shown[1]


def test_empty_language_draws_a_note() -> None:
    dfa = compile_language(nothing(), allow_empty=True)
    assert any("no text" in text for text in texts(automaton_svg(dfa))) and to_dot(dfa).startswith("digraph")


def test_dot_has_the_same_edges_and_quotes_labels() -> None:
    dfa = jradix.compile_grammar(choices=['say "no"', "a\\b"]).dfa
    dot = to_dot(dfa)
    assert len(re.findall(r"^  \d+ -> \d+ ", dot, re.MULTILINE)) == len(drawn_graph(dfa, 60).edges)
    for label in re.findall(r'label="(.*)"[\],]', dot):
        assert re.fullmatch(r'(?:[^"\\]|\\.)*', label), label


@pytest.mark.parametrize("given", [
    dict(json_schema=PERSON), dict(regex="[\U0001f600\U0001f601é]{2}x|ab\U0001f600[à-ÿ]"),
    dict(choices=["yes", "no", "no way", "你好", "你们", "你"])], ids=str)
def test_walks_over_the_drawn_edges_are_texts_of_the_grammar(given: dict[str, Any]) -> None:
    dfa = jradix.compile_grammar(**given).dfa
    graph, rng = drawn_graph(dfa, 10_000), random.Random(0)
    assert len(graph.layer) == graph.num_joined and not graph.num_beyond
    leaving = {state: [edge for edge in graph.edges if edge.source == state] for state in graph.layer}
    for _ in range(100):
        state, data = 0, b""
        while leaving[state] and not (dfa.accepting[state] and rng.random() < 0.3):
            edge = rng.choice(leaving[state])
            data += bytes(rng.choice(values) for values in rng.choice(edge.ways))
            state = edge.target
            assert dfa.walk(0, data) == state
        assert dfa.accepts(data)
        data.decode("utf-8")
