"""Compiling in processes of their own: results equal to those in this process, and no process is ever left over."""
from __future__ import annotations

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jradix
from jradix.errors import EngineError, GrammarError, GrammarTooLarge
from jradix.grammar.compile_pool import CompilePool
from jradix.grammar.compiler import Grammar, compile_grammar
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.table_store import TableStore, table_key
from jradix.grammar.token_dfa import build_token_tables
from jradix.grammar.vocabulary import Vocabulary, vocabulary_of
from jradix.tokenizer import Tokenizer
from tests import smollm
from tests.toy_tokenizers import make_sentencepiece_tokenizer

ENVIRONMENT = {**os.environ,
               "PYTHONPATH": os.pathsep.join([str(Path(jradix.__file__).parent.parent), *sys.path])}
TIMEOUT_S = 30.0
SCHEMA = {"type": "object", "required": ["name", "kind"], "additionalProperties": False,
          "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["tool", "toy"]},
                         "price": {"type": "number", "minimum": 0}}}
SOURCES: list[dict[str, Any]] = [
    dict(json_schema=SCHEMA, whitespace=(", ", ": ")), dict(json_schema=SCHEMA, canonical=False),
    dict(json_schema={"type": "array", "items": {"$ref": "#"}}, max_depth=2), dict(regex="(a|ab)(c|bcd)*[é-ü]{0,3}"),
    dict(choices=["The answer", "no"]), dict(json_schema={"type": "array", "items": {"$ref": "#"}}, max_depth=None),
    dict(regex="a+", limits=GrammarLimits(max_states=1)), dict(grammar='start: "a" start "b" | "c"')]
REFUSED: list[dict[str, Any]] = [
    dict(regex="(?=a)b"), dict(json_schema={"type": "string", "minLength": 3, "maxLength": 1}),
    dict(json_schema="{"), dict(regex="a", choices=["b"]), dict(regex="a", strict=True),
    dict(regex="(a{1000}){1000}", engine="dfa"),
    dict(regex="[a-z]{1,50}", limits=GrammarLimits(max_states=10), engine="dfa")]
SLOW = dict(regex="(.{1,30}x?){1,40}", limits=GrammarLimits(max_work=10**9), engine="dfa")       # about 10 s


@cache
def byte_vocabulary(eos: int = 256) -> Vocabulary:
    return Vocabulary([*(bytes([b]) for b in range(256)), None, None, b"ab", b'{"'], eos_ids=[eos])


@cache
def spoken_vocabulary() -> Vocabulary:
    """With a tokenizer behind it, SmolLM2's where it is installed."""
    if not smollm.is_installed():
        return vocabulary_of(make_sentencepiece_tokenizer(["The", "\u2581answer", '{"', '":']))
    from jradix.model_files import resolve
    return vocabulary_of(Tokenizer.from_gguf(resolve("demo").path))


@pytest.fixture
def make_pool() -> Iterator[Callable[..., CompilePool]]:
    pools = []

    def make(vocabulary: Vocabulary | None = None, num_workers: int = 1, **options: Any) -> CompilePool:
        pools.append(CompilePool(vocabulary or byte_vocabulary(), num_workers=num_workers, **options))
        return pools[-1]
    yield make
    for pool in pools:
        pool.close()


def results(pool: CompilePool) -> dict[str, Grammar | GrammarError]:
    """All that is pending."""
    found = {}
    while pool.num_pending:
        assert pool.wait(TIMEOUT_S), "nothing finished in time"
        found.update(pool.take_finished())
    return found


def result(pool: CompilePool, **sources: Any) -> Grammar | GrammarError:
    pool.submit("only", sources)
    return results(pool)["only"]


