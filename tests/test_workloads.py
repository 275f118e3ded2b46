"""The benchmark workloads: same ids as the agreed ones, same for every run, and the fewest tokens they can cost."""
from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
AGREED = ROOT.parent / "shared" / "workloads.py"


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module      # for dataclasses and NamedTuples, which look their module up
    spec.loader.exec_module(module)
    return module


workloads = _load(ROOT / "benchmarks" / "workloads.py", "benchmark_workloads")
SIZES = [(name, size) for name, sizes in workloads.SIZES.items() for size in sizes]


def _fake_outputs(seed: int):
    """Outputs that depend on the seed and on nothing else."""
    rng = random.Random(seed)
    return lambda batch: [[rng.randrange(49_152) for _ in range(request.num_output)] for request in batch]


@pytest.fixture(scope="module")
def agreed() -> ModuleType:
    if not AGREED.is_file():
        pytest.skip(f"no {AGREED.name} beside the repository")
    return _load(AGREED, "agreed_workloads")


@pytest.mark.parametrize(("name", "size"), [pair for pair in SIZES if pair != ("chatbot", "gpu")])
def test_workload_every_size_equals_the_agreed_one(agreed: ModuleType, name: str, size: str) -> None:
    seed = 3
    ours = workloads.drive(workloads.WORKLOADS[name](size, seed), _fake_outputs(1))
    theirs = agreed.drive(agreed.WORKLOADS[name](size, seed), _fake_outputs(1))
    assert ours == theirs
    if len(ours) * len(ours[0][0].prompt) < 100_000:
        assert workloads.minimum_computed_tokens(ours) == agreed.minimum_computed_tokens(theirs)


def test_workload_largest_chatbot_equals_the_agreed_one(agreed: ModuleType) -> None:
    """Four million tokens: the first requests stand for all, but for the last one drawn."""
    ours, theirs = next(workloads.chatbot("gpu")), next(agreed.chatbot("gpu"))
    assert len(ours) == len(theirs) and ours[:2] == theirs[:2] and ours[-1] == theirs[-1]


def test_constants_equal_the_agreed_ones(agreed: ModuleType) -> None:
    for name in ("SIZES", "VOCABULARY", "PRODUCT_SCHEMA", "JSON_PROMPT", "JSON_MAX_TOKENS", "PRODUCTS"):
        assert getattr(workloads, name) == getattr(agreed, name), name
    assert set(workloads.WORKLOADS) == set(agreed.WORKLOADS)
    public = {name for name in vars(agreed) if not name.startswith("_")}
    assert public <= set(vars(workloads))


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_workload_another_seed_gives_other_tokens_of_the_same_lengths(name: str) -> None:
    runs = [workloads.drive(workloads.WORKLOADS[name]("tiny", seed), _fake_outputs(0)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    lengths = [[(len(request.prompt), request.num_output) for request, _ in run] for run in runs]
    assert lengths[0] == lengths[2]
    assert all(a.prompt[:8] != b.prompt[:8] for (a, _), (b, _) in zip(runs[0], runs[2]))


def test_react_next_turn_continues_prompt_and_output() -> None:
    turns = []

    def run(batch):
        turns.append([list(request.prompt) for request in batch])
        return [[index + 1] * request.num_output for index, request in enumerate(batch)]

    workloads.drive(workloads.react("tiny"), run)
    assert len(turns) == 3
    for before, after in zip(turns, turns[1:]):
        for index, (old, new) in enumerate(zip(before, after)):
            assert new[:len(old) + 4] == old + [index + 1] * 4 and len(new) == len(old) + 24
    assert turns[0][0][:60] == turns[0][1][:60] and turns[0][0][60:] != turns[0][1][60:]


def test_drive_wrong_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens.*exactly 8"):
        workloads.drive(workloads.noshare("tiny"), lambda batch: [[1, 2, 3]] * len(batch))
    with pytest.raises(ValueError, match="4 requests came back with 0"):
        workloads.drive(workloads.noshare("tiny"), lambda batch: [])


def test_workload_unknown_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no size 'huge'.*tiny, small"):
        next(workloads.noshare("huge"))


def test_minimum_computed_tokens_counts_distinct_positions_once() -> None:
    request = workloads.Request
    cases = [
        ([(request([1, 2, 3], 1), [9])], 3),
        ([(request([1, 2, 3], 1), [9]), (request([1, 2, 4], 1), [9])], 4),          # a shared prefix
        ([(request([1, 2, 3], 1), [9]), (request([1, 2, 3], 1), [9])], 4),          # known, but the last token is run
        ([(request([1, 2], 2), [7, 8]), (request([1, 2, 7, 8, 5], 1), [9])], 4),    # 7 was decoded, 8 only sampled
        ([(request([1, 2], 0), []), (request([1, 2, 3], 0), [])], 3),
    ]
    for done, expected in cases:
        assert workloads.minimum_computed_tokens(done) == expected, done
