"""Which engine serves which keyword of JSON schema: a table that the engines fill in themselves.

For each keyword that is enforced there is a small schema with a value that fits it and one that does not. An engine
serves the keyword when it takes the schema, and then it must tell the two apart. `python -m jradix.grammar.support`
prints the table in Markdown, as it stands in the README.
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jradix.errors import GrammarTooLarge, GrammarUnsupported
from jradix.grammar.compiler import Engine, Grammar, compile_grammar
from jradix.grammar.json_drafts import ANNOTATIONS
from jradix.grammar.json_formats import FORMATS, UNSUPPORTED
from jradix.grammar.json_keywords import supported_keywords
from jradix.grammar.json_references import DRAFTS

COLUMNS = ("keyword", "drafts", "automaton", "matcher", "remark")
_URI = {2019: "https://json-schema.org/draft/2019-09/schema", 7: "http://json-schema.org/draft-07/schema#"}
_NAMES = {number: name for name, number in DRAFTS.items()}
_BOOL, _INT, _NULL = {"type": "boolean"}, {"type": "integer"}, {"type": "null"}


@dataclass(frozen=True)
class Probe:
    """How a keyword is tried out.

    Attributes:
      schema: small, with the keyword.
      valid, invalid: values that differ in what the keyword says.
      beyond: a schema with the keyword that not every engine follows to its full extent, where there is such a limit.
      remark: that limit, or what else there is to know; short.
    """
    schema: dict[str, Any]
    valid: Any
    invalid: Any
    beyond: dict[str, Any] | None = None
    remark: str = ""


@dataclass(frozen=True)
class Support:
    """One line of the table.

    Attributes:
      keyword: its name.
      first_draft, last_draft: that have it: 4, 6, 7, 2019 or 2020.
      automaton, matcher: "yes"; "within limits" where the remark names one, beside the limits of all automata; "no".
      remark: short.
    """
    keyword: str
    first_draft: int
    last_draft: int
    automaton: str
    matcher: str
    remark: str


def _object(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


def _closed(**keywords: Any) -> dict[str, Any]:
    return _object(properties={"a": _INT, "b": _INT}, additionalProperties=False, **keywords)


def _list(items: Any = _INT, **keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **keywords}


PROBES = {
    "$dynamicRef": Probe({"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", **_INT}}}, 1, "a", {
        "$id": "http://x/root", "$ref": "tree", "$dynamicAnchor": "n", "type": "object", "$defs": {"t": {
            "$id": "tree", "$dynamicAnchor": "n", "properties": {"a": {"$dynamicRef": "#n"}}}}},
                         "where one schema can be meant"),
    "$recursiveRef": Probe({"type": ["integer", "array"], "items": {"$recursiveRef": "#"}}, [[1]], [["a"]],
                           _list({"$recursiveRef": "#"}), "to `max_depth`"),
    "$ref": Probe({"$ref": "#/$defs/n", "$defs": {"n": _INT}}, 1, "a", _closed() | {"properties": {"a": {"$ref": "#"}}},
                  "within the document, also by `$id` and `$anchor`; recursion: automaton to `max_depth`, matcher to "
                  "any depth"),
    "additionalItems": Probe(_list([_INT], additionalItems=_NULL), [1, None], [1, 1]),
    "additionalProperties": Probe(_object(properties={"a": _INT}, additionalProperties=_NULL), {"a": 1, "b": None},
                                  {"a": 1, "b": 1}, remark="declared keys cannot come again as additional ones"),
    "allOf": Probe({"allOf": [_INT, {"minimum": 5}]}, 5, 4),
    "anyOf": Probe({"anyOf": [_INT, _NULL]}, None, "a"),
    "const": Probe({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    "contains": Probe(_list(contains={"const": 5}), [1, 5], [1]),
    "dependencies": Probe(_closed(dependencies={"a": ["b"]}), {"a": 1, "b": 1}, {"a": 1}),
    "dependentRequired": Probe(_closed(dependentRequired={"a": ["b"]}), {"a": 1, "b": 1}, {"a": 1}),
    "dependentSchemas": Probe(_closed(dependentSchemas={"a": {"required": ["b"]}}), {"a": 1, "b": 1}, {"a": 1}),
    "else": Probe(_INT | {"if": {"minimum": 5}, "else": {"maximum": 2}}, 2, 3),
    "enum": Probe({"enum": ["a", 1, None]}, "a", "b"),
    "exclusiveMaximum": Probe(_INT | {"exclusiveMaximum": 5}, 4, 5),
    "exclusiveMinimum": Probe(_INT | {"exclusiveMinimum": 5}, 6, 5),
    "format": Probe({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29",
                    {"type": "string", "format": "idn-email"}, "those listed below"),
    "if": Probe(_INT | {"if": {"minimum": 5}, "then": {"minimum": 9}}, 9, 6),
    "items": Probe(_list(), [1], ["a"]),
    "maxContains": Probe(_list(contains={"const": 5}, maxContains=1), [5, 1], [5, 5]),
    "maxItems": Probe(_list(maxItems=1), [1], [1, 1]),
    "maxLength": Probe({"type": "string", "maxLength": 2}, "é中", "abc", remark="in code points"),
    "maxProperties": Probe(_closed(maxProperties=1), {"b": 1}, {"a": 1, "b": 1}),
    "maximum": Probe({"type": "number", "maximum": 5}, 4.5, 5.7, remark="exact, in decimals"),
    "minContains": Probe(_list(contains={"const": 5}, minContains=2), [5, 5], [5, 1]),
    "minItems": Probe(_list(minItems=2), [1, 1], [1]),
    "minLength": Probe({"type": "string", "minLength": 2}, "é中", "a", remark="in code points"),
    "minProperties": Probe(_closed(minProperties=1), {"a": 1}, {}),
    "minimum": Probe({"type": "number", "minimum": 5}, 5.5, 4.9, remark="exact, in decimals"),
    "multipleOf": Probe(_INT | {"multipleOf": 7}, 21, 22, _INT | {"multipleOf": 100_003},
                        "automaton: at most 4,096 remainders"),
    "not": Probe(_INT | {"not": {"minimum": 5}}, 4, 5, {"not": _list(uniqueItems=True)},
                 "of all but `uniqueItems` and `unevaluated*`"),
    "oneOf": Probe({"oneOf": [_INT, {"type": "string"}]}, 1, None,
                   _INT | {"oneOf": [{"minimum": 5}, {"maximum": 7}]},
                   "exclusive; matcher: where the alternatives cannot overlap"),
    "pattern": Probe({"type": "string", "pattern": "^a|z$"}, "az", "ba", {"type": "string", "pattern": "(?=a)b"},
                     "ECMA syntax, unanchored; no look-around, back-reference, `\\b`"),
    "patternProperties": Probe(_object(patternProperties={"^a": _INT}, additionalProperties=False), {"ab": 1},
                               {"ab": None}),
    "prefixItems": Probe(_list(_NULL, prefixItems=[_INT]), [1, None], [1, 1]),
    "properties": Probe(_closed(), {"a": 1}, {"a": None},
                        remark='in declared order; `property_order="any"`: automaton, up to 6'),
    "propertyNames": Probe(_object(propertyNames={"maxLength": 1}, additionalProperties=_INT), {"a": 1}, {"ab": 1}),
    "required": Probe(_closed(required=["a"]), {"a": 1}, {"b": 1}),
    "then": Probe(_INT | {"if": {"minimum": 5}, "then": {"minimum": 9}}, 4, 6),
    "type": Probe({"type": ["integer", "null"]}, 1, 1.5, remark="`1.0` is not written for an integer"),
    "unevaluatedItems": Probe({"type": "array", "prefixItems": [_INT], "unevaluatedItems": False}, [1], [1, 1]),
    "unevaluatedProperties": Probe(_object(allOf=[{"properties": {"a": _INT}}], unevaluatedProperties=False), {"a": 1},
                                   {"b": 1}),
    "uniqueItems": Probe(_list({"enum": [1, 2, 3]}, uniqueItems=True), [1, 2], [1, 1],
                         _list({"type": "string"}, uniqueItems=True),
                         "automaton: where items are one of at most 10 known values"),
}


def support_matrix() -> list[Support]:
    """A line for each keyword that some engine may enforce, in order of its name. Takes about a second."""
    return [Support(keyword, first, last, _verdict("dfa", keyword), _verdict("matcher", keyword),
                    PROBES[keyword].remark) for keyword, (first, last) in supported_keywords().items()]


def serves(engine: Engine, keyword: str, probe: Probe) -> bool:
    """Whether the engine takes the probe's schema. If so it accepts the valid value and refuses the other."""
    schema = _in_draft(probe.schema, supported_keywords()[keyword][1])
    grammar = _try_compile(engine, schema)
    if grammar is None:
        return False
    assert grammar.accepts(_text(probe.valid)), f"{keyword}: {engine} refuses {probe.valid!r}"
    assert not grammar.accepts(_text(probe.invalid)), f"{keyword}: {engine} accepts {probe.invalid!r}"
    return True