def until(is_so: Callable[[], Any]) -> Any:
    """Waits for a true value and returns it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := is_so()):
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.01)
    return value


def is_gone(pid: int) -> bool:
    """Neither running nor a zombie of ours."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def has_ended(pid: int) -> bool:
    """Not running; perhaps not yet buried by a parent that is not ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


def test_grammars_from_two_workers_equal_those_compiled_here_bit_for_bit(make_pool):
    vocabulary = spoken_vocabulary()
    pool = make_pool(vocabulary, num_workers=2)
    for i, sources in enumerate(SOURCES):
        pool.submit(str(i), sources)
    found = results(pool)
    assert len(pool.worker_pids) == 2 and pool.num_compiled == len(SOURCES)
    for i, sources in enumerate(SOURCES):
        assert_same(found[str(i)], compile_grammar(vocabulary=vocabulary, **sources))
    assert [found[key].engine for key in "01234567"] == ["dfa"] * 2 + ["dfa-depth-2", "dfa", "dfa"] + ["matcher"] * 3
    assert (found["0"].tables.forced_token >= 0).any()              # the tokenizer really crossed


def test_tables_share_the_bytes_of_the_vocabulary(make_pool, tmp_path: Path):
    store, sources = TableStore(tmp_path), dict(regex="[a-z]{1,9}")
    compiled = compile_grammar(**sources)
    tables = build_token_tables(compiled.dfa, byte_vocabulary(), transition_budget_bytes=1)
    store.save(table_key(sources, byte_vocabulary()), dataclasses.replace(compiled, tables=tables))
    found = result(make_pool(store=store), **sources)
    assert found.tables.byte_tables.byte_data is byte_vocabulary().byte_data
    assert found.tables.byte_tables.byte_starts is byte_vocabulary().byte_starts
    assert_same(found.tables, tables)


def test_errors_keep_their_class_and_text(make_pool):
    pool = make_pool()
    for i, sources in enumerate(REFUSED):
        pool.submit(str(i), sources)
    found = results(pool)
    for i, sources in enumerate(REFUSED):
        with pytest.raises(GrammarError) as expected:
            compile_grammar(vocabulary=byte_vocabulary(), **sources)
        assert type(found[str(i)]) is type(expected.value)
        assert str(found[str(i)]) == str(expected.value)


def test_sources_that_cannot_cross_are_errors_of_their_key(make_pool):
    pool = make_pool()
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert isinstance(result(pool, json_schema=deep), GrammarTooLarge)
    assert "cannot be handed" in str(result(pool, choices=(word for word in "ab")))
    assert "leave it out" in str(result(pool, regex="a", vocabulary=byte_vocabulary()))
    assert not pool.worker_pids                                     # none was needed


def test_python_types_and_later_changes_of_the_sources_are_taken_as_at_submission(make_pool):
    @dataclasses.dataclass
    class Item:
        name: str

    choices = ["yes"]
    pool = make_pool()
    pool.submit("choices", dict(choices=choices))
    choices[0] = "no"
    pool.submit("type", dict(json_schema=Item))
    found = results(pool)
    assert found["choices"].accepts("yes") and not found["choices"].accepts("no")
    assert found["type"].accepts('{"name":"x"}')


def test_a_hostile_regex_next_to_a_small_one_does_not_hold_it_up(make_pool):
    """X13: one expression of 2^21 states is refused by a limit with a name; the other request is finished meanwhile."""
    pool = make_pool(num_workers=2)
    result(pool, regex="a")
    pool.submit("slow", SLOW)
    pool.submit("hostile", dict(regex="(a|b)*a(a|b){20}", engine="dfa"))
    pool.submit("small", dict(regex="[ab]+"))
    done = []
    while len(done) < 2:
        assert pool.wait(TIMEOUT_S)
        done += pool.take_finished()
    assert [key for key, _ in done] == ["hostile", "small"] and pool.num_pending == 1
    assert isinstance(done[0][1], GrammarTooLarge) and "max_states=65,000" in str(done[0][1])
    assert done[1][1].accepts("abba")
    for pid in pool.worker_pids:
        peak_kb = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line]
        assert int(peak_kb[0]) < 500_000


def test_the_same_schema_is_compiled_once_per_vocabulary(make_pool, tmp_path: Path):
    """X14: a batch with one schema compiles it once, with another tokenizer once more, and never again."""
    store = TableStore(tmp_path)
    pools = [make_pool(vocabulary, store=store) for vocabulary in (byte_vocabulary(), byte_vocabulary(eos=257))]
    for pool in pools:
        for _ in range(500):
            pool.submit("schema", dict(json_schema=SCHEMA))
        assert list(results(pool)) == ["schema"] and pool.num_compiled == 1
    assert until(lambda: len(list(tmp_path.glob("*.grammar"))) == 2)
    again = make_pool(store=store)
    assert_same(result(again, json_schema=SCHEMA), compile_grammar(json_schema=SCHEMA, vocabulary=byte_vocabulary()))
    assert again.num_compiled == 0 and not again.worker_pids


def test_a_store_that_cannot_be_written_changes_nothing(make_pool, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    pool = make_pool(store=TableStore(tmp_path / "file"))
    assert result(pool, regex="a").accepts("a")
    assert result(pool, regex="b").accepts("b")


def test_a_worker_killed_at_work_is_an_error_of_its_grammar_and_the_next_one_compiles(make_pool):
    pool = make_pool()
    result(pool, regex="a")
    pid, = pool.worker_pids
    os.kill(pid, signal.SIGSTOP)                                    # so that it is surely not done before it dies
    pool.submit("killed", dict(regex="b+"))
    pool.submit("next", dict(regex="c+"))
    assert not pool.wait(0.2)
    os.kill(pid, signal.SIGKILL)
    found = results(pool)
    assert type(found["killed"]) is GrammarError
    assert "b+" in str(found["killed"]) and "the compiler process died (signal 9)" in str(found["killed"])
    assert found["next"].accepts("cc")
    assert is_gone(pid) and pool.worker_pids != (pid,)


def test_a_worker_that_died_idle_is_replaced_without_an_error(make_pool):
    pool = make_pool()
    result(pool, regex="a")
    pid, = pool.worker_pids
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)               # it has ended, and is left to the pool
    assert result(pool, regex="b").accepts("b")
    assert is_gone(pid) and len(pool.worker_pids) == 1


def test_a_worker_that_cannot_start_is_an_error_that_says_so(make_pool, monkeypatch: pytest.MonkeyPatch,
                                                              tmp_path: Path):
    pool = make_pool()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "no-python"))
        assert "did not start" in str(result(pool, regex="a"))
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\nexit 3\n")
        broken.chmod(0o755)
        patch.setattr(sys, "executable", str(broken))
        assert "died (exit status 3)" in str(result(pool, regex="a"))
    assert result(pool, regex="a").accepts("a")


def test_close_ends_busy_and_idle_workers_at_once(make_pool):
    pool = make_pool(num_workers=2)
    pool.submit("slow", SLOW)
    pool.submit("quick", dict(regex="a"))
    assert pool.wait(TIMEOUT_S) and pool.take_finished()[0][0] == "quick"
    pids = pool.worker_pids
    assert len(pids) == 2
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 5
    assert all(map(is_gone, pids)) and not pool.worker_pids
    assert not pool.num_pending and not pool.take_finished() and not pool.wait(0.0)
    pool.close()
    with pytest.raises(EngineError, match="closed"):
        pool.submit("later", dict(regex="a"))


def test_close_while_a_worker_starts_leaves_none(make_pool):
    pool = make_pool(num_workers=2)
    for i in range(3):
        pool.submit(str(i), SLOW)
    pids = until(lambda: pool.worker_pids)
    pool.close()
    assert all(map(is_gone, pids))


def test_a_pool_that_nobody_holds_ends_its_workers():
    pool = CompilePool(byte_vocabulary(), num_workers=1)
    pool.submit("slow", SLOW)
    pid, = until(lambda: pool.worker_pids)
    del pool
    gc.collect()
    until(lambda: is_gone(pid))


def test_take_and_wait_without_work_return_at_once(make_pool):
    pool = make_pool()
    started = time.monotonic()
    assert pool.take_finished() == [] and not pool.wait(TIMEOUT_S)
    pool.submit("slow", SLOW)
    assert pool.take_finished() == [] and not pool.wait(0.05)
    assert time.monotonic() - started < 5


SCRIPT = """
import sys
from pathlib import Path
from jradix.grammar.compile_pool import CompilePool
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.vocabulary import Vocabulary

