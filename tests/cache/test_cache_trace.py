"""The trace replay: its optimum is one, its hits add up, and slru keeps its promises on the synthetic traces."""
from __future__ import annotations

import importlib
import json
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Iterator

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def cache_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    yield importlib.import_module("cache_trace")
    for name in ("cache_trace", "report"):
        if name not in before:
            sys.modules.pop(name, None)


def most_hits(cache_trace: ModuleType, trace: list, num_pages: int) -> int:
    """Hits with the best possible choices, by trying all: one token per page."""
    paths = [[tuple(request.tokens[:n + 1].tolist()) for n in range(len(request.tokens))] for request in trace]
    best: dict[frozenset, int] = {frozenset(): 0}
    for request, path in zip(trace, paths):
        following: dict[frozenset, int] = {}
        for cached, hits in best.items():
            for page in path[:len(request.tokens) - request.num_output - 1]:
                if page not in cached:
                    break
                hits += 1
            others = sorted(cached - set(path))
            room = min(num_pages - len(path), len(others))
            for kept in combinations(others, room):
                pages = frozenset(kept) | set(path)
                if all(len(page) == 1 or page[:-1] in pages for page in pages):
                    following[pages] = max(following.get(pages, 0), hits)
        best = following
    return max(best.values())


def random_trace(cache_trace: ModuleType, seed: int, count: int) -> list:
    rng = np.random.default_rng(seed)
    trace = []
    for i in range(count):
        length = int(rng.integers(2, 5))
        trace.append(cache_trace.Request(float(i), rng.integers(0, 2, length, dtype=np.int32), int(rng.integers(0, 2))))
    return trace


def test_replay_optimum_small_traces_equals_trying_everything(cache_trace: ModuleType) -> None:
    for seed in range(40):
        trace = random_trace(cache_trace, seed, 12)
        assert sum(cache_trace.replay_optimum(trace, 7, 1)) == most_hits(cache_trace, trace, 7), seed


@pytest.mark.parametrize("policy", ("lru", "lfu", "slru"))
def test_replay_pool_that_holds_all_finds_what_was_there(cache_trace: ModuleType, policy: str) -> None:
    """Without evictions every policy finds what the optimum finds; with them never more."""
    for seed in range(20):
        trace = random_trace(cache_trace, seed, 30)
        assert cache_trace.replay(trace, policy, 100, 1) == cache_trace.replay_optimum(trace, 100, 1)
        assert sum(cache_trace.replay(trace, policy, 7, 1)) <= sum(cache_trace.replay_optimum(trace, 7, 1))


def test_replay_generated_tokens_are_cached_but_not_looked_up(cache_trace: ModuleType) -> None:
    tokens = np.arange(12, dtype=np.int32)
    trace = [cache_trace.Request(0.0, tokens[:8], 4), cache_trace.Request(1.0, tokens[:8], 4),
             cache_trace.Request(2.0, tokens)]
    assert cache_trace.replay(trace, "lru", 10, 2) == cache_trace.replay_optimum(trace, 10, 2) == [0, 2, 8]


@pytest.mark.parametrize("name", ("system prompts", "scan and hot set", "conversations"))
def test_hit_rate_slru_is_nowhere_far_below_lru_and_near_the_optimum_under_scans(cache_trace: ModuleType,
                                                                                 name: str) -> None:
    for seed in (0, 1):
        trace = cache_trace.TRACES[name](np.random.default_rng(seed), 0.3)
        lru, slru, optimum = (cache_trace.hit_rate(trace, policy, 1600, 16) for policy in ("lru", "slru", "belady"))
        assert lru - 0.02 <= slru <= optimum
        if name == "scan and hot set":
            assert lru + 0.05 < slru and optimum - 0.05 < slru


def test_hit_rate_slru_documents_asked_twice_learns_to_protect_little(cache_trace: ModuleType) -> None:
    """The worst for protection: every prefix is used again once, and then never. A fixed share loses ten points."""
    rng = np.random.default_rng(0)
    trace = []
    for i in range(300):
        document = rng.integers(0, 40_000, int(rng.lognormal(6.9, 0.4)), dtype=np.int32)
        for time_s in (i, i + rng.exponential(15.0)):
            question = rng.integers(0, 40_000, 150, dtype=np.int32)
            trace.append(cache_trace.Request(float(time_s), np.concatenate([document, question]), 64))
    trace.sort(key=lambda request: request.time_s)
    lru, slru = (cache_trace.hit_rate(trace, policy, 1600, 16) for policy in ("lru", "slru"))
    assert lru > 0.2 and slru > lru - 0.02


def test_main_synthetic_traces_print_each_policy_and_end_in_json(cache_trace: ModuleType,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    assert cache_trace.main(["--size", "tiny", "--seeds", "3", "4", "--pages", "800", "--json"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["benchmark"] == "cache_trace" and result["pages"] == 800
    assert [trace["trace"] for trace in result["traces"]] == ["system prompts", "scan and hot set", "conversations"]
    for trace in result["traces"]:
        assert trace["seeds"] == [3, 4] and len(trace["by_seed"]) == 2
        for policy in ("lru", "lfu", "slru", "belady"):
            rates = [rates[policy] for rates in trace["by_seed"]]
            assert trace["mean"][policy] == pytest.approx(100 * sum(rates) / 2, rel=1e-3) and 0 < max(rates) < 1
    assert sum(line.startswith("  mean") for line in table) == 3


def test_main_trace_file_is_replayed(cache_trace: ModuleType, tmp_path: Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"time_s": 0, "tokens": [1, 2, 3, 4, 5]}\n\n{"time_s": 1.5, "tokens": [1, 2, 3, 4, 9, 9], '
                    '"num_output": 1}\n', encoding="utf-8")
    assert cache_trace.main(["--trace", str(path), "--pages", "8", "--page-size", "2", "--policies", "lru"]) == 0
    out = capsys.readouterr().out
    assert "requests.jsonl" in out and "2 requests, 10 prompt tokens, 3 distinct pages" in out
    assert out.splitlines()[3].split() == ["mean", "40"]


@pytest.mark.parametrize("text, said", (
    ('{"time_s": 0}', "line 1: KeyError('tokens'); expected"),
    ('{"time_s": 0, "tokens": ["a"]}', "line 1: ValueError"),
    ("[1, 2]", "line 1: TypeError"),
    ('{"time_s": 0, "tokens": [1], "num_output": 1}', "line 1: 1 of 1 tokens are output"),
    ('{"time_s": 2, "tokens": [1]}\n{"time_s": 1, "tokens": [1]}', "line 2: time 1.0 lies before"),
    ("\n", "has no requests"),
    ('{"time_s": 0, "tokens": [1, 2, 3, 4, 5, 6]}', "6 tokens, more than 2 pages of 2; raise --pages")))
def test_main_wrong_trace_file_says_what_is_wrong(cache_trace: ModuleType, tmp_path: Path, text: str, said: str,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text, encoding="utf-8")
    assert cache_trace.main(["--trace", str(path), "--pages", "2", "--page-size", "2"]) == 2
    assert said in capsys.readouterr().err
