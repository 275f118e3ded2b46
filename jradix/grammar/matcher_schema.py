"""JSON schemas for the matcher: rewritten, so that llguidance never accepts what they refuse.

What it reads by other rules than JSON schema's is put into words that leave no choice: patterns as explicit ranges,
formats as patterns, keywords that the draft does not have left out. The rewritten schema may allow less than the given
one, never more; what cannot be rewritten so is refused.
"""
from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from jradix.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from jradix.grammar.json_drafts import is_known
from jradix.grammar.json_exclusive import exclusive_as_any
from jradix.grammar.json_formats import FORMATS, UNSUPPORTED, format_language
from jradix.grammar.json_numbers import decimal, exact
from jradix.grammar.json_references import Document
from jradix.grammar.json_schema import JsonOptions
from jradix.grammar.matcher import MatcherSource, lark_source
from jradix.grammar.rust_regex import rust_ascii, rust_regex, rust_text

ONE = frozenset(("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames",
                 "then", "unevaluatedItems", "unevaluatedProperties"))
MANY = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
NAMED = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"))
PLACES_BESIDE_REF = frozenset(("$ref", "$schema", "$id", "id", "$defs", "definitions"))
SAME_VALUE = ("allOf", "anyOf", "oneOf", "$ref")
# Characters whose only spelling in JSON is \uXXXX. With it keys could be spelled in two ways, so it is switched off,
# and llguidance then leaves these characters out of what it writes.
UNWRITTEN = ((0, 7), (11, 11), (14, 31))
ESCAPED_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")
MAX_REMAINDERS = 140_000    # that llguidance follows for multiples, in up to a second each time it reads the schema
MAX_MULTIPLE = 400_000_000  # in units of its last decimal place; beyond, llguidance's 32 bits for a remainder overflow
ESCAPES = 'nrbtf\\"'        # one spelling per character, so that no key passes for another
OWN_FORMATS = frozenset(("hostname",))      # that llguidance reads as we do, or more narrowly


def json_matcher(schema: Any, options: JsonOptions = JsonOptions()) -> MatcherSource:
    """The JSON texts that satisfy `schema`, to any depth.

    Raises:
      GrammarError: malformed, or unsatisfiable.
      GrammarUnsupported: a keyword or an option that llguidance cannot enforce; it is named.
      GrammarTooLarge: beyond its limits.
    """
    if options.strict:      # oneOf is exclusive before the objects are closed
        json_matcher(schema, replace(options, strict=False))
    return lark_source(f"start: %json {json_rule(schema, options)}", "json_schema")


