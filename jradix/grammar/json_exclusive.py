"""`oneOf` whose alternatives exclude each other, as `anyOf`: the same values, in words that more engines understand."""
from __future__ import annotations

from itertools import combinations
from typing import Any, Iterator
from urllib.parse import unquote

from jradix.errors import GrammarError
from jradix.grammar.json_keywords import Keywords
from jradix.grammar.json_references import Document, Literal, Node, below
from jradix.grammar.json_strings import StringWriter
from jradix.grammar.limits import GrammarLimits

MAX_PAIRS = 20_000      # of alternatives in one schema


def exclusive_as_any(schema: dict[str, Any] | bool, limits: GrammarLimits = GrammarLimits()) -> dict[str, Any] | bool:
    """`schema` with `anyOf` in place of each `oneOf` of which no value can satisfy two alternatives.

    Where that is not found out, `oneOf` stays; all of them do where a reference leads into one, as it would then lead
    nowhere. The schema itself is not changed.

    Raises:
      GrammarError: malformed.
    """
    document = Document(schema)
    keywords = Keywords(document, StringWriter(limits), assert_formats=False, refuse=_refuse, note=lambda place: None)
    exclusive: set[int] = set()
    pairs = 0
    for part, base, path in _schemas(schema, document):
        if isinstance(part.get("$ref"), str) and "/oneOf/" in unquote(part["$ref"]):
            return schema
        alternatives = part.get("oneOf")
        if not isinstance(alternatives, list):
            continue
        pairs += len(alternatives) * (len(alternatives) - 1) // 2
        if pairs > MAX_PAIRS:
            continue
        node = document.node(part, base, path)
        if _exclude_each_other([document.child(node, "oneOf", i) for i in range(len(alternatives))], keywords):
            exclusive.add(id(part))
    return _rewritten(schema, exclusive)


def _exclude_each_other(nodes: list[Node], keywords: Keywords) -> bool:
    try:
        branches = [keywords.branches(Literal(node, True)) for node in nodes]
        return not any(keywords.is_alive(shared) for first, second in combinations(branches, 2)
                       for shared in keywords.product(first, second, ""))
    except (GrammarError, RecursionError):      # something in them is not understood, so nothing is known
        return False


def _refuse(place: str, reason: str) -> None:
    raise GrammarError(f"{place}: {reason}")


def _schemas(schema: Any, document: Document) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(schema, base URI, path) of every object schema, each before those in it."""
    stack = [(schema, "", "")]
    while stack:
        part, base, path = stack.pop()
        if isinstance(part, dict):
            base = document.base_of(part, base)
            yield part, base, path
            stack += [(value, base, path + place) for value, place in below(part)]


def _rewritten(value: Any, exclusive: set[int]) -> Any:
    if isinstance(value, list):
        return [_rewritten(item, exclusive) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _rewritten(item, exclusive) for key, item in value.items()}
    if id(value) in exclusive:
        alternatives = found.pop("oneOf")
        if "anyOf" in found:
            found["allOf"] = [*found.get("allOf", ()), {"anyOf": alternatives}]
        else:
            found["anyOf"] = alternatives
    return found
