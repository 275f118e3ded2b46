"""Grammars as their users give them, compiled: to an automaton, or where that cannot be, to a source for the matcher.

Which of the two serves a grammar depends on the grammar, its options, the vocabulary and the limits, on nothing else.
"""
from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from jradix.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from jradix.grammar.dfa import Dfa, Refusal, compile_language
from jradix.grammar.drawing import automaton_svg, note_svg
from jradix.grammar.json_schema import JsonOptions, SchemaReport, schema_to_language
from jradix.grammar.language import Lang, alt, text
from jradix.grammar.lark_text import choices_matcher, lark_matcher, regex_matcher
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.matcher import ByteWalker, MatcherSource
from jradix.grammar.matcher_schema import json_matcher
from jradix.grammar.python_types import json_schema as schema_of
from jradix.grammar.regex import parse_regex
from jradix.grammar.structural_tag import structural_tag_matcher
from jradix.grammar.token_dfa import TokenTables, build_token_tables
from jradix.grammar.vocabulary import Vocabulary, vocabulary_of

if TYPE_CHECKING:
    from jradix.tokenizer import Tokenizer

Engine = Literal["auto", "dfa", "matcher"]
SOURCES = ("json_schema", "regex", "choices", "grammar", "structural_tag")
NO_EXPECTATION = "the matcher follows this grammar and does not say what was expected"
OPTIONED = ("json_schema", "structural_tag")        # sources that take the options of JSON
SMALLER_DEPTHS = 2, 1     # tried where neither the automaton of the default depth nor the matcher serves


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar: which texts it allows, and its tables for one vocabulary if one was given. Can be pickled.

    Attributes:
      source: what it was made of, as JSON: equal sources and options make equal grammars (the order of a schema's
        properties is part of it).
      dfa: the automaton over bytes; None where the matcher follows it.
      tables: its form over tokens; None without a vocabulary, and with the matcher.
      report: what was done with a JSON schema; None for anything else, and with the matcher.
      max_depth: levels of recursion and free values at most, in a JSON schema followed by an automaton.
      matcher: what the matcher reads; set exactly where `dfa` is None.
      reason: why no automaton follows it; None where one does.
    """
    source: str
    dfa: Dfa | None
    tables: TokenTables | None = None
    report: SchemaReport | None = field(default=None, repr=False)
    max_depth: int = 0
    matcher: MatcherSource | None = None
    reason: str | None = None

    def accepts(self, document: str | bytes) -> bool:
        """True for a whole text of the grammar. With the matcher, each call reads the grammar, about 1 ms."""
        if self.dfa is not None:
            return self.dfa.accepts(document)
        walker = ByteWalker(self.matcher)
        return walker.walk(_utf8(document)) and walker.is_accepting

    def explain(self, document: str | bytes) -> Refusal | None:
        """Where and why a text is refused; None for one that is accepted."""
        if self.dfa is not None:
            return self.dfa.explain(document)
        walker, data = ByteWalker(self.matcher), _utf8(document)
        if walker.walk(data):
            if walker.is_accepting:
                return None
            chars = _num_chars(data)
            return Refusal(len(data), chars, f"the text ends too early, after character {chars} (byte {len(data)}); "
                                             f"{NO_EXPECTATION}")
        return _refusal(data, walker.num_taken)

    def draw(self, max_states: int = 60) -> str:
        """The automaton as SVG, at most `max_states` of its states; with the matcher, a note that there is none."""
        if self.dfa is None:
            return note_svg(["followed by the matcher, so there is no automaton to draw", f"because: {self.reason}"])
        return automaton_svg(self.dfa, max_states=max_states)

    def _repr_svg_(self) -> str:
        return self.draw()

    @property
    def engine(self) -> str:
        """What follows it: "dfa", "dfa-depth-5" where recursion and free values were cut at that depth, "matcher"."""
        if self.dfa is None:
            return "matcher"
        if self.report is None or not self.report.is_depth_limited:
            return "dfa"
        return f"dfa-depth-{self.max_depth}"

    @property
    def num_states(self) -> int:
        """States of the automaton; 0 with the matcher."""
        return 0 if self.dfa is None else self.dfa.num_states

    @property
    def num_rows(self) -> int:
        """Distinct masks over the vocabulary; 0 with the matcher, which makes each when it is needed."""
        return 0 if self.dfa is None else self._tables.num_rows

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables on a device; 0 with the matcher."""
        return 0 if self.dfa is None else self._tables.nbytes

    @property
    def _tables(self) -> TokenTables:
        if self.tables is None:
            raise GrammarError("the grammar was compiled without a tokenizer, so it has no tables: give "
                               "compile_grammar one")
        return self.tables


