"""Structured output as a model that wants the wrong thing meets it: token by token, on both engines.

Other cases have tests elsewhere: X05 in test_regex.py and test_compiler.py, X06 and X09 in test_token_dfa.py, X10 in
e2e/test_structured.py, X11 in e2e/test_jump_decoding.py, X13 in test_regex.py and e2e/test_matcher_rows.py, X14 in
test_compile_pool.py and test_table_store.py.
"""
from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

import jradix
from jradix.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from jradix.grammar.compiler import Grammar
from jradix.grammar.json_formats import FORMATS
from jradix.grammar.matcher import MatcherPool
from jradix.grammar.support import PROBES
from jradix.grammar.token_dfa import TokenTables
from jradix.grammar.vocabulary import Vocabulary

END = 256
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), None, b'{"', b'":', b'","', b'"}', b"00", b"ab",
                         b"],", b"true", b"\xe4\xb8", b'\\"', b"  ", b"\n "], eos_ids=[END])
ENGINES = ("dfa", "matcher")
Choose = Callable[[bytes, list[int], random.Random], int]
"""The next token, given the text so far and what is allowed."""


class Walk:
    """One text in the making, under the masks of either engine."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary = VOCABULARY) -> None:
        self.vocabulary, self.tables, self.state = vocabulary, grammar.tables, 0
        self.matcher = None if grammar.tables else MatcherPool(vocabulary).start(grammar.matcher)

    def allowed(self) -> list[int]:
        if self.tables is not None:
            return self.tables.allowed_ids(self.state).tolist()
        words = self.matcher.mask()
        return [v for v in range(32 * len(words)) if int(words[v % len(words)]) >> (v // len(words)) & 1]

    def advance(self, token: int) -> None:
        if self.tables is not None:
            self.state = self.tables.advance(self.state, token)
        else:
            self.matcher.advance(token)

    def run(self, choose: Choose, rng: random.Random, num_tokens: int = 300) -> bytes | None:
        """The whole text; None when it is cut at so many tokens."""
        data = b""
        for _ in range(num_tokens):
            allowed = self.allowed()
            assert allowed, f"nothing allowed after {data!r}"
            token = choose(data, allowed, rng)
            if token in self.vocabulary.eos_ids:
                return data
            self.advance(token)
            data += self.vocabulary.token_bytes[token]
        return None


def at_random(data: bytes, allowed: list[int], rng: random.Random) -> int:
    """Anything, but often what brings the text to its end."""
    closing = [token for token in allowed if token == END or VOCABULARY.token_bytes[token][:1] in b'"]}']
    return rng.choice(closing if closing and rng.random() < 0.5 else allowed)


def drawn_to(wish: str) -> Choose:
    """Writes `wish` as long as that is allowed."""
    def choose(data: bytes, allowed: list[int], rng: random.Random) -> int:
        text = wish.encode()
        rest = text[len(data):] if text.startswith(data) else b""
        fitting = [token for token in allowed if token != END and rest.startswith(VOCABULARY.token_bytes[token])]
        return max(fitting, key=lambda t: len(VOCABULARY.token_bytes[t])) if fitting else at_random(data, allowed, rng)
    return choose


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@cache
def _compiled(schema: str, engine: str) -> Grammar | None:
    try:
        return jradix.compile_grammar(json_schema=schema, vocabulary=VOCABULARY, engine=engine)
    except (GrammarUnsupported, GrammarTooLarge):
        return None


def compiled(schema: Any, engine: str) -> Grammar:
    grammar = _compiled(json.dumps(schema), engine)
    if grammar is None:
        pytest.skip(f"refused by {engine}")
    return grammar


def validator(schema: Any) -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return cls(schema, format_checker=cls.FORMAT_CHECKER)


# X03: one schema per keyword

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
KEYWORDS: dict[str, tuple[Any, Any, list[Any]]] = {      # a schema, what fits it, what does not
    name: (probe.schema, probe.valid, [probe.invalid]) for name, probe in PROBES.items()
    if name not in ("$ref", "$dynamicRef", "$recursiveRef", "dependencies", "additionalItems")}
KEYWORDS |= {
    "pattern and maxLength": ({**STRING, "pattern": "[0-9]", "maxLength": 3}, "a1b", ["abc", "ab12", "1234"]),
    "pattern with quotes": ({**STRING, "pattern": '^say "[a-z]+"$'}, 'say "a"', ['say "A"', "say a", 'say "a" ']),
    "minLength and maxLength": ({**STRING, "minLength": 2, "maxLength": 2}, "é中", ["", "é", "中中中"]),
    "range": ({"type": "number", "minimum": 1, "maximum": 5}, 4.5, [5.7, 0.9, 50, -3]),
    "open range": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5, [0, 1, 1.0001, -0.5]),
    "integer range": ({**INTEGER, "minimum": -12, "maximum": 130}, 99, [-13, 131, 1300, -120, 7.5]),
    "items and counts": ({"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3}, [1, 2],
                         [[], [1], [1, 2, 3, 4]]),
    "counts of keys": ({"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER},
                        "additionalProperties": False, "minProperties": 1, "maxProperties": 2},
                       {"b": 1}, [{}, {"a": 1, "b": 1, "c": 1}]),
    "allOf merges": ({"allOf": [{"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                                {"properties": {"a": {"minimum": 5}}, "additionalProperties": STRING}]},
                     {"a": 5, "b": "x"}, [{"a": 4}, {}, {"a": 5, "b": 1}]),
    "oneOf overlap": ({**INTEGER, "oneOf": [{"minimum": 5}, {"multipleOf": 2}]}, 7, [6, 3, -1]),
    "enum in an object": ({"type": "object", "properties": {"e": {"enum": ['a"b', "a", 1]}}, "required": ["e"],
                           "additionalProperties": False}, {"e": 'a"b'}, [{"e": 'a"'}, {"e": 2}, {}])}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_nested", [False, True], ids=["root", "nested"])
@pytest.mark.parametrize("name", KEYWORDS)
def test_keyword_a_model_drawn_to_a_violation_never_gets_there(name: str, is_nested: bool, engine: str) -> None:
    """X03: whatever it ends up with validates, whichever node the keyword is on."""
    schema, valid, violations = KEYWORDS[name]
    if is_nested:
        schema = {"type": "object", "properties": {"outer": schema}, "required": ["outer"],
                  "additionalProperties": False}
        valid, *violations = ({"outer": value} for value in (valid, *violations))
    grammar, check = compiled(schema, engine), validator(schema)
    assert check.is_valid(valid) and grammar.accepts(compact(valid))
    assert all(not check.is_valid(value) and not grammar.accepts(compact(value)) for value in violations)
    rng, texts = random.Random(name), []
    for choose in [drawn_to(compact(value)) for value in violations for _ in range(2)] + [at_random] * 4:
        texts.append(Walk(grammar).run(choose, rng))
    assert Walk(grammar).run(drawn_to(compact(valid)), rng) is not None
    for text in filter(None, texts):
        assert check.is_valid(json.loads(text)) and grammar.accepts(text), text


@pytest.mark.parametrize("name", KEYWORDS)
def test_keyword_one_level_down_has_the_same_verdict(name: str) -> None:
    """X03: a keyword that an engine refuses at the root it refuses below, and the other way round."""
    schema = KEYWORDS[name][0]
    nested = {"type": "object", "properties": {"outer": schema}, "additionalProperties": False}
    for engine in ENGINES:
        verdicts = [_compiled(json.dumps(one), engine) is None for one in (schema, nested)]
        assert verdicts[0] == verdicts[1], engine


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_format_texts_of_walks_are_of_the_format(name: str) -> None:
    """X03: by the checker of another library, where it has one."""
    schema = {"type": "string", "format": name}
    check, rng = validator(schema), random.Random(name)
    grammar = compiled(schema, "dfa")
    found = [Walk(grammar).run(at_random, rng) for _ in range(8)]
    texts = [text for text in found if text is not None]
    assert texts and all(check.is_valid(json.loads(text)) for text in texts), texts


def test_keyword_that_no_engine_enforces_is_named_with_its_path() -> None:
    """X03: nothing is dropped silently, also one level down."""
    for schema, path in (({"uniqueItems": True}, "/uniqueItems"),
                         ({"properties": {"a": {"items": {"format": "regex"}}}}, "/properties/a/items/format"),
                         ({"not": {"unevaluatedProperties": False}}, "/not/unevaluatedProperties")):
        with pytest.raises(GrammarUnsupported, match=re.escape(path)):
            jradix.compile_grammar(json_schema=schema)


# What texts may look like

@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given, good, bad", [
    (dict(regex="(ab)+"), ["ab", "ababab"], ["", "aba", "abb"]),
    (dict(regex="a|ab"), ["a", "ab"], ["b", "abb"]),
    (dict(regex=r"[0-9]+(\.[0-9]+)?"), ["1", "1.5", "10.25"], ["1.", ".5", "1.5.2"]),
    (dict(regex="."), ["a", "\x7f", "\r", "中", "\U0001f600"], ["", "\n", "ab"]),
    (dict(regex=r"\d{5}"), ["12345"], ["1234", "123456", "x12345"]),
    (dict(regex=r"^\d{5}$"), ["12345"], ["123456", "12345\n"]),
    (dict(json_schema={**STRING, "pattern": r"^\d{5}$"}), ['"12345"'], ['"123456"', '"١٢٣٤٥"', "12345"]),
    (dict(json_schema={**STRING, "pattern": r"\S"}), ['" x "', '"y"'], ['" "', '""', r'"\n"']),
    (dict(json_schema={**STRING, "pattern": '"'}), [r'"a\"b"'], ['"ab"', '"""']),
    (dict(json_schema=STRING), [r'"\t"', '"é"', '"~"'], ['"\t"', '"\n"', '"\x00"', r'"\x"', '"', '"a']),
    (dict(json_schema=INTEGER), ["0", "-7", "120"], ["1.0", "007", "-01", "+1", "1e2", ""]),
    (dict(json_schema={"type": "number"}), ["0", "-1.5", "0.25"], ["01", ".5", "1.", "NaN", "--1"]),
    (dict(json_schema={"type": "number", "minimum": 1, "maximum": 5}), ["1", "4.99", "5"],
     ["5.7", "0.9", "5.0001", "-2", "51"]),
    (dict(json_schema={"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}),
     ['{"a":1}', '{"a":1,"b":"x"}'], ['{"a":1,"a":"x"}', r'{"a":1,"\u0061":"x"}', '{"b":1}']),
    (dict(choices=["no", "no way"]), ["no", "no way"], ["no ", "no w", "now"])], ids=str)
