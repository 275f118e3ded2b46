"""The disk cache of compiled grammars: what it gives back, what counts as a miss, and its bound."""
from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jradix
from jradix.errors import GrammarError
from jradix.grammar import table_store
from jradix.grammar.compiler import Grammar, compile_grammar
from jradix.grammar.dfa import compile_language
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.matcher import MatcherSource
from jradix.grammar.regex import parse_regex
from jradix.grammar.table_store import TableStore, table_key
from jradix.grammar.token_dfa import build_token_tables
from jradix.grammar.vocabulary import Vocabulary

SCHEMA = {"type": "object", "properties": {"b": {"type": "string", "maxLength": 5}, "a": {"enum": ["x", "yé"]}},
          "required": ["b"], "unheard-of": 1}
KEY = "0123456789abcdef"


def vocabulary(eos: int = 256) -> Vocabulary:
    return Vocabulary([*(bytes([b]) for b in range(256)), None, None, b"ab", b'{"', b'":"'], eos_ids=[eos])


def grammar(**sources: Any) -> Grammar:
    return compile_grammar(vocabulary=vocabulary(), **sources)


def assert_same(found: Any, expected: Any) -> None:
    """Equal values of equal types, arrays bit for bit."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


@pytest.fixture
def store(tmp_path: Path) -> TableStore:
    return TableStore(tmp_path / "tables")


def entry(store: TableStore, key: str = KEY) -> Path:
    path, = store.folder.glob(f"{key}*")
    return path


@pytest.mark.parametrize("sources", [dict(json_schema=SCHEMA), dict(json_schema={"type": "array"}, lenient=True),
                                     dict(regex="(ab)+é{2,9}"), dict(choices=["yes", "no"])])
def test_load_after_save_gives_the_same_grammar_bit_for_bit(store: TableStore, sources: dict[str, Any]):
    saved = grammar(**sources)
    store.save(KEY, saved)
    found = store.load(KEY)
    assert found is not saved
    assert_same(found, saved)
    assert found.engine == saved.engine and found.table_bytes == saved.table_bytes


def test_load_of_byte_tables_and_of_a_grammar_without_tables_gives_the_same(store: TableStore):
    dfa = compile_language(parse_regex("[a-z]{1,9}"))
    tables = build_token_tables(dfa, vocabulary(), transition_budget_bytes=1)
    assert tables.byte_tables is not None
    for saved in (dataclasses.replace(grammar(regex="a"), dfa=dfa, tables=tables), compile_grammar(regex="a+")):
        store.save(KEY, saved)
        assert_same(store.load(KEY), saved)


def test_load_of_a_matcher_grammar_gives_the_same(store: TableStore):
    saved = dataclasses.replace(grammar(regex="a"), dfa=None, tables=None, reason="too many states",
                                matcher=MatcherSource('{"grammars": []}', "json_schema"))
    store.save(KEY, saved)
    assert_same(store.load(KEY), saved)


def test_load_of_an_unknown_key_or_folder_is_a_miss(store: TableStore):
    assert store.load(KEY) is None
    store.save(KEY, grammar(regex="a"))
    assert store.load("ff" * 8) is None


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "ABCDEF0123", "0123", "0123456789abcdef/x"])
def test_keys_that_are_no_digests_are_refused(store: TableStore, key: str):
    with pytest.raises(ValueError, match="hex digits"):
        store.load(key)
    with pytest.raises(ValueError, match="hex digits"):
        store.save(key, grammar(regex="a"))


@pytest.mark.parametrize("num_kept", [0, 5, 40, 200, -1])
def test_a_truncated_entry_is_a_miss(store: TableStore, num_kept: int):
    store.save(KEY, grammar(regex="a"))
    path = entry(store)
    path.write_bytes(path.read_bytes()[:num_kept])
    assert store.load(KEY) is None


def test_any_flipped_byte_is_a_miss(store: TableStore):
    store.save(KEY, grammar(regex="a"))
    path = entry(store)
    content = path.read_bytes()
    for position in [*range(60), *range(60, len(content), 37)]:
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        assert store.load(KEY) is None, position
    path.write_bytes(content + b"\0")
    assert store.load(KEY) is None
    path.write_bytes(content)
    assert store.load(KEY) is not None


def test_an_entry_of_another_format_or_key_is_a_miss(store: TableStore, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(table_store, "MAGIC", b"jradix grammar 0\n")
        store.save(KEY, grammar(regex="a"))
    assert store.load(KEY) is None
    store.save(KEY, grammar(regex="a"))
    os.rename(entry(store), store.folder / f"{'ab' * 8}.grammar")
    assert store.load("ab" * 8) is None


def test_an_entry_with_other_fields_is_a_miss(store: TableStore, monkeypatch: pytest.MonkeyPatch):
    @dataclasses.dataclass
    class Dfa:
        states: int

    with monkeypatch.context() as patch:
        patch.setitem(table_store.CLASSES, "Dfa", Dfa)
        store.save(KEY, dataclasses.replace(grammar(regex="a"), dfa=Dfa(3)))
    assert store.load(KEY) is None


def test_a_value_that_cannot_be_kept_is_refused_and_nothing_is_left_behind(store: TableStore):
    store.save(KEY, grammar(regex="a"))
    with pytest.raises(TypeError, match="set"):
        store.save("ab" * 8, dataclasses.replace(grammar(regex="a"), reason={1}))
    assert [path.name for path in store.folder.iterdir()] == [f"{KEY}.grammar"]


def test_save_beyond_the_bound_drops_the_least_recently_used(store: TableStore):
    saved = grammar(regex="[a-f]{1,30}")
    keys = [f"{i:016x}" for i in range(5)]
    store.save(keys[0], saved)
    store.max_bytes = 3 * entry(store, keys[0]).stat().st_size + 50
    for age, key in enumerate(keys[:3]):
        store.save(key, saved)
        os.utime(entry(store, key), (1000 + age, 1000 + age))
    store.load(keys[0])                                    # used now: the next to go is keys[1]
    store.save(keys[3], saved)
    assert [store.load(key) is not None for key in keys] == [True, False, True, True, False]
    assert sum(path.stat().st_size for path in store.folder.iterdir()) <= store.max_bytes
    store.max_bytes = 100                                  # too small for a single one
    store.save(keys[4], saved)
    assert store.load(keys[4]) is None


def test_save_clears_away_old_unfinished_files_only(store: TableStore):
    store.save(KEY, grammar(regex="a"))
    old, young = store.folder / "aa.1-00.tmp", store.folder / "bb.1-00.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    store.save(KEY, grammar(regex="a"))
    assert not old.exists() and young.exists()


def test_two_processes_that_save_and_load_the_same_key_never_see_half_an_entry(store: TableStore):
    program = ("import sys\nfrom pathlib import Path\nfrom jradix.grammar.compiler import compile_grammar\n"
               "from jradix.grammar.table_store import TableStore\n"
               "store, grammar = TableStore(Path(sys.argv[1])), compile_grammar(regex='[a-z]{1,200}')\n"
               "store.save(sys.argv[2], grammar)\n"
               "for _ in range(60):\n"
               "    store.save(sys.argv[2], grammar)\n"
               "    assert store.load(sys.argv[2]) is not None\n")
    path = os.pathsep.join([str(Path(jradix.__file__).parent.parent), *sys.path])
    processes = [subprocess.Popen([sys.executable, "-c", program, str(store.folder), KEY],
                                  env={**os.environ, "PYTHONPATH": path}) for _ in range(2)]
    assert [process.wait(30) for process in processes] == [0, 0]
    assert [path.name for path in store.folder.iterdir()] == [f"{KEY}.grammar"]
    assert store.load(KEY).accepts("abc")


def test_table_key_tells_apart_whatever_changes_the_tables():
    """X14: the key is the canonical schema, its options and the vocabulary."""
    base = dict(json_schema=SCHEMA)
    turned = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}
    keys = [table_key(base, vocabulary()), table_key(dict(json_schema=turned), vocabulary()),
            table_key({**base, "strict": True}, vocabulary()), table_key({**base, "canonical": False}, vocabulary()),
            table_key({**base, "whitespace": (", ", ": ")}, vocabulary()), table_key(base, vocabulary(eos=257)),
            table_key(base, vocabulary(), GrammarLimits(max_states=9)), table_key(dict(regex="a"), vocabulary()),
            table_key(dict(choices=["a"]), vocabulary()), table_key({**base, "max_depth": None}, vocabulary())]
    assert len(set(keys)) == len(keys)


def test_table_key_is_equal_for_equal_sources_however_they_are_written():
    """X14: the same schema again is the same key."""
    text = '{"type": "object",  "properties": {"a": true}}'
    same = [dict(json_schema=text), dict(json_schema={"type": "object", "properties": {"a": True}}, regex=None)]
    assert len({table_key(sources, vocabulary()) for sources in same}) == 1
    options = [("strict", True), ("max_depth", 2)]
    assert len({table_key(dict(json_schema=True, **dict(order)), vocabulary(), GrammarLimits())
                for order in (options, options[::-1])}) == 1
    with pytest.raises(GrammarError, match="no JSON"):
        table_key(dict(json_schema="{"), vocabulary())


def test_store_with_a_bound_below_one_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="max_bytes=0"):
        TableStore(tmp_path, max_bytes=0)
