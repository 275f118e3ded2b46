"""The support matrix: complete, told by the engines themselves, and the one that stands in the README."""
from __future__ import annotations

import time
from pathlib import Path

import pytest

from jradix.grammar.compiler import compile_grammar
from jradix.grammar.json_drafts import ANNOTATIONS, GROUPS
from jradix.grammar.json_keywords import supported_keywords
from jradix.grammar.support import PROBES, Support, serves, support_matrix, support_table

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- support matrix -->", "<!-- end of support matrix -->"


def test_every_enforced_keyword_has_a_probe_that_uses_it() -> None:
    assert set(PROBES) == set(supported_keywords()) and set(GROUPS) <= set(PROBES)
    assert not ANNOTATIONS & set(PROBES)
    assert [name for name, probe in PROBES.items() if f"'{name}'" not in repr(probe.schema)] == []
    assert [name for name, probe in PROBES.items()
            if probe.beyond is not None and f"'{name}'" not in repr(probe.beyond)] == []


@pytest.mark.parametrize("keyword", PROBES)
def test_probe_tells_its_keyword_from_a_schema_without_it(keyword: str) -> None:
    """The invalid value is refused because of the keyword: an independent validator says so too."""
    jsonschema = pytest.importorskip("jsonschema")
    from jradix.grammar.support import _in_draft
    probe = PROBES[keyword]
    schema = _in_draft(probe.schema, supported_keywords()[keyword][1])
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    check = cls(schema, format_checker=cls.FORMAT_CHECKER)
    assert check.is_valid(probe.valid) and not check.is_valid(probe.invalid)


@pytest.mark.parametrize("keyword", PROBES)
def test_every_enforced_keyword_is_served_by_the_automaton(keyword: str) -> None:
    assert serves("dfa", keyword, PROBES[keyword])


def test_verdicts_are_those_that_are_known() -> None:
    lines = {line.keyword: line for line in support_matrix()}
    assert lines["enum"] == Support("enum", 4, 2020, "yes", "yes", "")
    assert (lines["uniqueItems"].automaton, lines["uniqueItems"].matcher) == ("within limits", "no")
    assert (lines["multipleOf"].automaton, lines["multipleOf"].matcher) == ("within limits", "yes")
    assert (lines["oneOf"].automaton, lines["oneOf"].matcher) == ("yes", "within limits")
    assert lines["contains"].matcher == "no"
    assert all(line.remark for line in lines.values() if "within limits" in (line.automaton, line.matcher))


def test_limits_of_the_automaton_go_to_the_matcher_where_it_can() -> None:
    assert compile_grammar(json_schema=PROBES["multipleOf"].beyond).engine == "matcher"


def test_generation_takes_less_than_five_seconds() -> None:
    begin = time.monotonic()
    table = support_table()
    assert time.monotonic() - begin < 5
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == len(PROBES) and all(row.count("|") == 6 for row in rows)
    assert "`uri-template`" in table and "2019-09" in table


def test_readme_holds_exactly_this_table() -> None:
    """Print it with `python -m jradix.grammar.support`."""
    text = README.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1, f"README.md: expected the table between {BEGIN} and {END}"
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == support_table()