print("begins", flush=True)
vocabulary = Vocabulary([*(bytes([b]) for b in range(256)), None], eos_ids=[256])
pool = CompilePool(vocabulary, num_workers=2)
pool.submit("quick", dict(regex="a+"))
assert pool.wait(30)
print(pool.take_finished()[0][1].accepts("aa"), flush=True)
pool.submit("slow", dict(regex="(.{1,30}x?){1,40}", limits=GrammarLimits(max_work=10**9), engine="dfa"))
print(*pool.worker_pids, flush=True)
if sys.argv[1] == "wait":
    pool.wait(60)
"""


def script(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """SCRIPT, run in a folder where a file is named like a module of the standard library."""
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "pickle.py").write_text("raise SystemExit('the wrong pickle')")
    (tmp_path / "script.py").write_text(SCRIPT)
    return subprocess.Popen([sys.executable, str(tmp_path / "script.py"), *arguments], cwd=tmp_path / "cwd",
                            env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def test_a_script_without_main_guard_runs_once_and_leaves_no_worker_at_its_end(tmp_path: Path):
    with script(tmp_path, "leave") as process:
        begins, is_accepted, pids = process.stdout.read().splitlines()
    assert (begins, is_accepted, process.returncode) == ("begins", "True", 0)
    assert all(has_ended(int(pid)) for pid in pids.split())


def test_a_busy_worker_ends_when_its_parent_is_killed(tmp_path: Path):
    with script(tmp_path, "wait") as process:
        pids = [int(pid) for pid in [process.stdout.readline() for _ in range(3)][2].split()]
        time.sleep(0.2)
        assert pids and not any(map(has_ended, pids))
        process.kill()
    started = time.monotonic()
    until(lambda: all(map(has_ended, pids)))
    assert time.monotonic() - started < 5


def test_a_worker_imports_no_device_library_and_no_transformers():
    program = ("import sys, jradix.grammar.worker\n"
               "print(sorted({'jax', 'flax', 'transformers', 'torch', 'tokenizers'} & sys.modules.keys()))")
    output = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    assert output.strip() == "[]"


def test_a_vocabulary_that_cannot_cross_or_no_worker_at_all_is_refused():
    with pytest.raises(ValueError, match="vocabulary_of"):
        CompilePool(Vocabulary([b"a"], encode=lambda text: [0] * len(text)), num_workers=1)
    with pytest.raises(ValueError, match="num_workers=0"):
        CompilePool(byte_vocabulary(), num_workers=0)
