"""Grammars as their users give them: a schema, a regex or choices, compiled to one automaton."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jradix.errors import GrammarError
from jradix.grammar.dfa import Dfa, Refusal, compile_language
from jradix.grammar.json_schema import JsonOptions, SchemaReport, schema_to_language
from jradix.grammar.language import Lang, alt, text
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.python_types import json_schema as schema_of
from jradix.grammar.regex import parse_regex
from jradix.grammar.token_dfa import TokenTables, build_token_tables
from jradix.grammar.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from jradix.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar: which texts it allows, and its tables for one vocabulary if a tokenizer was given.

    Attributes:
      source: what it was made of, as JSON: equal sources and options make equal grammars (the order of a schema's
        properties is part of it).
      dfa: the automaton over bytes.
      tables: its form over tokens; None without a tokenizer.
      report: what was done with a JSON schema; None for anything else.
      max_depth: levels of recursion and free values at most, in a JSON schema.
    """
    source: str
    dfa: Dfa
    tables: TokenTables | None = None
    report: SchemaReport | None = field(default=None, repr=False)
    max_depth: int = 0

    def accepts(self, document: str | bytes) -> bool:
        """True for a whole text of the grammar."""
        return self.dfa.accepts(document)

    def explain(self, document: str | bytes) -> Refusal | None:
        """Where and why a text is refused; None for one that is accepted."""
        return self.dfa.explain(document)

    @property
    def engine(self) -> str:
        """What follows it: "dfa", or "dfa-depth-5" where recursion and free values were cut at that depth."""
        if self.report is None or not self.report.is_depth_limited:
            return "dfa"
        return f"dfa-depth-{self.max_depth}"

    @property
    def num_states(self) -> int:
        return self.dfa.num_states

    @property
    def num_rows(self) -> int:
        """Distinct masks over the vocabulary."""
        return self._tables.num_rows

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables on a device."""
        return self._tables.nbytes

    @property
    def _tables(self) -> TokenTables:
        if self.tables is None:
            raise GrammarError("the grammar was compiled without a tokenizer, so it has no tables: give "
                               "compile_grammar one")
        return self.tables


def compile_grammar(*, json_schema: Any = None, regex: str | None = None, choices: Sequence[str] | None = None,
                    tokenizer: Tokenizer | None = None, limits: GrammarLimits | None = None, **options: Any) -> Grammar:
    """Compiles one of a JSON schema, a regex and a list of choices.

    Args:
      json_schema: a schema as a dict, as JSON text, or true; a Pydantic model, dataclass, TypedDict, Enum, function or
        annotation.
      regex: in Python's syntax; the whole text must match.
      choices: texts of which one is allowed.
      tokenizer: also build the token tables for its vocabulary.
      limits: bounds on states, work and bytes.
      options: for JSON schemas, fields of `JsonOptions`: whitespace, property_order, strict, lenient, max_depth, ...

    Raises:
      GrammarError: not exactly one grammar was given, or it cannot be used: syntax, an unsupported construct (named,
        with its place), or unsatisfiable.
      GrammarTooLarge: beyond the limits.
    """
    given = {name: value for name, value in dict(json_schema=json_schema, regex=regex, choices=choices).items()
             if value is not None}
    if len(given) != 1:
        raise GrammarError(f"{', '.join(given) or 'nothing'} given: expected exactly one of json_schema, "
                           "regex and choices")
    if options and json_schema is None:
        raise GrammarError(f"{', '.join(sorted(options))}: options for a json_schema; "
                           f"leave them out with {next(iter(given))}")
    limits = limits or GrammarLimits()
    report, max_depth = None, 0
    if json_schema is not None:
        try:
            json_options = JsonOptions(**options)
        except (TypeError, ValueError) as error:
            raise GrammarError(f"options for a json_schema: {error}") from None
        schema, report, max_depth = read_schema(json_schema), SchemaReport(), json_options.max_depth
        language = schema_to_language(schema, options=json_options, limits=limits, report=report)
        source = dict(json_schema=schema, options={name: repr(value) for name, value in sorted(options.items())})
    elif regex is not None:
        if not isinstance(regex, str):
            raise GrammarError(f"regex={regex!r}: expected a text")
        language, source = parse_regex(regex), given
    else:
        language, source = _choices(choices), dict(choices=list(choices))
    dfa = compile_language(language, limits)
    tables = None
    if tokenizer is not None:
        tables = build_token_tables(dfa, vocabulary_of(tokenizer), limits)
    return Grammar(json.dumps(source, ensure_ascii=False), dfa, tables, report, max_depth)


def read_schema(given: Any) -> dict[str, Any] | bool:
    """The JSON schema that a dict, JSON text, truth value or Python type stands for. Raises GrammarError."""
    if isinstance(given, bool):
        return given
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise GrammarError(f"json_schema is no JSON: {error}") from None
        if not isinstance(given, (dict, bool)):
            raise GrammarError(f"json_schema={str(given)[:60]}: expected a JSON object, true or false")
        return given
    return schema_of(given)


def _choices(choices: Sequence[str]) -> Lang:
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise GrammarError(f"choices={str(choices)[:60]!r}: expected a list of non-empty texts")
    return alt(*(text(choice) for choice in choices))
