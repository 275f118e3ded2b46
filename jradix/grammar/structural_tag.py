"""Structural tags: free text in which, once a trigger has been written, one of given structures must follow."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jradix.errors import GrammarError
from jradix.grammar.json_schema import JsonOptions
from jradix.grammar.matcher import MatcherSource, lark_source
from jradix.grammar.matcher_schema import json_matcher, json_rule
from jradix.grammar.rust_regex import rust_text

FORM = ('expected {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], '
        '"triggers": ["<f"]}')


def structural_tag_matcher(tag: Mapping[str, Any], options: JsonOptions = JsonOptions()) -> MatcherSource:
    """Free text with structures in it.

    Args:
      tag: {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}. Each `begin`
        starts with one of the triggers; after a trigger, one of the structures that begin with it must follow.
      options: how the JSON of the structures is written.

    Raises:
      GrammarError: another form, or a trigger or begin that does not fit the others; it is named.
      GrammarUnsupported: a schema that the matcher cannot enforce; with its structure.
    """
    if not isinstance(tag, Mapping) or tag.get("type") != "structural_tag":
        raise GrammarError(f"structural_tag={str(tag)[:80]}: {FORM}")
    if "format" in tag:
        raise GrammarError('structural_tag: the form with "format" is not read; ' + FORM)
    unknown = sorted(set(tag) - {"type", "structures", "triggers"})
    if unknown:
        raise GrammarError(f"structural_tag: unknown field {unknown[0]!r}; {FORM}")
    triggers = _triggers(tag.get("triggers"))
    bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    structures = tag.get("structures")
    if not isinstance(structures, (list, tuple)) or not structures:
        raise GrammarError(f"structural_tag: structures={str(structures)[:60]}; {FORM}")
    for index, structure in enumerate(structures):
        trigger, body = _structure(structure, f"structures[{index}]", triggers, options)
        bodies[trigger].append(body)
    unused = [trigger for trigger, found in bodies.items() if not found]
    if unused:
        raise GrammarError(f"structural_tag: no structure begins with the trigger {unused[0]!r}; leave it out")
    lines = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(triggers)))})* TEXT", r"TEXT: /(?s:.)*/"]
    for i, (trigger, found) in enumerate(bodies.items()):
        lines += [f"head_{i}[lazy]: /(?s:.)*{rust_text(trigger)}/", f"tag_{i}: head_{i} ({' | '.join(found)})"]
    return lark_source("\n".join(lines), "structural_tag")


def _triggers(given: Any) -> list[str]:
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(one, str) and one for one in given):
        raise GrammarError(f"structural_tag: triggers={str(given)[:60]}: expected a list of non-empty texts")
    for one in given:
        inside = [other for other in given if other != one and other in one]
        if inside:
            raise GrammarError(f"structural_tag: the trigger {inside[0]!r} is part of the trigger {one!r}, which so "
                               "could never be written; give one of them")
    return list(dict.fromkeys(given))


def _structure(structure: Any, place: str, triggers: list[str], options: JsonOptions) -> tuple[str, str]:
    """The trigger of a structure, and in Lark what follows it."""
    if not isinstance(structure, Mapping) or set(structure) != {"begin", "schema", "end"} \
            or not isinstance(structure["begin"], str) or not isinstance(structure["end"], str):
        raise GrammarError(f"structural_tag: {place}={str(structure)[:80]}: expected begin and end as texts, and a "
                           "schema")
    begin = structure["begin"]
    trigger = next((one for one in triggers if begin.startswith(one)), None)
    if trigger is None:
        raise GrammarError(f"structural_tag: {place}: begin={begin!r} starts with none of the triggers {triggers}")
    try:
        json_matcher(structure["schema"], options)
        rule = json_rule(structure["schema"], options)
    except GrammarError as error:
        raise type(error)(f"structural_tag: {place}: {error}") from None
    parts = (_literal(begin[len(trigger):]), f"%json {rule}", _literal(structure["end"]))
    return trigger, " ".join(part for part in parts if part)


def _literal(value: str) -> str:
    return f"/{rust_text(value)}/" if value else ""
