"""JSON schema to a language of JSON texts: options, recursion, and the report of what was done.

Whatever the language accepts is valid JSON and valid under the schema (drafts 2020-12, 2019-09, 7, 6 and 4, by
`$schema`). It may be smaller than the schema where an automaton must choose: declared keys in declared order and other
keys after them, numbers without exponent where anything is asked of them, one escaping per character, no blanks but the
chosen ones, recursion and free values to a depth. Keys that are not declared may repeat; of equal keys the last counts.
What cannot be enforced exactly is refused.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterator

from jradix.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from jradix.grammar.json_keywords import Keywords
from jradix.grammar.json_numbers import ANY_NUMBER, number_language
from jradix.grammar.json_objects import ObjectPlan, Punctuation, array_language, object_language, plan_object
from jradix.grammar.json_references import Conjunction, Document
from jradix.grammar.json_strings import StringWriter
from jradix.grammar.json_values import ANY_OBJECT, Arrays, Branch, Objects
from jradix.grammar.language import Lang, alt, nothing, text
from jradix.grammar.limits import GrammarLimits

FREE_VALUE_STATES = 20_000     # expected states up to which free values are given more depth
HOPELESS_STATES = 1_000_000    # far beyond any limit, even when the estimate is off
MIN_FREE_DEPTH = 3             # given whatever it costs, as most documents nest free values so deep
VALUE_STATES = 60              # of a free scalar with its place
MAX_BLANKS = 16


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    """How the text is written and how strictly the schema is read.

    Attributes:
      whitespace: "compact" for none; a number, at most 16, for up to so many blanks wherever JSON allows them; a pair
        of texts for exactly these item and key separators, as in `json.dumps(separators=)`.
      property_order: "declared", or "any" for objects of at most 6 declared properties.
      strict: objects that declare properties allow no others unless `additionalProperties` says so.
      lenient: keywords that cannot be enforced are ignored and listed in the report instead of being refused.
      formats: enforce `format`; False reads it as an annotation.
      max_depth: how deep a recursive definition is followed, and a free value nested at most; None for any depth, which
        no automaton follows.
    """
    whitespace: str | int | tuple[str, str] = "compact"
    property_order: str = "declared"
    strict: bool = False
    lenient: bool = False
    formats: bool = True
    max_depth: int | None = 5

    def __post_init__(self) -> None:
        self.separators()
        if self.property_order not in ("declared", "any"):
            raise ValueError(f'property_order={self.property_order!r}: expected "declared" or "any"')
        depth = 0 if self.max_depth is None else self.max_depth
        if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= 64:
            raise ValueError(f"max_depth={self.max_depth!r}: expected an integer from 0 to 64, or None")

    def separators(self) -> tuple[str, str, int]:
        """(item separator, key separator, blanks allowed)."""
        given = self.whitespace
        if given == "compact":
            return ",", ":", 0
        if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= MAX_BLANKS:
            return ",", ":", given
        if isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(part, str) for part in given) \
                and (given[0].strip(" \t\r\n"), given[1].strip(" \t\r\n")) == (",", ":"):
            return given[0], given[1], 0
        raise ValueError(f'whitespace={given!r}: expected "compact", a number from 0 to {MAX_BLANKS}, or a pair of '
                         'separators such as (", ", ": ")')


@dataclass
class SchemaReport:
    """What `schema_to_language` did beyond the plain reading; filled in place.

    Attributes:
      draft: 4, 6, 7, 2019 or 2020.
      ignored: places of keywords the specification says to ignore: unknown ones, formats that are annotations.
      not_enforced: place and reason of what `lenient` let through.
      recursive: places of definitions cut at `max_depth`.
      free_value_depth: how deep free values nest, None when there are none. Below `max_depth`, but at least 3, where
        more would need too many states.
    """
    draft: int = 0
    ignored: list[str] = field(default_factory=list)
    not_enforced: list[str] = field(default_factory=list)
    recursive: list[str] = field(default_factory=list)
    free_value_depth: int | None = None

    @property
    def is_depth_limited(self) -> bool:
        """Does the schema allow deeper values than the language?"""
        return bool(self.recursive) or self.free_value_depth is not None


def schema_to_language(schema: dict[str, Any] | bool, *, options: JsonOptions = JsonOptions(),
                       limits: GrammarLimits = GrammarLimits(), report: SchemaReport | None = None) -> Lang:
    """The JSON texts that satisfy `schema`.

    Args:
      schema: a schema of draft 2020-12 (default), 2019-09, 7, 6 or 4; references within it only.
      options, limits: of the text and of the automata that decide about key patterns on the way.
      report: filled with what was ignored or cut.

    Raises:
      GrammarError: malformed, or plainly unsatisfiable. An unsatisfiable schema that only an automaton can tell is
        found when the language is compiled.
      GrammarUnsupported: not enforceable by an automaton; with the JSON pointer path.
      GrammarTooLarge: too many alternatives, states or levels.
    """
    try:
        return _SchemaWriter(schema, options, limits, report if report is not None else SchemaReport()).language()
    except RecursionError:
        raise GrammarTooLarge("the schema's references and levels together nest too deeply; flatten it") from None


class _SchemaWriter:
    """Writes conjunctions of schemas as languages. Equal conjunctions with equal depth left are one language."""

    def __init__(self, schema: Any, options: JsonOptions, limits: GrammarLimits, report: SchemaReport) -> None:
        document = Document(schema)
        report.draft = document.draft
        self._options, self._report = options, report
        self._strings = StringWriter(limits)
        self._keywords = Keywords(document, self._strings, assert_formats=options.formats, refuse=self._refuse,
                                  note=self._note)
        comma, colon, blanks = options.separators()
        self._marks = Punctuation.of(comma, colon, blanks)
        self._root: Conjunction = self._keywords.conjunction(document.root)
        self._plans: dict[Objects, ObjectPlan] = {}
        self._heads: set[Conjunction] = set()
        self._recursive: set[Conjunction] = set()
        self._written: dict[tuple[Conjunction, int], Lang] = {}
        self._free: list[Lang] = []

    def language(self) -> Lang:
        edges = self._explore()
        has_free_values = not self._root or any(not child for children in edges.values() for child in children)
        depth = self._options.max_depth
        if depth is None:
            if has_free_values or self._heads:
                places = ", ".join(self._report.recursive[:3]) or "free values"
                raise GrammarUnsupported(f"max_depth=None with {places}: no automaton follows values to any depth")
            depth = 0
        expected = self._expected_states(edges, depth, 0)
        if expected > HOPELESS_STATES:
            raise GrammarTooLarge(f"about {expected:,} states expected with recursion to max_depth={depth}, more than "
                                  f"{HOPELESS_STATES:,}; give a smaller max_depth or use the matcher")
        if has_free_values:
            free, bound = min(MIN_FREE_DEPTH, depth), max(FREE_VALUE_STATES, expected * 3 // 2)
            while free < depth and self._expected_states(edges, depth, free + 1) <= bound:
                free += 1
            self._report.free_value_depth = free
        found = self._value(self._root, depth)
        if found.is_nothing:
            raise GrammarError("the schema is unsatisfiable: no JSON value (within max_depth) is valid")
        return found

    def _refuse(self, place: str, reason: str) -> None:
        if not self._options.lenient:
            raise GrammarUnsupported(f"{place}: {reason}; leave it out, or pass lenient=True to ignore it")
        line = f"{place}: {reason}"
        if line not in self._report.not_enforced:
            self._report.not_enforced.append(line)

    def _note(self, place: str) -> None:
        if place not in self._report.ignored:
            self._report.ignored.append(place)

    # Which conjunctions recur, and how large the automaton will be

    def _explore(self) -> dict[Conjunction, list[Conjunction]]:
        """Finds the heads of recursion (targets of back edges) and what reaches them; returns all values' children."""
        edges: dict[Conjunction, list[Conjunction]] = {}
        stack: dict[Conjunction, Iterator[Conjunction]] = {}

        def enter(conjunction: Conjunction) -> None:
            edges[conjunction] = self._children(conjunction)
            stack[conjunction] = iter(edges[conjunction])

        enter(self._root)
        while stack:
            last = next(reversed(stack))
            child = next(stack[last], None)
            if child is None:
                del stack[last]
            elif child in stack:
                self._heads.add(child)
            elif child and child not in edges:
                enter(child)
        parents: dict[Conjunction, list[Conjunction]] = {}
        for parent, children in edges.items():
            for child in children:
                parents.setdefault(child, []).append(parent)
        waiting = list(self._heads)
        while waiting:
            one = waiting.pop()
            if one not in self._recursive:
                self._recursive.add(one)
                waiting += parents.get(one, [])
        self._report.recursive = sorted({literal.node.path or "/" for head in self._heads for literal in head})
        return edges

    def _expected_states(self, edges: dict[Conjunction, list[Conjunction]], depth: int, free: int) -> int:
        """A rough count: every place of a value has states of its own."""
        leaf = (50 + VALUE_STATES) * 2**free - VALUE_STATES
        known: dict[tuple[Conjunction, int], int] = {}

        def count(conjunction: Conjunction, left: int) -> int:
            if not conjunction:
                return leaf
            if conjunction in self._heads:
                left -= 1
                if left < -1:
                    return 0
            key = conjunction, left if conjunction in self._recursive else 0
            if key not in known:
                known[key] = VALUE_STATES // 2 + sum(12 + count(child, left) for child in edges[conjunction])
            return known[key]

        return count(self._root, depth)

    def _children(self, conjunction: Conjunction) -> list[Conjunction]:
        found: list[Conjunction] = []
        for branch in self._keywords.of(conjunction) if conjunction else ():
            if "array" in branch.kinds:
                found += [item for item in (*branch.array.prefix, branch.array.rest) if item or branch.array.high != 0]
                found += [count.value for count in branch.array.counts]
            if "object" in branch.kinds:
                plan = self._plan(branch.object)
                found += [member.value for member in plan.declared + plan.others]
        return found

    def _plan(self, objects: Objects) -> ObjectPlan:
        if objects not in self._plans:
            self._plans[objects] = plan_object(objects, self._keywords, self._strings, closed=self._options.strict,
                                               place=self._place())
        return self._plans[objects]

    def _place(self) -> str:
        return self._root[0].node.path or "/" if self._root else "/"

    # Texts

    def _value(self, conjunction: Conjunction, depth: int) -> Lang:
        if not conjunction:
            return self._free_value(self._report.free_value_depth or 0)
        if conjunction in self._heads:
            if depth < 0:
                return nothing()
            depth -= 1
        key = conjunction, depth if conjunction in self._recursive else 0
        if key not in self._written:
            self._written[key] = alt(*(self._branch(branch, depth, conjunction[0].node.path or "/")
                                       for branch in self._keywords.of(conjunction)))
        return self._written[key]

    def _branch(self, branch: Branch, depth: int, place: str) -> Lang:
        def write(conjunction: Conjunction) -> Lang:
            return self._value(conjunction, depth)

        found = [text(kind) for kind in ("null", "true", "false") if kind in branch.kinds]
        if "number" in branch.kinds:
            found.append(number_language(branch.number, place))
        if "string" in branch.kinds:
            found.append(self._strings.quoted(branch.string))
        if "array" in branch.kinds:
            found.append(array_language(branch.array, self._keywords, self._marks, write))
        if "object" in branch.kinds:
            found.append(object_language(branch.object, self._plan(branch.object), self._keywords, self._marks,
                                         self._strings, write, place=place,
                                         any_order=self._options.property_order == "any"))
        return alt(*found)

    def _free_value(self, depth: int) -> Lang:
        """Any JSON value whose arrays and objects nest at most `depth` levels."""
        if not self._free:
            scalars = (text("null"), text("true"), text("false"), number_language(ANY_NUMBER, ""),
                       self._strings.quoted(None))
            self._free.append(alt(*scalars))
        while len(self._free) <= depth:
            inner = self._free[-1]
            plan = plan_object(ANY_OBJECT, self._keywords, self._strings, closed=False, place="/")
            self._free.append(alt(self._free[0], array_language(Arrays(), self._keywords, self._marks, lambda _: inner),
                                  object_language(ANY_OBJECT, plan, self._keywords, self._marks, self._strings,
                                                  lambda _: inner, any_order=False, place="/")))
        return self._free[depth]
