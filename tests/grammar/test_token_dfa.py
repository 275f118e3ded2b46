"""Token tables against a walk of the automaton token by token."""
from __future__ import annotations

import numpy as np
import pytest

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar import token_columns, token_dfa
from jradix.grammar.dfa import Dfa, compile_language
from jradix.grammar.language import Lang, alt, any_char, but_not, byte_set, chars, repeat, seq, text
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.token_dfa import REJECT, TokenTables, build_token_tables, pack_rows
from jradix.grammar.vocabulary import Vocabulary

DIGIT = byte_set(b"0123456789")
LANGUAGES = {
    "plus": repeat(text("ab"), 1, None),
    "prefix": alt(text("a"), text("ab")),
    "number": seq(repeat(DIGIT, 1, None), repeat(seq(text("."), repeat(DIGIT, 1, 3)), 0, 1)),
    "choices": alt(text("yes"), text("no"), text("nono")),
    "object": seq(text('{"a":"'), repeat(but_not(any_char(), text('"')), 0, 5), text('","b":'), repeat(DIGIT, 1, 2),
                  text("}")),
    "characters": repeat(chars([(0x1F600, 0x1F601)]), 2, 2),
}


def toy_vocabulary(seed: int = 0, num_tokens: int = 200, all_bytes: bool = True) -> Vocabulary:
    rng = np.random.default_rng(seed)
    pieces = [b"ab", b"a", b"b", b"yes", b"no", b'"', b'","', b"b", b":", b"{", b"}", b"1", b"25", b".", b"\xf0\x9f",
              b"\x98\x80", b"\x98\x81", b'":']
    tokens: list[bytes | None] = [bytes([b]) for b in range(256)] if all_bytes else []
    tokens += [None, None]
    while len(tokens) < num_tokens + 258 * all_bytes:
        tokens.append(b"".join(pieces[i] for i in rng.integers(0, len(pieces), rng.integers(1, 5))))
    return Vocabulary(tokens, eos_ids=[len(tokens) - 3, 256 * all_bytes], num_tokens=len(tokens) + 21)


def live_states(dfa: Dfa, vocabulary: Vocabulary) -> set[int]:
    """States that reach acceptance by tokens, by iteration."""
    live = set(np.flatnonzero(dfa.accepting).tolist())
    while True:
        more = {q for q in range(dfa.num_states) for t in vocabulary.token_bytes if t and dfa.walk(q, t) in live} | live
        if more == live:
            return live
        live = more


def check_against_walk(dfa: Dfa, vocabulary: Vocabulary, tables: TokenTables) -> set[int]:
    """Checks every state that tokens reach, and returns these states."""
    live = live_states(dfa, vocabulary)
    seen, pending = {0}, [0]
    for state in pending:
        targets = {i: dfa.walk(state, t) for i, t in enumerate(vocabulary.token_bytes) if t}
        expected = {i: q for i, q in targets.items() if q in live}
        allowed = tables.allowed_ids(state).tolist()
        if tables.forced_token[state] >= 0:
            assert allowed == [tables.forced_token[state]] and allowed[0] in expected
        else:
            ends = vocabulary.eos_ids if dfa.accepting[state] else ()
            assert allowed == sorted((*expected, *ends))
            assert allowed, f"empty mask in state {state}"
        for i in allowed:
            after = tables.advance(state, i)
            assert after == (state if i in vocabulary.eos_ids else expected[i])
            if after not in seen:
                seen.add(after)
                pending.append(after)
    ends = {q for q in seen if dfa.accepting[q] and (dfa.next_state[q] < 0).all()}
    for state in seen:
        steps = {tables.advance(state, int(i)) for i in tables.allowed_ids(state) if i not in vocabulary.eos_ids}
        assert tables.may_jump[state] == any(tables.forced_token[q] >= 0 or q in ends for q in steps), state
    return seen


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("form", ["classes", "bytes"])
def test_build_token_tables_each_language_equals_walk(name, form):
    dfa, vocabulary = compile_language(LANGUAGES[name]), toy_vocabulary()
    tables = build_token_tables(dfa, vocabulary, transition_budget_bytes=1 << 20 if form == "classes" else 0)
    assert (tables.byte_tables is None) == (form == "classes")
    check_against_walk(dfa, vocabulary, tables)


@pytest.mark.parametrize("seed", range(40))
def test_build_token_tables_random_automata_equal_walk(seed):
    rng = np.random.default_rng(seed)
    lang = alt(text("a"), random_language(rng, 4))
    dfa = compile_language(lang)
    vocabulary = toy_vocabulary(seed, 60, all_bytes=bool(seed % 2))
    if 0 not in live_states(dfa, vocabulary):
        with pytest.raises(GrammarError):
            build_token_tables(dfa, vocabulary)
        return
    check_against_walk(dfa, vocabulary, build_token_tables(dfa, vocabulary))


