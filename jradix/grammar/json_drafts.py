"""Which keywords each draft of JSON schema has, which are read together, and which assert nothing."""
from __future__ import annotations

ANNOTATIONS = frozenset((
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "$defs",
    "definitions", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "contentMediaType", "contentEncoding", "contentSchema"))
_SINCE = {"const": 6, "contains": 6, "propertyNames": 6, "if": 7, "then": 7, "else": 7, "minContains": 2019,
          "maxContains": 2019, "dependentRequired": 2019, "dependentSchemas": 2019, "prefixItems": 2020,
          "unevaluatedItems": 2019, "unevaluatedProperties": 2019, "$recursiveRef": 2019,
          "$dynamicRef": 2020}
_UNTIL = {"dependencies": 7, "additionalItems": 2019, "$recursiveRef": 2019}
GROUPS = {"maxLength": "minLength", "maxItems": "minItems", "maxProperties": "minProperties", "maximum": "minimum",
          "exclusiveMinimum": "minimum", "exclusiveMaximum": "minimum", "prefixItems": "items",
          "additionalItems": "items", "minContains": "contains", "maxContains": "contains", "then": "if", "else": "if",
          "patternProperties": "properties", "additionalProperties": "properties"}
"""Keywords that only have a meaning, or an automaton, together: each with the one that names the group."""


def is_known(keyword: str, draft: int) -> bool:
    """Does `draft` (4, 6, 7, 2019 or 2020) define `keyword`, given that some draft does?"""
    return _SINCE.get(keyword, 4) <= draft <= _UNTIL.get(keyword, 2020)


def drafts_of(keyword: str) -> tuple[int, int]:
    """The first and the last draft that has an enforced keyword."""
    return _SINCE.get(keyword, 4), _UNTIL.get(keyword, 2020)
