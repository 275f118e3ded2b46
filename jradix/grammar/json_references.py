"""The schema document: its draft, its nodes, and where a `$ref` leads. It reads only keywords that name places."""
from __future__ import annotations

import hashlib
import json
from typing import Any, Iterator, NamedTuple
from urllib.parse import unquote, urljoin

from jradix.errors import GrammarError, GrammarTooLarge, GrammarUnsupported

MAX_NESTING = 96
DRAFTS = {"draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020}

_ONE = ("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")

_REFERENCE_ONLY = frozenset(("$ref", "$schema", "$comment", "$defs", "definitions", "title", "description", "default",
                             "examples", "deprecated"))


class Node:
    """One schema of the document. Equal schemas under one base URI are one node, so that nodes compare by identity."""
    __slots__ = ("schema", "base", "path")

    def __init__(self, schema: Any, base: str, path: str) -> None:
        self.schema, self.base, self.path = schema, base, path

    def __repr__(self) -> str:
        return f"Node({self.path or '/'})"


class Literal(NamedTuple):
    """A node, or its negation."""
    node: Node
    positive: bool


Conjunction = tuple[Literal, ...]
"""Schemas and negated schemas a value must satisfy together; empty: any value."""


class Document:
    """Nodes and references of one schema document.

    Args:
      schema: the root schema, an object or a boolean.

    Raises:
      GrammarError: not a schema, or an unknown `$schema`.
      GrammarTooLarge: nested deeper than 96 levels.
    """

    def __init__(self, schema: Any) -> None:
        if not isinstance(schema, (dict, bool)):
            raise GrammarError(f"schema of type {type(schema).__name__}: expected an object or a boolean")
        _check_nesting(schema)
        self.draft = _draft(schema)
        self.tracks_evaluation = False
        self._nodes: dict[tuple[str, bytes], Node] = {}
        self._known: dict[int, Node] = {}
        self._bases: dict[int, str] = {}
        self._resources: dict[str, tuple[Any, str]] = {"": (schema, "")}
        self._anchors: dict[tuple[str, str], tuple[Any, str]] = {}
        self._dynamic: dict[str, int] = {}
        self._keep: list[Any] = []
        self._register(schema, "", "")
        self.root = self._followed(self.node(schema, self._bases.get(id(schema), ""), ""))
        self.nothing = Literal(self.node(False, "", ""), True)

    def node(self, schema: Any, base: str, path: str) -> Node:
        """The node of a schema found at `path`; `base` is the URI of the resource around it."""
        if not isinstance(schema, (dict, bool)) or (self.draft == 4 and isinstance(schema, bool) and path
                                                    and not path.endswith(("Properties", "Items"))):
            raise GrammarError(f"{path or '/'}: {schema!r} is no schema of this draft; expected an object"
                               + ("" if self.draft == 4 else " or a boolean"))
        if isinstance(schema, dict):
            found = self._known.get(id(schema))
            if found is not None:
                return found
            base = self._bases.get(id(schema), base)
        try:
            text = json.dumps(schema, ensure_ascii=True)
        except (TypeError, ValueError) as error:
            raise GrammarError(f"{path or '/'}: the schema is not JSON ({error}); expected JSON values only") from None
        key = base, hashlib.blake2b(text.encode(), digest_size=16).digest()
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(schema, base, path)
        if isinstance(schema, dict):
            self._known[id(schema)] = node
            self._keep.append(schema)
        return node

    def base_of(self, schema: dict[str, Any], around: str) -> str:
        """The URI of the resource a schema of the document belongs to; `around` for one not registered."""
        return self._bases.get(id(schema), around)

    def child(self, node: Node, *keys: str | int) -> Node:
        """The schema at `keys` below `node`."""
        schema: Any = node.schema
        for key in keys:
            schema = schema[key]
        return self._followed(self.node(schema, node.base, node.path + "".join(f"/{_escape(key)}" for key in keys)))

    def _followed(self, node: Node) -> Node:
        """What a schema stands for that is nothing but a `$ref`: a definition is one node wherever it is used."""
        seen = {node}
        while isinstance(node.schema, dict) and "$ref" in node.schema \
                and (self.draft <= 7 or node.schema.keys() <= _REFERENCE_ONLY):
            target = self.resolve(node, "$ref")
            if target in seen:
                return node
            seen.add(target)
            node = target
        return node

    def constant(self, value: Any, path: str) -> Node:
        """A node that says `const: value`."""
        return self.node({"const": value}, "", path)

    def either(self, first: Node, second: Node) -> Node:
        """A node that says `anyOf` of the two."""
        if first.base != second.base:
            raise GrammarUnsupported(f"{first.path}: combined with {second.path} of another resource; "
                                     "put both into one")
        return self.node({"anyOf": [first.schema, second.schema]}, first.base, first.path)

    def resolve(self, node: Node, keyword: str) -> Node:
        """The node that `$ref` or `$dynamicRef` of `node` names. Raises GrammarError if it is not in this document."""
        reference, place = node.schema[keyword], f"{node.path}/{keyword}"
        if not isinstance(reference, str):
            raise GrammarError(f"{place}: {reference!r} given, expected a URI reference")
        target = node.base + reference if reference.startswith("#") else urljoin(node.base, reference)
        resource, _, fragment = target.partition("#")
        if resource not in self._resources:
            raise GrammarError(f"{place}: {reference!r} is not in this document; remote schemas are never fetched, "
                               "copy it into $defs")
        if keyword != "$ref":
            self._refuse_dynamic(reference, fragment, place)
        schema, path = self._resources[resource]
        base = self._bases.get(id(schema), resource)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if (resource, fragment) not in self._anchors:
                raise GrammarError(f"{place}: no anchor {fragment!r} in this document")
            schema, path = self._anchors[resource, fragment]
            return self.node(schema, base, path)
        for part in fragment.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            base = self._bases.get(id(schema), base)
            if isinstance(schema, dict) and part in schema:
                schema = schema[part]
            elif isinstance(schema, list) and part.isdecimal() and int(part) < len(schema):
                schema = schema[int(part)]
            else:
                raise GrammarError(f"{place}: {reference!r} leads nowhere, there is no {part!r} at {path or '/'}")
            path += "/" + _escape(part)
        return self.node(schema, base, path)

    def _refuse_dynamic(self, reference: str, fragment: str, place: str) -> None:
        """A dynamic reference is a plain one when no other resource could catch it."""
        places = self._dynamic.get(fragment, 0)
        if places > 1:
            raise GrammarUnsupported(f"{place}: {reference!r} depends on the dynamic scope, which no automaton "
                                     "follows; use $ref")

    def _register(self, schema: Any, base: str, path: str) -> None:
        if not isinstance(schema, dict):
            return
        draft = self.draft
        overridden = draft <= 7 and "$ref" in schema
        identifier = schema.get("id" if draft == 4 else "$id")
        if isinstance(identifier, str) and not overridden:
            if identifier.startswith("#") and draft <= 7:
                self._anchors[base, identifier[1:]] = schema, path
            else:
                base = urljoin(base, identifier).removesuffix("#")
                self._resources[base] = schema, path
        self._bases[id(schema)] = base
        self._keep.append(schema)
        self.tracks_evaluation |= "unevaluatedProperties" in schema or "unevaluatedItems" in schema
        for keyword in ("$anchor", "$dynamicAnchor") if draft >= 2019 else ():
            if isinstance(schema.get(keyword), str):
                self._anchors[base, schema[keyword]] = schema, path
                if keyword == "$dynamicAnchor":
                    self._dynamic[schema[keyword]] = self._dynamic.get(schema[keyword], 0) + 1
        if schema.get("$recursiveAnchor") is True and draft == 2019:
            self._dynamic[""] = self._dynamic.get("", 0) + 1
        for value, place in below(schema):
            self._register(value, base, path + place)


def below(schema: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """The schemas directly inside one, each with its place in it."""
    for keyword in _ONE:
        if isinstance(schema.get(keyword), dict):
            yield schema[keyword], f"/{keyword}"
    for keyword in _LIST:
        if isinstance(schema.get(keyword), list):
            for index, value in enumerate(schema[keyword]):
                yield value, f"/{keyword}/{index}"
    for keyword in _MAP:
        if isinstance(schema.get(keyword), dict):
            for name, value in schema[keyword].items():
                yield value, f"/{keyword}/{_escape(name)}"


def _escape(key: str | int) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")


def _draft(schema: Any) -> int:
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if named is None:
        return 2020
    if isinstance(named, str):
        for text, draft in DRAFTS.items():
            if named.rstrip("#").endswith(f"json-schema.org/{text}/schema") or \
                    named.rstrip("#").endswith(f"json-schema.org/draft/{text}/schema"):
                return draft
        if named.rstrip("#") in ("http://json-schema.org/schema", "https://json-schema.org/schema"):
            return 2020
    raise GrammarError(f"/$schema: {named!r} is not known; known drafts: {', '.join(DRAFTS)}")


def _check_nesting(schema: Any) -> None:
    level, depth = [schema], 0
    while level:
        if depth > MAX_NESTING:
            raise GrammarTooLarge(f"the schema is nested deeper than {MAX_NESTING} levels; flatten it with $defs")
        level = [value for item in level if isinstance(item, (dict, list))
                 for value in (item.values() if isinstance(item, dict) else item)]
        depth += 1
