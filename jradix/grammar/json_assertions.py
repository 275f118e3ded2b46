"""The keywords that speak of one kind of value: strings, numbers, arrays, objects; each with its exact negation.

Every rule yields pairs (branches that satisfy the keyword, branches that violate it), as functions so that a negation
nobody asks for is never built. `keywords` is the `Keywords` of the document.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterator

from jradix.errors import GrammarError
from jradix.grammar.json_formats import FORMATS, UNSUPPORTED, format_language
from jradix.grammar.json_numbers import Numbers, exact
from jradix.grammar.json_references import Conjunction, Literal, Node
from jradix.grammar.json_strings import is_count
from jradix.grammar.json_values import Arrays, Branch, Count, Evaluated, KeyRule, Keys, Objects
from jradix.grammar.language import Lang, alt, any_char, but_not, nothing, repeat, utf8_strings
from jradix.grammar.regex import parse_regex

if TYPE_CHECKING:
    from jradix.grammar.json_keywords import Keywords

Branches = list[Branch]
Pairs = Iterator[tuple[Callable[[], Branches], Callable[[], Branches]]]
_STRING, _NUMBER, _ARRAY, _OBJECT = (frozenset((kind,)) for kind in ("string", "number", "array", "object"))
EVERY_KEY = Keys(outside=True)


def arrays(prefix: tuple[Conjunction, ...] = (), rest: Conjunction = (), low: int = 0, high: int | None = None,
           counts: tuple[Count, ...] = ()) -> Branch:
    """Only arrays, those."""
    return Branch(_ARRAY, array=Arrays(prefix, rest, low, high, counts))


def objects(rules: tuple[KeyRule, ...] = (), required: tuple[str, ...] = (), low: int = 0, high: int | None = None,
            some: tuple[KeyRule, ...] = ()) -> Branch:
    """Only objects, those."""
    return Branch(_OBJECT, object=Objects(rules, required, low, high, some))


def key(name: str) -> Keys:
    """The one key `name`."""
    return Keys(frozenset((name,)))


# Strings

def _texts(language: Lang, complement: Lang | None = None) -> tuple[Callable[[], Branches], Callable[[], Branches]]:
    other = but_not(utf8_strings(), language) if complement is None else complement
    return (lambda: [Branch(string=language)]), (lambda: [] if other.is_nothing else [Branch(_STRING, string=other)])


def length_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    low, high = _bounds(node, schema, "minLength", "maxLength")
    if high is not None and low > high:
        yield _texts(nothing(), utf8_strings())
        return
    shorter = repeat(any_char(), 0, low - 1) if low else nothing()
    longer = nothing() if high is None else repeat(any_char(), high + 1)
    if low or high is not None:
        yield _texts(repeat(any_char(), low, high), alt(shorter, longer))


def pattern_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    yield _texts(pattern_language(schema["pattern"], place))


def format_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    name = schema["format"]
    if not isinstance(name, str):
        raise GrammarError(f"{place}: {name!r} given, expected a string")
    if keywords.assert_formats and name in FORMATS:
        yield _texts(format_language(name))
    elif keywords.assert_formats and name in UNSUPPORTED:
        keywords.refuse(place, f"format {name!r} is not enforced")
    else:
        keywords.note(place)


def pattern_language(pattern: Any, place: str) -> Lang:
    """The texts that contain a match of an ECMA `pattern`. Raises GrammarError with the place."""
    if not isinstance(pattern, str):
        raise GrammarError(f"{place}: {pattern!r} given, expected a regular expression")
    try:
        return parse_regex(pattern, anchored=False, dialect="ecma")
    except GrammarError as error:
        raise type(error)(f"{place}: {error}") from None


# Numbers

def _numbers(held: Numbers, *others: Numbers) -> tuple[Callable[[], Branches], Callable[[], Branches]]:
    return (lambda: [Branch(number=held)]), (lambda: [Branch(_NUMBER, number=other) for other in others])


def bound_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    for plain, strict, is_low in (("minimum", "exclusiveMinimum", True), ("maximum", "exclusiveMaximum", False)):
        open_flag = False
        if keywords.document.draft == 4 and strict in schema:
            open_flag = schema[strict]
            if not isinstance(open_flag, bool):
                raise GrammarError(f"{node.path}/{strict}: {open_flag!r} given, expected true or false in draft-04")
        for keyword in (plain, strict):
            if keyword not in schema or (keyword == strict and keywords.document.draft == 4):
                continue
            bound, is_open = exact(schema[keyword], f"{node.path}/{keyword}"), open_flag or keyword == strict
            below = Numbers(high=bound, high_open=is_open if not is_low else not is_open)
            above = Numbers(low=bound, low_open=is_open if is_low else not is_open)
            yield _numbers(above, below) if is_low else _numbers(below, above)


def multiple_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    step = exact(schema["multipleOf"], place)
    if step <= 0:
        raise GrammarError(f"{place}: {schema['multipleOf']!r} given, expected a number > 0")
    yield _numbers(Numbers(multiples=frozenset((step,))), Numbers(not_multiples=frozenset((step,))))


# Arrays

def items_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    new = keywords.document.draft == 2020
    listed = "prefixItems" if new else "items"
    prefix: list[Node] = []
    if isinstance(schema.get(listed), list):
        prefix = [keywords.document.child(node, listed, i) for i in range(len(schema[listed]))]
    elif new and listed in schema:
        raise GrammarError(f"{node.path}/{listed}: {schema[listed]!r} given, expected an array of schemas")
    after = "items" if new or not isinstance(schema.get("items"), list) else "additionalItems"
    rest = keywords.document.child(node, after) if after in schema else None
    held = tuple((Literal(item, True),) for item in prefix)
    evaluated = Evaluated(items=len(prefix), all_items=rest is not None)
    yes = Branch(array=Arrays(held, (Literal(rest, True),) if rest else ()), evaluated=evaluated)

    def violated() -> Branches:
        found = [arrays(((),) * i + ((Literal(item, False),),), low=i + 1) for i, item in enumerate(prefix)]
        if rest is not None and not prefix:
            found.append(arrays(counts=(Count((Literal(rest, False),), 1, None),)))
        elif rest is not None:
            found.append(arrays(((),) * len(prefix), low=len(prefix) + 1,
                                counts=(Count((Literal(rest, False),), 1, None, len(prefix)),)))
        return found

    yield (lambda: [yes]), violated


def contains_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    if "contains" not in schema:
        return
    counted = keywords.document.draft >= 2019
    low, high = _bounds(node, schema if counted else {}, "minContains", "maxContains")
    low = low if counted and "minContains" in schema else 1
    value = (Literal(keywords.document.child(node, "contains"), True),)
    seen = Evaluated(matching=value if keywords.document.draft == 2020 else None)
    if high is not None and high < low:
        yield (lambda: [Branch(frozenset(set(Branch().kinds) - {"array"}))]), (lambda: [Branch(_ARRAY)])
        return
    other = [arrays(counts=(Count(value, 0, low - 1),))] if low else []
    if high is not None:
        other.append(arrays(counts=(Count(value, high + 1, None),)))
    yes = Branch(array=Arrays(counts=(Count(value, low, high),) if low or high is not None else ()), evaluated=seen)
    yield (lambda: [yes]), (lambda: other)


def item_count_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    low, high = _bounds(node, schema, "minItems", "maxItems")
    other = [arrays(high=low - 1)] if low else []
    if high is not None:
        other.append(arrays(low=high + 1))
    yield (lambda: [Branch(array=Arrays(low=low, high=high))]), (lambda: other)


def unique_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    if not isinstance(schema["uniqueItems"], bool):
        raise GrammarError(f"{place}: {schema['uniqueItems']!r} given, expected true or false")

    def violated() -> Branches:
        keywords.refuse(place, "arrays with a repeated item are not enforced")
        return [arrays()]

    if schema["uniqueItems"]:
        yield (lambda: [Branch(array=Arrays(unique=place))]), violated


# Objects

def properties_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    document = keywords.document
    rules: list[tuple[Keys, Node]] = []
    for keyword in ("properties", "patternProperties"):
        if not isinstance(schema.get(keyword, {}), dict):
            raise GrammarError(f"{node.path}/{keyword}: {schema[keyword]!r} given, expected an object of schemas")
    for name in schema.get("properties", {}):
        rules.append((key(name), document.child(node, "properties", name)))
    for pattern in schema.get("patternProperties", {}):
        language = pattern_language(pattern, f"{node.path}/patternProperties/{pattern}")
        rules.append((Keys(languages=(language,)), document.child(node, "patternProperties", pattern)))
    seen = tuple(keys for keys, _ in rules)
    if "additionalProperties" in schema:
        names = frozenset().union(*(keys.names for keys in seen)) if seen else frozenset()
        others = Keys(names, tuple(language for keys in seen for language in keys.languages), outside=True)
        rules.append((others, document.child(node, "additionalProperties")))
        seen = (EVERY_KEY,)
    yes = Branch(object=Objects(tuple(KeyRule(keys, (Literal(value, True),)) for keys, value in rules)),
                 evaluated=Evaluated(keys=seen))

    def violated() -> Branches:
        found = []
        for keys, value in rules:
            other = KeyRule(keys, (Literal(value, False),))
            found.append(objects((other,), tuple(keys.names)) if keys.is_finite else objects(some=(other,)))
        return found

    yield (lambda: [yes]), violated


def required_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    names = _names(schema["required"], place)
    absent = (keywords.document.nothing,)
    yield (lambda: [Branch(object=Objects(required=names))]), \
        (lambda: [objects((KeyRule(key(name), absent),)) for name in names])


def property_count_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    low, high = _bounds(node, schema, "minProperties", "maxProperties")
    other = [objects(high=low - 1)] if low else []
    if high is not None:
        other.append(objects(low=high + 1))
    yield (lambda: [Branch(object=Objects(low=low, high=high))]), (lambda: other)


def property_names_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    target = keywords.document.child(node, "propertyNames")

    def others() -> Keys | None:
        found = [branch for branch in keywords.branches(Literal(target, True)) if "string" in branch.kinds]
        if any(branch.string is None for branch in found):
            return None
        return Keys(languages=tuple(branch.string for branch in found), outside=True)

    def satisfied() -> Branches:
        bad = others()
        return [Branch(object=Objects((KeyRule(bad, (keywords.document.nothing,)),) if bad else ()))]

    def violated() -> Branches:
        bad = others()
        return [objects(some=(KeyRule(bad, ()),))] if bad else []

    yield satisfied, violated


def dependency_rule(keywords: Keywords, node: Node, schema: dict[str, Any], place: str) -> Pairs:
    """dependentRequired, dependentSchemas and the older dependencies, which mixes them."""
    keyword = place.rpartition("/")[2]
    if not isinstance(schema[keyword], dict):
        raise GrammarError(f"{place}: {schema[keyword]!r} given, expected an object")
    for name, value in schema[keyword].items():
        absent = Branch(object=Objects((KeyRule(key(name), (keywords.document.nothing,)),)))
        if keyword == "dependentRequired" or (keyword == "dependencies" and isinstance(value, (list, str))):
            names = _names([value] if isinstance(value, str) else value, f"{place}/{name}")
            together = objects(required=(name, *(other for other in names if other != name)))
            other = [objects((KeyRule(key(missing), (keywords.document.nothing,)),), (name,))
                     for missing in names if missing != name]
            yield (lambda a=absent, t=together: [a, t]), (lambda o=other: o)
        else:
            target = keywords.document.child(node, keyword, name)
            present = [objects(required=(name,))]
            yield (lambda a=absent, p=present, t=target:
                   [a] + keywords.product(p, keywords.branches(Literal(t, True)), place)), \
                (lambda p=present, t=target: keywords.product(p, keywords.branches(Literal(t, False)), place))


def _names(value: Any, place: str) -> tuple[str, ...]:
    if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
        raise GrammarError(f"{place}: {value!r} given, expected an array of property names")
    return tuple(dict.fromkeys(value))


def _bounds(node: Node, schema: dict[str, Any], low: str, high: str) -> tuple[int, int | None]:
    for keyword in (low, high):
        if keyword in schema and not is_count(schema[keyword]):
            raise GrammarError(f"{node.path}/{keyword}: {schema[keyword]!r} given, expected an integer >= 0")
    return int(schema.get(low, 0)), int(schema[high]) if high in schema else None