def json_rule(schema: Any, options: JsonOptions) -> str:
    """`schema` as it stands after `%json` in a Lark grammar. Raises what `portable_schema` raises."""
    try:
        schema = exclusive_as_any(schema)
    except RecursionError:
        raise GrammarTooLarge("the schema is nested too deeply; flatten it") from None
    written = portable_schema(schema, options) | {"x-guidance": _guidance(options)}
    try:
        return json.dumps(written, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON ({error}); expected JSON values only") from None


def portable_schema(schema: Any, options: JsonOptions) -> Any:
    """A schema that means to llguidance at most what `schema` means by its draft and by `options`.

    Raises:
      GrammarError: not a schema, an unknown draft, or a malformed pattern.
      GrammarTooLarge: nested deeper than 96 levels.
      GrammarUnsupported: an option or a keyword that cannot be put into llguidance's words.
    """
    if options.property_order != "declared":
        raise GrammarUnsupported(f"property_order={options.property_order!r}: the matcher writes declared properties "
                                 "in declared order; leave the option out")
    writer = _Writer(Document(schema).draft, options)
    if schema is False:
        raise GrammarError("the schema is unsatisfiable: it is false")
    found = {} if schema is True else writer.written(schema, "")
    _check_multiples(writer.multiples, is_joined=writer.has_joins)
    for reference, path in writer.references:
        if writer.has_inner_base and reference != "#" and not reference.startswith("#/"):
            raise GrammarUnsupported(f"{path}: {reference!r} beside inner base URIs is not followed by the matcher; "
                                     "use a reference such as '#/$defs/name'")
        _check_reference(schema, reference, path, writer.places)
    return found


class _Writer:
    """Rewrites one document.

    Attributes:
      places: ids of the schemas found.
      references: (`$ref`, path) of all that count.
      multiples: place and value of each `multipleOf`.
      has_joins: several schemas may speak of one value.
      has_inner_base: some schema below the root has a base URI of its own; it is left out.
    """

    def __init__(self, draft: int, options: JsonOptions) -> None:
        self._draft, self._options = draft, options
        self.places: set[int] = set()
        self.references: list[tuple[str, str]] = []
        self.multiples: list[tuple[str, Any]] = []
        self.has_joins = False
        self.has_inner_base = False
        self._inner_base: str | None = None         # path of a base URI around the present schema, the root's aside

    def written(self, schema: Any, path: str) -> Any:
        """The schema at `path`, rewritten."""
        if not isinstance(schema, dict):
            return schema
        self.places.add(id(schema))
        if self._draft <= 7 and "$ref" in schema:       # whatever stands beside it says nothing
            schema = {key: value for key, value in schema.items() if key in PLACES_BESIDE_REF}
        identifier = "id" if self._draft == 4 else "$id"
        outer, is_inner = self._inner_base, bool(path) and identifier in schema
        self.has_inner_base |= is_inner
        self._inner_base = f"{path}/{identifier}" if is_inner else outer
        if isinstance(schema.get("$ref"), str):
            if self._inner_base:
                raise GrammarUnsupported(f"{path}/$ref: a reference below {self._inner_base} is not followed by the "
                                         "matcher; use $defs of the whole schema")
            self.references.append((schema["$ref"], f"{path}/$ref"))
        found: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword == "x-guidance" or not is_known(keyword, self._draft) or (is_inner and keyword == identifier):
                continue
            place = f"{path}/{keyword}"
            if keyword in ("const", "enum", "required"):
                _check_written(value, place)
            if keyword == "format":
                self._add_format(value, place, found)
            elif keyword == "pattern":
                _add_pattern(_pattern(value, place), found)
            elif keyword in MANY and isinstance(value, list):
                # What was added to an allOf stays behind its own, so that references into it hold
                found[keyword] = [self.written(one, f"{place}/{i}") for i, one in enumerate(value)] + \
                    found.get(keyword, [])
            elif keyword in ONE:
                found[keyword] = self.written(value, place)
            elif keyword in NAMED and isinstance(value, dict):
                found[keyword] = self._named(keyword, value, place)
            else:
                found[keyword] = value
        self._inner_base = outer
        found = self._closed(found, path) if self._options.strict else found
        if not self._options.lenient:
            _check_least_properties(found, path)
        if "multipleOf" in found:
            self.multiples.append((f"{path}/multipleOf", found["multipleOf"]))
        self.has_joins |= any(keyword in found for keyword in SAME_VALUE)
        return found

    def _named(self, keyword: str, schemas: dict[str, Any], place: str) -> dict[str, Any]:
        if keyword != "patternProperties":
            if keyword == "properties":
                _check_written(list(schemas), place)
            return {name: self.written(one, f"{place}/{name}") for name, one in schemas.items()}
        found: dict[str, Any] = {}
        for pattern, one in schemas.items():
            spelled = _pattern(pattern, place)
            if spelled in found:
                raise GrammarUnsupported(f"{place}: {pattern!r} stands for the same keys as another pattern; join them")
            found[spelled] = self.written(one, f"{place}/{pattern}")
        return found

    def _add_format(self, name: Any, place: str, found: dict[str, Any]) -> None:
        if not self._options.formats or not isinstance(name, str) or name not in FORMATS | UNSUPPORTED:
            return                                      # an annotation
        if name in OWN_FORMATS:
            found["format"] = name
            return
        spelled = rust_ascii(format_language(name)) if name in FORMATS else None
        if spelled is not None:
            _add_pattern(f"^(?:{spelled})$", found)
        elif not self._options.lenient:
            raise GrammarUnsupported(f"{place}: format {name!r} is not followed by the matcher; leave it out, or pass "
                                     "formats=False")

    def _closed(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """The schema of an object that allows declared keys only, where it declares any."""
        declares = bool(schema.get("properties") or schema.get("required") or schema.get("patternProperties"))
        same = [keyword for keyword in SAME_VALUE if keyword in schema]
        if len(same) + declares > 1 or len(schema.get("allOf", ())) > 1:
            raise GrammarUnsupported(f"{path or '/'}: strict=True where {' and '.join(same)} "
                                     f"{'and properties ' if declares else ''}speak of one value is not followed by "
                                     "the matcher; write additionalProperties yourself")
        if not declares or "additionalProperties" in schema or "unevaluatedProperties" in schema:
            return schema
        if "patternProperties" not in schema:
            declared, required = schema.get("properties", {}), schema.get("required", ())
            schema["properties"] = declared | {name: True for name in required if name not in declared}
        return schema | {"additionalProperties": False}


def _pattern(pattern: Any, place: str) -> str:
    if not isinstance(pattern, str):
        raise GrammarError(f"{place}: {pattern!r} given, expected a regular expression")
    try:
        return f"^(?:{rust_regex(pattern, dialect='ecma', is_search=True, excluded=UNWRITTEN)})$"
    except GrammarError as error:
        raise type(error)(f"{place}: {error}") from None


def _check_least_properties(schema: dict[str, Any], path: str) -> None:
    """Refuses what only undeclared keys could fulfil: they may repeat in the text, and a reader keeps one of them."""
    least, declared = schema.get("minProperties"), schema.get("properties")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    required = {name for name in schema.get("required", ()) if isinstance(name, str) and name in declared} \
        if isinstance(declared, dict) and isinstance(schema.get("required"), list) else set()
    if isinstance(least, (int, float)) and least > len(required) + 1 and not is_closed:
        raise GrammarUnsupported(f"{path}/minProperties: {least} properties, of which only {len(required)} are "
                                 "declared and required; the matcher does not tell others apart")


def _check_multiples(multiples: list[tuple[str, Any]], *, is_joined: bool) -> None:
    """Bounds the states of `multipleOf`: one for each remainder; where multiples meet, of their common multiple."""
    found: dict[int, str] = {}
    steps = [exact(value, place) for place, value in multiples]
    unit = 10 ** max((len(decimal(step).partition(".")[2]) for step in steps), default=0)
    scaled = [int(abs(step) * unit) for step in steps]
    if max(unit, *scaled, math.lcm(*scaled) if is_joined else 0) > MAX_MULTIPLE:
        raise GrammarTooLarge(f"{multiples[scaled.index(max(scaled))][0]}: a multiple, or a common one, of more than "
                              f"{MAX_MULTIPLE:,} units of the last decimal place; use a rounder number")
    for (place, _), step in zip(multiples, scaled):
        found.setdefault(int(str(step).strip("0") or "0"), place)       # powers of ten cost nothing
    common = math.lcm(*found)
    if (sum(found) if common > MAX_REMAINDERS and not is_joined else common) > MAX_REMAINDERS:
        largest = max(found)
        others = " with the other multiples" if largest <= MAX_REMAINDERS else ""
        raise GrammarTooLarge(f"{found[largest]}: more than {MAX_REMAINDERS:,} remainders to follow{others}; "
                              "use a rounder number")


def _check_written(value: Any, place: str) -> None:
    if ESCAPED_CONTROL.search(json.dumps(value, ensure_ascii=False)):
        raise GrammarUnsupported(f"{place}: a control character that JSON can only spell as \\u00XX is not written by "
                                 "the matcher")


def _add_pattern(pattern: str, found: dict[str, Any]) -> None:
    if "pattern" in found:
        found.setdefault("allOf", []).append({"pattern": pattern})
    else:
        found["pattern"] = pattern


def _check_reference(schema: Any, reference: str, path: str, places: set[int]) -> None:
    """Refuses a reference to a place that was not read as a schema, so that nothing there was rewritten."""
    target = schema
    fragment = unquote(reference.partition("#")[2])
    if not fragment.startswith("/"):
        return
    for part in fragment.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and part.isdecimal() and int(part) < len(target):
            target = target[int(part)]
        elif isinstance(target, dict) and part in target:
            target = target[part]
        else:
            raise GrammarError(f"{path}: {reference!r} leads nowhere, there is no {part!r}")
    if isinstance(target, dict) and id(target) not in places:
        raise GrammarUnsupported(f"{path}: {reference!r} is no place of a schema; the matcher follows references into "
                                 "$defs and other keywords that hold schemas")


def _guidance(options: JsonOptions) -> dict[str, Any]:
    """llguidance's options for `options`."""
    comma, colon, blanks = options.separators()
    found = dict(item_separator=rust_text(comma), key_separator=rust_text(colon), whitespace_flexible=False,
                 coerce_one_of=False, lenient=options.lenient, json_allowed_escapes=ESCAPES)
    return found | (dict(whitespace_pattern=rf"[ \t\n\r]{{1,{blanks}}}") if blanks else {})