def test_text_of_a_grammar_is_accepted_and_others_are_not(given: dict[str, Any], good: list[str], bad: list[str],
                                                          engine: str) -> None:
    """X05 and the traps that other libraries fell into."""
    grammar = jradix.compile_grammar(**given, engine=engine)
    assert [text for text in good if not grammar.accepts(text)] == []
    assert [text for text in bad if grammar.accepts(text)] == []


def test_delete_is_a_character_like_others_and_tab_must_be_escaped() -> None:
    """By the automaton; the matcher never writes 0x7F."""
    grammar = jradix.compile_grammar(json_schema=STRING)
    assert grammar.engine == "dfa" and grammar.accepts('"\x7f"') and not grammar.accepts('"\t"')


@pytest.mark.parametrize("given, words", [
    (dict(regex="(?=a)b"), "look-ahead"), (dict(regex=r"(a)\1"), "back-reference"), (dict(regex=r"\bword"), "boundary"),
    (dict(json_schema={**STRING, "pattern": "(?<!a)b"}), "/pattern.*look-behind")])
def test_construct_beyond_automata_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    """X05."""
    with pytest.raises(GrammarError, match=words):
        jradix.compile_grammar(**given)


@pytest.mark.parametrize("schema", [
    {**INTEGER, "minimum": 5, "maximum": 4}, {**STRING, "minLength": 2, "maxLength": 1},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 1}, {"allOf": [INTEGER, STRING]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}},
                                          "required": ["n"]}}},
    {"type": "object", "properties": {"a": False}, "required": ["a"]}, {**STRING, "enum": [1, 2]},
    {**INTEGER, "multipleOf": 10, "minimum": 1, "maximum": 9}], ids=str)