def support_table() -> str:
    """The matrix in Markdown, with a line each for formats, drafts and keywords without an assertion."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    rows += [(f"`{line.keyword}`", _drafts(line.first_draft, line.last_draft), line.automaton, line.matcher,
              line.remark) for line in support_matrix()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", f"Formats: {_listed(FORMATS)}; refused: {_listed(UNSUPPORTED)}; other names are annotations.", "",
              f"Drafts: {', '.join(DRAFTS)}, by `$schema`; without it {next(reversed(DRAFTS))}. Read, and asserting "
              f"nothing: {_listed(ANNOTATIONS)}."]
    return "\n".join(lines)


def _verdict(engine: Engine, keyword: str) -> str:
    probe = PROBES[keyword]
    if not serves(engine, keyword, probe):
        return "no"
    if probe.beyond is None:
        return "yes"
    beyond = _try_compile(engine, _in_draft(probe.beyond, supported_keywords()[keyword][1]))
    return "yes" if beyond is not None and beyond.engine == engine else "within limits"


def _try_compile(engine: Engine, schema: dict[str, Any]) -> Grammar | None:
    try:
        return compile_grammar(json_schema=schema, engine=engine)
    except (GrammarUnsupported, GrammarTooLarge):
        return None


def _in_draft(schema: dict[str, Any], draft: int) -> dict[str, Any]:
    return {"$schema": _URI[draft], **schema} if draft in _URI else schema


def _drafts(first: int, last: int) -> str:
    if first == last:
        return _NAMES[first]
    if (first, last) == (min(_NAMES), max(_NAMES)):
        return "all"
    return f"{_NAMES[first]} and later" if last == max(_NAMES) else f"{_NAMES[first]} to {_NAMES[last]}"


def _listed(names: frozenset[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names))


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


if __name__ == "__main__":
    print(support_table())