def compile_grammar(*, json_schema: Any = None, regex: str | None = None, choices: Sequence[str] | None = None,
                    grammar: str | None = None, structural_tag: Mapping[str, Any] | None = None,
                    tokenizer: Tokenizer | None = None, vocabulary: Vocabulary | None = None,
                    limits: GrammarLimits | None = None, engine: Engine = "auto", canonical: bool = True,
                    **options: Any) -> Grammar:
    """Compiles one grammar.

    Args:
      json_schema: a schema as a dict, as JSON text, or true; a Pydantic model, dataclass, TypedDict, Enum, function or
        annotation.
      regex: in Python's syntax; the whole text must match.
      choices: texts of which one is allowed.
      grammar: Lark or GBNF text; followed by the matcher.
      structural_tag: free text with structures behind triggers, see `structural_tag_matcher`; followed by the matcher.
      tokenizer: also build the token tables for its vocabulary.
      vocabulary: the same for a vocabulary; instead of a tokenizer.
      limits: bounds on states, work and bytes of the automaton.
      engine: "auto": an automaton, or the matcher where a schema has what no automaton enforces or the limits are
        passed; and where the matcher cannot follow it either, an automaton of depth 2 or 1, unless `max_depth` is
        given. "dfa": an automaton or an error; "matcher": the matcher or an error.
      canonical: narrow masks to the one canonical token where the text that must come has one.
      options: of the JSON in `json_schema` and `structural_tag`, fields of `JsonOptions`: whitespace, strict, lenient,
        max_depth (None: to any depth, by the matcher), ...

    Raises:
      GrammarError: not exactly one grammar was given, or it cannot be used: syntax, an unsupported construct (named,
        with its place), or unsatisfiable.
      GrammarTooLarge: beyond the limits, and the matcher cannot follow it either.
    """
    given = {name: value for name, value in zip(SOURCES, (json_schema, regex, choices, grammar, structural_tag))
             if value is not None}
    if len(given) != 1:
        raise GrammarError(f"{', '.join(given) or 'nothing'} given: expected exactly one of {', '.join(SOURCES[:-1])} "
                           f"and {SOURCES[-1]}")
    (kind, value), = given.items()
    if engine not in ("auto", "dfa", "matcher"):
        raise GrammarError(f'engine={engine!r}: expected "auto", "dfa" or "matcher"')
    if tokenizer is not None and vocabulary is not None:
        raise GrammarError("tokenizer and vocabulary given: expected one of them")
    if options and kind not in OPTIONED:
        raise GrammarError(f"{', '.join(sorted(options))}: options for {' and '.join(OPTIONED)}; "
                           f"leave them out with {kind}")
    try:
        json_options = JsonOptions(**options)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"options for a {kind}: {error}") from None
    value = _checked(kind, value)
    reason = None
    if kind in ("grammar", "structural_tag"):
        if engine == "dfa":
            raise GrammarUnsupported(f'engine="dfa" with {kind}: only the matcher follows it; leave engine out')
        reason = f"a {kind} is followed by the matcher"
    elif engine == "matcher":
        reason = 'engine="matcher"'
    source = dict({kind: value}, options={name: repr(options[name]) for name in sorted(options)}) if options else \
        {kind: value}
    source |= {} if engine == "auto" else dict(engine=engine)
    source |= {} if canonical else dict(canonical=False)
    if reason is not None:
        return Grammar(_json(source), None, matcher=_matcher(kind, value, json_options), reason=reason)
    vocabulary = vocabulary_of(tokenizer) if tokenizer is not None else vocabulary

    @_without_collector()
    def automaton(json_options: JsonOptions, report: SchemaReport | None) -> Grammar:
        bounds = limits or GrammarLimits()
        dfa = compile_language(_language(kind, value, json_options, bounds, report), bounds)
        tables = None if vocabulary is None else build_token_tables(dfa, vocabulary, bounds, canonical=canonical)
        return Grammar(_json(source), dfa, tables, report, json_options.max_depth or 0 if report else 0)

    report = SchemaReport() if kind == "json_schema" else None
    try:
        return automaton(json_options, report)
    except (GrammarTooLarge, GrammarUnsupported) as error:
        if engine == "dfa" or (kind != "json_schema" and isinstance(error, GrammarUnsupported)):
            raise
        refusal = error.with_traceback(None)        # which holds all that was built so far
    try:
        return Grammar(_json(source), None, matcher=_matcher(kind, value, json_options), reason=str(refusal))
    except GrammarError as error:
        if isinstance(refusal, GrammarTooLarge) and report and report.is_depth_limited and "max_depth" not in options:
            for depth in SMALLER_DEPTHS:
                with contextlib.suppress(GrammarTooLarge):
                    return automaton(dataclasses.replace(json_options, max_depth=depth), SchemaReport())
        raise type(refusal)(f"{refusal}; the matcher does not follow it either: {error}") from None


