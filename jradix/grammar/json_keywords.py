"""What each keyword of JSON schema means: a schema, or its negation, as branches of value sets. It writes no text.

A schema is a union of branches. Negation is pushed down to the keywords, where it is exact ("not minLength 3" is "a
string of at most 2"), so `not`, `oneOf` and `if` never need the complement of a written language.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any, Callable, Iterable

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar import json_assertions as assertions
from jradix.grammar.json_assertions import EVERY_KEY, Branches, Pairs
from jradix.grammar.json_constants import one_of_values
from jradix.grammar.json_drafts import ANNOTATIONS, GROUPS, drafts_of, is_known
from jradix.grammar.json_numbers import Numbers, decimal
from jradix.grammar.json_references import Conjunction, Document, Literal, Node
from jradix.grammar.json_strings import StringWriter, listed_texts, string_text
from jradix.grammar.json_values import KINDS, Arrays, Branch, Evaluated, KeyRule, Keys, Objects, join

MAX_BRANCHES = 512
_TYPES = {"null": ("null",), "boolean": ("true", "false"), "number": ("number",), "integer": ("number",),
          "string": ("string",), "array": ("array",), "object": ("object",)}


class Keywords:
    """Branches of the schemas of one document, each computed once.

    Args:
      document: the schemas.
      strings: answers membership and emptiness of text languages.
      assert_formats: enforce `format`.
      refuse: called with the place and the reason of what cannot be enforced; raises, or returns to have it ignored.
      note: called with the place of what the specification says to ignore.
    """

    def __init__(self, document: Document, strings: StringWriter, *, assert_formats: bool,
                 refuse: Callable[[str, str], None], note: Callable[[str], None]) -> None:
        self.document, self._strings = document, strings
        self.assert_formats, self.refuse, self.note = assert_formats, refuse, note
        self._branches: dict[Literal, Branches] = {}
        self._active: set[Literal] = set()
        self._empty: dict[Conjunction, bool] = {}

    def of(self, conjunction: Conjunction) -> Branches:
        """Branches of schemas that hold together."""
        branches = [Branch()]
        for literal in conjunction:
            branches = self.product(branches, self.branches(literal), literal.node.path)
        return branches

    def branches(self, literal: Literal) -> Branches:
        """Branches of one schema or of its negation.

        Raises:
          GrammarError: a malformed keyword, one that cannot be enforced, or a reference to itself.
          GrammarTooLarge: more than 512 branches.
        """
        if literal in self._branches:
            return self._branches[literal]
        node, positive = literal
        if literal in self._active:
            raise GrammarError(f"{node.path or '/'}: the schema refers to itself before any value is read; "
                               "no value can decide it")
        if isinstance(node.schema, bool):
            return [Branch()] if node.schema is positive else []
        self._active.add(literal)
        try:
            found = self._all_of(node) if positive else self._none_of(node)
        finally:
            self._active.discard(literal)
        if not positive:
            found = [replace(branch, evaluated=Evaluated()) for branch in found]
        self._branches[literal] = found
        return found

    def conjunction(self, node: Node) -> Conjunction:
        """The conjunction of one schema; of one that says nothing, the empty one."""
        return () if node.schema is True or node.schema == {} else (Literal(node, True),)

    def is_empty(self, conjunction: Conjunction) -> bool:
        """True when no value satisfies all of `conjunction`; False also where that is not found out."""
        if not conjunction:
            return False
        if conjunction not in self._empty:
            self._empty[conjunction] = False
            self._empty[conjunction] = not any(self.is_alive(branch) for branch in self.of(conjunction))
        return self._empty[conjunction]

    def is_alive(self, branch: Branch) -> bool:
        """Does the branch hold a value? True also where that is not found out."""
        kinds = branch.kinds
        if kinds & {"null", "true", "false"} or ("number" in kinds and not branch.number.is_empty):
            return True
        if "string" in kinds and (branch.string is None or not self._strings.is_empty(branch.string)):
            return True
        if "array" in kinds and not any(self.is_empty(branch.array.item(i)) for i in range(min(branch.array.low, 32))):
            if not any(count.low and self.is_empty(count.value) for count in branch.array.counts):
                return True
        return "object" in kinds and not any(self.is_empty(self.value_of(branch.object, name))
                                             for name in branch.object.required)

    def listed(self, conjunction: Conjunction) -> list[str] | None:
        """The texts of all values of `conjunction` where they are few scalars, else None."""
        found: list[str] = []
        for branch in self.of(conjunction):
            kinds, string = branch.kinds, branch.string
            numbers = branch.number.listed if "number" in kinds else []
            if kinds & {"array", "object"} or numbers is None:
                return None
            found += [kind for kind in ("null", "true", "false") if kind in kinds]
            found += [decimal(value) for value in numbers]
            if "string" in kinds:
                words = None if string is None else listed_texts(string)
                if words is None:
                    return None
                found += [string_text(word, "") for word in words]
        return found

    def value_of(self, objects: Objects, name: str) -> Conjunction:
        """What the value of key `name` must satisfy."""
        value: Conjunction = ()
        for rule in objects.rules:
            if rule.keys.contains(name, self._strings.accepts):
                value = join(value, rule.value)
        return value

    # Whole schemas: `unevaluated*` sees what the branch's other keywords looked at

    def _all_of(self, node: Node) -> Branches:
        found = [Branch()]
        for keyword, positive, _ in self._parts(node):
            found = self.product(found, positive(), f"{node.path}/{keyword}")
            if not found:
                return found
        return self._unevaluated(node, found) if _has_unevaluated(node, self.document.draft) else found

    def _none_of(self, node: Node) -> Branches:
        for keyword in ("unevaluatedItems", "unevaluatedProperties"):
            if keyword in node.schema and is_known(keyword, self.document.draft):
                self.refuse(f"{node.path}/{keyword}", "the complement of unevaluated keywords is not enforced")
        found: Branches = []
        for _, _, negative in self._parts(node):
            found += negative()
        return self._bounded(found, node.path)

    def product(self, first: Branches, second: Branches, place: str) -> Branches:
        if len(first) * len(second) > MAX_BRANCHES * 16:
            raise GrammarTooLarge(f"{place or '/'}: {len(first)} x {len(second)} alternatives to combine, more than "
                                  f"{MAX_BRANCHES * 16}; split the schema")
        found = [both for a in first for b in second if (both := a.meet(b)) is not None]
        return self._bounded(found, place)

    def _bounded(self, branches: Branches, place: str) -> Branches:
        if len(branches) > 16:
            branches = [branch for branch in branches if self.is_alive(branch)]
        if len(branches) > MAX_BRANCHES:
            raise GrammarTooLarge(f"{place or '/'}: {len(branches)} alternatives, more than {MAX_BRANCHES}; "
                                  "split the schema")
        return branches

    def _parts(self, node: Node) -> Iterable[tuple[str, Callable[[], Branches], Callable[[], Branches]]]:
        """(keyword, branches that satisfy it, branches that violate it) of each keyword that asserts something."""
        schema, draft = node.schema, self.document.draft
        if "$ref" in schema and draft <= 7:
            schema = {"$ref": schema["$ref"]}
        done: set[str] = set()
        for keyword in schema:
            place = f"{node.path}/{keyword}"
            group = GROUPS.get(keyword, keyword)
            rule = _RULES.get(group)
            if rule is None or not is_known(keyword, draft):
                if keyword not in ANNOTATIONS and not keyword.startswith("unevaluated"):
                    self.note(place)
                continue
            if group in done:
                continue
            done.add(group)
            yield from ((keyword, *pair) for pair in rule(self, node, schema, place))

    # Keywords of any kind

    def _type(self, node: Node, schema: dict[str, Any], place: str) -> Pairs:
        value = schema["type"]
        names = value if isinstance(value, list) else [value]
        if not names or any(not isinstance(name, str) or name not in _TYPES for name in names):
            raise GrammarError(f"{place}: {value!r} given, expected one or several of {', '.join(_TYPES)}")
        kinds = frozenset(kind for name in names for kind in _TYPES[name])
        only_integer = "integer" in names and "number" not in names
        yes = Branch(kinds, number=Numbers(integer=True)) if only_integer else Branch(kinds)
        no = [Branch(KINDS - kinds)] if KINDS - kinds else []
        if only_integer:
            no.append(Branch(frozenset(("number",)), number=Numbers(integer=False)))
        yield (lambda: [yes]), (lambda: no)

    def _enum(self, node: Node, schema: dict[str, Any], place: str) -> Pairs:
        values = schema["enum"]
        if not isinstance(values, list):
            raise GrammarError(f"{place}: {values!r} given, expected an array of values")
        yield one_of_values(self, values, place)

    def _const(self, node: Node, schema: dict[str, Any], place: str) -> Pairs:
        yield one_of_values(self, [schema["const"]], place)

    # Applicators in place

    def _reference(self, node: Node, schema: dict[str, Any], place: str) -> Pairs:
        target = self.document.resolve(node, place.rpartition("/")[2])
        yield (lambda: self.branches(Literal(target, True))), (lambda: self.branches(Literal(target, False)))

    def _all(self, node: Node, schema: dict[str, Any], place: str) -> Pairs:
        for target in self._children(node, "allOf"):
            yield (lambda t=target: self.branches(Literal(t, True))), \
                (lambda t=target: self.branches(Literal(t, False)))

    def _any(self, node: Node, schema: dict[str, Any], place: str) -> Pairs:
        targets = self._children(node, "anyOf")

        def positive() -> Branches:
            found = [branch for target in targets for branch in self.branches(Literal(target, True))]
            if self.document.tracks_evaluation and len(targets) <= 6:
                found = self._with_overlaps(targets, place)
            return self._bounded(found, place)

        yield positive, (lambda: self.of(tuple(Literal(target, False) for target in targets)))

    def _one(self, node: Node, schema: dict[str, Any], place: str) -> Pairs:
        targets = self._children(node, "oneOf")

        def positive() -> Branches:
            found: Branches = []
            for i, target in enumerate(targets):
                for branch in self.branches(Literal(target, True)):
                    found += self._excluding([branch], targets[:i] + targets[i + 1:], place)
            return self._bounded(found, place)

        def negative() -> Branches:
            found = self.of(tuple(Literal(target, False) for target in targets))
            for i, first in enumerate(targets):
                for second in targets[i + 1:]:
                    found = found + self.of((Literal(first, True), Literal(second, True)))
            return self._bounded(found, place)

        yield positive, negative

    def _excluding(self, branches: Branches, targets: list[Node], place: str) -> Branches:
        """`branches` without what satisfies one of `targets`; nothing is computed for those that cannot overlap."""
        for target in targets:
            kept: Branches = []
            for branch in branches:
                overlap = self.product([branch], self.branches(Literal(target, True)), place)
                if any(self.is_alive(shared) for shared in overlap):
                    kept += self.product([branch], self.branches(Literal(target, False)), place)
                else:
                    kept.append(branch)
            branches = self._bounded(kept, place)
        return branches

    def _not(self, node: Node, schema: dict[str, Any], place: str) -> Pairs:
        target = self.document.child(node, "not")
        yield (lambda: self.branches(Literal(target, False))), (lambda: self.branches(Literal(target, True)))

    def _if(self, node: Node, schema: dict[str, Any], place: str) -> Pairs:
        if "if" not in schema or not ("then" in schema or "else" in schema or self.document.tracks_evaluation):
            return
        test = self.document.child(node, "if")

        def side(name: str, positive: bool) -> Branches:
            if name not in schema:
                return [Branch()] if positive else []
            return self.branches(Literal(self.document.child(node, name), positive))

        def both_sides(positive: bool) -> Branches:
            return self._bounded(
                self.product(self.branches(Literal(test, True)), side("then", positive), place)
                + self.product(self.branches(Literal(test, False)), side("else", positive), place), place)

        yield (lambda: both_sides(True)), (lambda: both_sides(False))

    def _with_overlaps(self, targets: list[Node], place: str) -> Branches:
        """Every choice of targets that hold together, since each adds to what is evaluated."""
        found: Branches = []
        for size in range(1, len(targets) + 1):
            for chosen in combinations(targets, size):
                found += self.of(tuple(Literal(target, True) for target in chosen))
        return self._bounded(found, place)

    def _unevaluated(self, node: Node, branches: Branches) -> Branches:
        for keyword in ("unevaluatedItems", "unevaluatedProperties"):
            if keyword in node.schema:
                target = self.document.child(node, keyword)
                close = self._close_items if keyword == "unevaluatedItems" else self._close_keys
                branches = [left for branch in branches if (left := close(branch, target)) is not None]
        return branches

    def _close_items(self, branch: Branch, target: Node) -> Branch | None:
        seen = branch.evaluated
        if seen.all_items:
            return branch
        rest = target
        if seen.matching is not None:
            rest = self.document.either(target, seen.matching[0].node)
        return branch.meet(Branch(array=Arrays(((),) * seen.items, (Literal(rest, True),)),
                                  evaluated=Evaluated(all_items=True)))

    def _close_keys(self, branch: Branch, target: Node) -> Branch | None:
        seen = branch.evaluated.keys
        if EVERY_KEY in seen:
            return branch
        names = frozenset(name for keys in seen for name in keys.names)
        others = Keys(names, tuple(language for keys in seen for language in keys.languages), outside=True)
        return branch.meet(Branch(object=Objects((KeyRule(others, (Literal(target, True),)),)),
                                  evaluated=Evaluated(keys=(EVERY_KEY,))))

    def _children(self, node: Node, keyword: str) -> list[Node]:
        value = node.schema[keyword]
        if not isinstance(value, list) or not value:
            raise GrammarError(f"{node.path}/{keyword}: {value!r} given, expected a non-empty array of schemas")
        return [self.document.child(node, keyword, i) for i in range(len(value))]


def _has_unevaluated(node: Node, draft: int) -> bool:
    return draft >= 2019 and ("unevaluatedProperties" in node.schema or "unevaluatedItems" in node.schema)


Rule = Callable[[Keywords, Node, dict[str, Any], str], Pairs]
_RULES: dict[str, Rule] = {
    "type": Keywords._type, "enum": Keywords._enum, "const": Keywords._const, "$ref": Keywords._reference,
    "$dynamicRef": Keywords._reference, "$recursiveRef": Keywords._reference, "allOf": Keywords._all,
    "anyOf": Keywords._any, "oneOf": Keywords._one, "not": Keywords._not, "if": Keywords._if,
    "minLength": assertions.length_rule, "pattern": assertions.pattern_rule, "format": assertions.format_rule,
    "minimum": assertions.bound_rule, "multipleOf": assertions.multiple_rule, "items": assertions.items_rule,
    "contains": assertions.contains_rule, "minItems": assertions.item_count_rule, "uniqueItems": assertions.unique_rule,
    "properties": assertions.properties_rule, "required": assertions.required_rule,
    "minProperties": assertions.property_count_rule, "propertyNames": assertions.property_names_rule,
    "dependentRequired": assertions.dependency_rule, "dependentSchemas": assertions.dependency_rule,
    "dependencies": assertions.dependency_rule}


def supported_keywords() -> dict[str, tuple[int, int]]:
    """Each enforced keyword with the first and the last draft that has it (2019 and 2020 stand for their drafts)."""
    return {name: drafts_of(name) for name in sorted({*_RULES, *GROUPS, "unevaluatedItems", "unevaluatedProperties"})}