def test_unsatisfiable_schema_is_an_error_at_compile_time(schema: Any) -> None:
    with pytest.raises(GrammarError, match="unsatisfiable"):
        jradix.compile_grammar(json_schema=schema)


# Vocabularies

@pytest.mark.parametrize("num_tokens", [64, 96])
def test_ids_beyond_the_tokenizer_are_allowed_in_no_state(num_tokens: int) -> None:
    """X01: 50 ids under heads of 64 and 96; a model that prefers ids 57 and 80 never gets them."""
    texts = [bytes([byte]) for byte in b'abcdefghijklmnopqrstuvwxyz0123456789{}[]:,".-\\ _']
    vocabulary = Vocabulary([*texts, None, b"true"], eos_ids=[len(texts)], num_tokens=num_tokens)
    assert len(texts) == 48
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "required": ["a"],
              "additionalProperties": False}
    grammar = jradix.compile_grammar(json_schema=schema, vocabulary=vocabulary)
    for _, row in reached(grammar.tables):
        assert row and max(row) < 50
    text = Walk(grammar, vocabulary).run(lambda data, allowed, rng: max(allowed, key=lambda i: i in (57, 80)),
                                         random.Random(0))
    assert json.loads(text).keys() == {"a"}


def reached(tables: TokenTables) -> Iterator[tuple[int, list[int]]]:
    """Each state that allowed tokens lead to, with the ids allowed there."""
    order = [0]
    seen = {0}
    for state in order:                                 # grows while it is read
        row = tables.allowed_ids(state).tolist()
        yield state, row
        for token in row:
            target = tables.advance(state, token)
            if target not in seen:
                seen.add(target)
                order.append(target)