def random_language(rng: np.random.Generator, depth: int) -> Lang:
    kind = rng.integers(0, 5) if depth else 0
    if kind < 2:
        return text(["ab", "yes", '"', "a", "1", "\U0001f600"][rng.integers(0, 6)])
    parts = [random_language(rng, depth - 1) for _ in range(2)]
    if kind == 4:
        low = int(rng.integers(0, 2))
        return repeat(parts[0], low, None if rng.integers(0, 2) else low + int(rng.integers(0, 4)))
    return seq(*parts) if kind == 2 else alt(*parts)


def test_build_token_tables_small_slices_equal_large_ones(monkeypatch):
    dfa, vocabulary = compile_language(LANGUAGES["object"]), toy_vocabulary()
    whole = build_token_tables(dfa, vocabulary)
    monkeypatch.setattr(token_columns, "MIN_SLICE", 3)
    monkeypatch.setattr(token_columns, "MAX_SLICE", 3)
    sliced = build_token_tables(dfa, vocabulary)
    monkeypatch.setattr(token_columns, "MAX_SLICE", 8_192)
    monkeypatch.setattr(token_columns, "MAX_LEVEL_PAIRS", 40)
    halved = build_token_tables(dfa, vocabulary)
    for other in (sliced, halved):
        assert other.num_rows == whole.num_rows and other.next_state.shape == whole.next_state.shape
        assert (other.mask_rows[other.state_row] == whole.mask_rows[whole.state_row]).all()
        assert (other.next_state[:, other.token_class] == whole.next_state[:, whole.token_class]).all()


def test_merge_columns_with_equal_sums_are_kept_apart(monkeypatch):
    """Columns are compared by a sum of mixed pairs first; a clash of sums must not join them."""
    monkeypatch.setattr(token_columns, "mixed_pairs", lambda sources, targets: np.ones(len(sources), np.uint64))
    columns = token_columns.Columns(np.array([0, 2, 4, 6, 6]), np.array([0, 1, 0, 1, 0, 1], np.int32),
                                    np.array([5, 6, 5, 7, 5, 6], np.int32))
    merged, number = token_columns.merge(columns)
    assert number[0] == number[2] != number[1] and number[3] == -1
    assert np.diff(merged.starts).tolist() == [2, 2]


def test_row_zero_allows_every_real_token_and_no_padded_one():
    """X01: 50 ids, head 96; ids 50 to 95 are allowed in no row."""
    vocabulary = Vocabulary([bytes([b]) for b in range(48)] + [None, None], eos_ids=[49], num_tokens=96)
    tables = build_token_tables(compile_language(repeat(byte_set(range(48)), 1, None)), vocabulary)
    rows = [pack_unpacked(row) for row in tables.mask_rows]
    assert rows[0] == list(range(50))                       # special tokens too: the row of unconstrained requests
    assert rows[tables.state_row[0]] == list(range(48))
    assert max(max(row) for row in rows) < 50 and all(rows)