def read_schema(given: Any) -> dict[str, Any] | bool:
    """The JSON schema that a dict, JSON text, truth value or Python type stands for. Raises GrammarError."""
    if isinstance(given, bool):
        return given
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise GrammarError(f"json_schema is no JSON: {error}") from None
        except RecursionError:
            raise GrammarTooLarge("json_schema is nested too deeply to be read; flatten it with $defs") from None
        if not isinstance(given, (dict, bool)):
            raise GrammarError(f"json_schema={str(given)[:60]}: expected a JSON object, true or false")
        return given
    return schema_of(given)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Python's search for cycles is off. Automata are millions of tuples without any, and it walks over all of them
    again and again: 5 to 20% of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _checked(kind: str, value: Any) -> Any:
    """The grammar as it stands in `Grammar.source`."""
    if kind == "json_schema":
        return read_schema(value)
    if kind in ("regex", "grammar") and not isinstance(value, str):
        raise GrammarError(f"{kind}={str(value)[:60]!r}: expected a text")
    if kind == "choices":
        if isinstance(value, str) or not value or not all(isinstance(choice, str) and choice for choice in value):
            raise GrammarError(f"choices={str(value)[:60]!r}: expected a list of non-empty texts")
        return list(value)
    return value


def _language(kind: str, value: Any, options: JsonOptions, limits: GrammarLimits, report: SchemaReport | None) -> Lang:
    if kind == "json_schema":
        return schema_to_language(value, options=options, limits=limits, report=report)
    return parse_regex(value) if kind == "regex" else alt(*map(text, value))


def _matcher(kind: str, value: Any, options: JsonOptions) -> MatcherSource:
    if kind in OPTIONED:
        return (json_matcher if kind == "json_schema" else structural_tag_matcher)(value, options)
    makers: dict[str, Callable[[Any], MatcherSource]] = dict(regex=regex_matcher, choices=choices_matcher,
                                                             grammar=lark_matcher)
    return makers[kind](value)


def _json(source: Mapping[str, Any]) -> str:
    try:
        return json.dumps(source, ensure_ascii=False)
    except RecursionError:
        raise GrammarTooLarge(f"{next(iter(source))} is nested too deeply; flatten it with $defs") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{next(iter(source))} is not JSON ({error}); expected JSON values only") from None


def _refusal(data: bytes, position: int) -> Refusal:
    start = position                                    # of the character that the refused byte belongs to
    while start and data[start] & 0xC0 == 0x80:
        start -= 1
    found = data[start:start + 4].decode("utf-8", errors="ignore")[:1]
    shown = repr(found) if found else f"byte 0x{data[position]:02X}"
    chars = _num_chars(data[:start])
    return Refusal(position, chars, f"refused at character {chars} (byte {start}): found {shown}; "
                                    f"{NO_EXPECTATION}")


def _utf8(document: str | bytes) -> bytes:
    return document.encode("utf-8", errors="surrogatepass") if isinstance(document, str) else bytes(document)


def _num_chars(data: bytes) -> int:
    """Characters begun in `data`: bytes that continue none."""
    return sum(byte & 0xC0 != 0x80 for byte in data)