@pytest.mark.parametrize("missing", [b"", b"ABCxyz~\x7f", bytes(range(0x80, 0x100))], ids=["all bytes", "few", "ASCII"])
@pytest.mark.parametrize("name", ["pattern and maxLength", "enum in an object", "integer range", "maxLength", "format"])
def test_no_reachable_state_has_an_empty_mask(name: str, missing: bytes) -> None:
    """And each state leads on to the end, also with a vocabulary that cannot spell every character."""
    tokens = [token for token in VOCABULARY.token_bytes if token is None or not set(token) & set(missing)]
    vocabulary = Vocabulary(tokens, eos_ids=[tokens.index(None)])
    tables = jradix.compile_grammar(json_schema=KEYWORDS[name][0], vocabulary=vocabulary, engine="dfa").tables
    rows = dict(reached(tables))
    assert all(rows.values())
    ends = {state for state, row in rows.items() if tables.accepting[state]}
    while True:
        more = {state for state, row in rows.items() if {tables.advance(state, token) for token in row} & ends} - ends
        if not more:
            break
        ends |= more
    assert ends == set(rows)


def test_byte_that_the_vocabulary_lacks_fails_at_compile_time() -> None:
    no_quote = Vocabulary([*(bytes([byte]) for byte in range(256) if byte != 0x22), None], eos_ids=[255])
    with pytest.raises(GrammarError, match="0x22"):
        jradix.compile_grammar(json_schema=STRING, vocabulary=no_quote)
    assert jradix.compile_grammar(json_schema=INTEGER, vocabulary=no_quote).num_rows > 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("whitespace, longest", [("compact", 0), (0, 0), (2, 2), ((", ", ": "), 1)], ids=str)
def test_model_that_wants_blanks_ends_with_valid_json(whitespace: Any, longest: int, engine: str) -> None:
    """X02: blanks first, digits next; no run of blanks longer than the option says, and the text ends."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
              "required": ["a"], "additionalProperties": False}
    grammar = jradix.compile_grammar(json_schema=schema, whitespace=whitespace, vocabulary=VOCABULARY, engine=engine)

    def choose(data: bytes, allowed: list[int], rng: random.Random) -> int:
        texts = {token: VOCABULARY.token_bytes[token] or b"" for token in allowed}
        return max(allowed, key=lambda token: (texts[token].isspace(), len(texts[token]), texts[token].isdigit()))

    text = Walk(grammar).run(choose, random.Random(0), num_tokens=64)
    assert text is not None and json.loads(text)["a"] in range(100)
    assert max(map(len, re.findall(rb"\s*", text))) == longest