def pack_unpacked(row: np.ndarray) -> list[int]:
    """Ids in a row, by the definition: token v is bit v // W of word v % W."""
    return [v for v in range(32 * len(row)) if int(row[v % len(row)]) >> (v // len(row)) & 1]


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100])
def test_pack_rows_any_width_follows_the_planar_layout(num_tokens):
    allowed = np.random.default_rng(num_tokens).random((3, num_tokens)) < 0.5
    rows = pack_rows(allowed, -(-num_tokens // 32))
    assert rows.dtype == np.uint32
    assert [pack_unpacked(row) for row in rows] == [np.flatnonzero(row).tolist() for row in allowed]


def test_end_tokens_all_of_them_exactly_in_accepting_states():
    """X09: the tokenizer's, the model's and the request's end tokens are possible at the end and nowhere before."""
    vocabulary = Vocabulary([b"a", None, b"b", None, b"c"], eos_ids=[1, 3]).with_eos([4])
    dfa = compile_language(seq(text("a"), repeat(text("b"), 0, 2)))
    tables = build_token_tables(dfa, vocabulary, canonical=False)
    state = 0
    for token, expected in ((0, [0]), (2, [1, 2, 3, 4]), (2, [1, 2, 3, 4])):
        assert tables.allowed_ids(state).tolist() == expected
        assert tables.accepting[state] == (1 in expected)
        state = tables.advance(state, token)
    assert tables.allowed_ids(state).tolist() == [1, 3, 4]
    assert tables.advance(state, 3) == state and tables.forced_token[state] == -1


def test_characters_of_several_tokens_are_completed_and_never_cut():
    """X06: parts of a character are followed by the rest only, and the end comes only after whole characters."""
    tokens = [b"\xf0\x9f", b"\x98\x80", b"\x98\x81", b"\xe4", b"a", b'"', b"\xb8\xad", None]
    vocabulary = Vocabulary(tokens, eos_ids=[7])
    tables = build_token_tables(compile_language(LANGUAGES["characters"]), vocabulary)
    state = 0
    for _ in range(2):
        assert tables.allowed_ids(state).tolist() == [0]
        state = tables.advance(state, 0)
        assert tables.allowed_ids(state).tolist() == [1, 2]
        state = tables.advance(state, 2)
    assert tables.allowed_ids(state).tolist() == [7]

    anything = build_token_tables(compile_language(repeat(but_not(any_char(), text('"')), 1, None)), vocabulary)
    assert anything.allowed_ids(0).tolist() == [0, 3, 4]    # no lone continuation bytes, no quote
    middle = anything.advance(0, 3)
    assert anything.allowed_ids(middle).tolist() == [1, 2, 6]      # all complete a character
    assert anything.allowed_ids(anything.advance(middle, 6)).tolist() == [0, 3, 4, 7]


def test_characters_that_cannot_be_finished_are_not_begun():
    """X06: 0xE4 is no way in when nothing completes it."""
    vocabulary = Vocabulary([b"\xe4", b"a", None], eos_ids=[2])
    tables = build_token_tables(compile_language(repeat(any_char(), 1, None)), vocabulary)
    assert tables.allowed_ids(0).tolist() == [1]


def test_byte_no_token_spells_is_an_error_that_names_it():
    vocabulary = Vocabulary([b"a", b"b", b"ab"])
    with pytest.raises(GrammarError, match="0x7A"):
        build_token_tables(compile_language(seq(text("a"), text("z"))), vocabulary)


def test_state_and_byte_limits_name_their_numbers():
    vocabulary = toy_vocabulary()
    dfa = compile_language(repeat(text("a"), 0, 100))
    with pytest.raises(GrammarTooLarge, match="101 states"):
        build_token_tables(dfa, vocabulary, GrammarLimits(max_states=50))
    with pytest.raises(GrammarTooLarge, match="masks"):
        build_token_tables(compile_language(LANGUAGES["object"]), vocabulary, GrammarLimits(max_table_bytes=200))


def test_walk_beyond_the_work_limit_is_too_large(monkeypatch):
    monkeypatch.setattr(token_columns, "MAX_WORK", 1_000)
    with pytest.raises(GrammarTooLarge, match="1,000 pairs"):
        build_token_tables(compile_language(LANGUAGES["object"]), toy_vocabulary())


def test_long_runs_of_one_byte_are_walked_like_other_tokens() -> None:
    """Few trie nodes lie so deep; they are walked one by one."""
    tokens = [b"-" * length for length in range(1, 60)] + [b"-" * 40 + b"x", b"x", b"-" * 30 + b"xx"]
    vocabulary = Vocabulary([*tokens, None], eos_ids=[len(tokens)])
    dfa = compile_language(seq(repeat(text("-"), 0, 50), text("x"), repeat(text("-"), 35, None)))
    tables = build_token_tables(dfa, vocabulary)
    assert max(map(len, tokens)) > token_columns.DEEP + 30
    check_against_walk(dfa, vocabulary, tables)


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 63, 64])
def test_picked_bits_are_the_packed_columns(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    rows, columns = rng.random((num_rows, 37)) < 0.3, rng.integers(0, 37, 160)
    np.testing.assert_array_equal(token_dfa._picked_bits(rows, columns),
                                  np.packbits(rows[:, columns], axis=1, bitorder="little"))


def test_rejected_class_of_a_token_no_state_allows_rejects_everywhere():
    vocabulary = toy_vocabulary()
    tables = build_token_tables(compile_language(text("yes")), vocabulary)
    assert (tables.next_state[:, tables.token_class[ord("z")]] == REJECT).all()


def test_rows_of_a_long_counter_are_few():
    tables = build_token_tables(compile_language(repeat(DIGIT, 1, 900)), toy_vocabulary())
    assert tables.num_states > 900 and tables.num_rows < 20
    assert len(np.unique(tables.mask_rows, axis=0)) == len(tables.mask_rows)
