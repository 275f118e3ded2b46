"""The values that `enum` and `const` list, as branches: scalars at once, arrays and objects part by part."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from jradix.grammar.json_assertions import Branches, arrays, key, objects
from jradix.grammar.json_numbers import Numbers, exact
from jradix.grammar.json_references import Document, Literal
from jradix.grammar.json_strings import texts
from jradix.grammar.json_values import KINDS, Arrays, Branch, KeyRule, Keys, Objects
from jradix.grammar.language import but_not, utf8_strings

if TYPE_CHECKING:
    from jradix.grammar.json_keywords import Keywords


def one_of_values(keywords: Keywords, values: list[Any], place: str
                  ) -> tuple[Callable[[], Branches], Callable[[], Branches]]:
    """Branches that are one of `values`, and branches that are none of them."""
    scalars = [value for value in values if not isinstance(value, (list, dict))]
    nested = [value for value in values if isinstance(value, (list, dict))]
    strings = [value for value in scalars if isinstance(value, str)]
    numbers = frozenset(exact(value, place) for value in scalars
                        if isinstance(value, (int, float)) and not isinstance(value, bool))
    kinds = {{None: "null", True: "true", False: "false"}[value] for value in scalars
             if value is None or isinstance(value, bool)}
    language = texts(strings, place)

    def positive() -> Branches:
        held = kinds | ({"string"} if strings else set()) | ({"number"} if numbers else set())
        found = [Branch(frozenset(held), language, Numbers(only=numbers))] if held else []
        return found + [branch for value in nested for branch in _nested_value(keywords.document, value, place)]

    def negative() -> Branches:
        found = [Branch(KINDS - kinds, but_not(utf8_strings(), language) if strings else None,
                        Numbers(excluded=numbers))]
        for value in nested:
            found = keywords.product(found, _not_nested_value(keywords.document, value, place), place)
        return found

    return positive, negative


def _nested_value(document: Document, value: Any, place: str) -> Branches:
    if isinstance(value, list):
        items = tuple((Literal(document.constant(item, place), True),) for item in value)
        return [Branch(frozenset(("array",)), array=Arrays(items, (), len(value), len(value)))]
    rules = [KeyRule(key(name), (Literal(document.constant(item, place), True),))
             for name, item in value.items()]
    rules.append(KeyRule(Keys(frozenset(value), outside=True), (document.nothing,)))
    return [Branch(frozenset(("object",)), object=Objects(tuple(rules), tuple(value)))]


def _not_nested_value(document: Document, value: Any, place: str) -> Branches:
    if isinstance(value, list):
        found = [Branch(KINDS - {"array"}), arrays(low=len(value) + 1)]
        if value:
            found.append(arrays(high=len(value) - 1))
        for i, item in enumerate(value):
            other = (Literal(document.constant(item, place), False),)
            found.append(arrays(((),) * i + (other,), low=i + 1))
        return found
    found = [Branch(KINDS - {"object"}), objects(some=(KeyRule(Keys(frozenset(value), outside=True), ()),))]
    for name, item in value.items():
        found.append(objects((KeyRule(key(name), (document.nothing,)),)))
        other = (Literal(document.constant(item, place), False),)
        found.append(objects((KeyRule(key(name), other),), (name,)))
    return found
