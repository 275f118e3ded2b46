"""benchmarks/gpu_check.py and tune.py without a GPU: what they run and catch, and how they go on after a fault."""
from __future__ import annotations

import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_check
import gpu_correctness
import jax.numpy as jnp
import numpy as np
import pytest
import tune
from gpu_check import Section, plan_cases, serve, watch
from gpu_correctness import combos, compare, prepare_kernel
from gpu_inputs import kernels
from pallas_kernels import blocks
from pallas_kernels.blocks import DecodeBlocks, ExtendBlocks

Fields = dict[str, Any]


def test_gpu_check_tiny_runs_every_section_on_the_xla_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    code = gpu_check.main(["--size", "tiny", "--json", str(path)])
    printed, found = json.loads(capsys.readouterr().out.splitlines()[-1]), json.loads(path.read_text(encoding="utf-8"))
    assert code == 0, printed["failed"]
    assert printed["implementation"] == found["implementation"] == "xla" and found["platform"] == "cpu"
    assert found["failed"] == [] and [section["state"] for section in found["sections"].values()] == ["done"] * 5
    assert [(name, line["case"]) for name, section in found["sections"].items() for line in section["cases"]] == \
        plan_cases("tiny")
    lines = {line["case"]: line for section in found["sections"].values() for line in section["cases"]}
    assert all(line["ok"] and line.get("out_error", 0.0) < 8e-3 for line in found["sections"]["correctness"]["cases"])
    assert lines["4 rows, pages of 16"]["of_copy_64"] > 0 and lines["2 x 8 of 64"]["of_product"] > 0
    assert lines["8 rows on 64, 8 at a time"]["speedup"] > 0
    on, off = lines["react, cache on"], lines["react, cache off"]
    assert on["computed_prompt_tokens"] < off["computed_prompt_tokens"] == 624 and off["same_outputs"] == "6 of 6"
    assert lines["model"]["implementation"] == "xla"


def test_gpu_check_without_time_skips_every_section_by_name(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert gpu_check.main(["--size", "tiny", "--json", str(path), "--budget", "0"]) == 0
    sections = json.loads(path.read_text(encoding="utf-8"))["sections"]
    assert list(sections) == list(gpu_check.SECTIONS)
    assert {section["state"] for section in sections.values()} == {"skipped"}
    assert all("total of 0 s" in line["not_run"] for section in sections.values() for line in section["cases"])


def test_combos_eight_in_a_row_have_all_sizes_and_types() -> None:
    found = combos(16)
    for start in range(9):
        window = found[start:start + 8]
        assert {combo.group for combo in window} == set(range(1, 9))
        assert {combo.head_dim for combo in window} == {64, 96, 128, 256}
        assert {combo.page_size for combo in window} == {8, 16, 64, 128}
        assert {combo.dtype for combo in window} == {"bfloat16", "float16"}
        assert any(combo.window for combo in window) and any(combo.cap for combo in window)
    assert len({(combo.head_dim, combo.page_size) for combo in found}) == 16


# -- what it catches


@pytest.mark.parametrize("change", ["none", "value", "sum", "nan", "empty row"])
def test_compare_wrong_results_are_not_ok(change: str) -> None:
    rng = np.random.default_rng(0)
    right, right_lse = rng.standard_normal((3, 2, 8)), rng.standard_normal((3, 2))
    right[2], right_lse[2] = 0, -np.inf
    out, lse = right.astype(np.float32), right_lse.astype(np.float32)
    if change == "value":
        out[1, 1, 3] += 0.01
    elif change == "sum":
        lse[1, 1] += 0.002
    elif change == "nan":
        out[2] = np.nan
    elif change == "empty row":
        lse[2] = 0
    found = compare([jnp.asarray(out), jnp.asarray(lse)], (right, right_lse), "bfloat16", is_decode=True)
    assert found["ok"] is (change == "none")
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("kernel", ["decode", pytest.param("extend", marks=pytest.mark.slow)])
def test_correctness_kernel_that_sees_one_key_too_many_fails(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, right = kernels("tiny")
    combo = combos(8)[7]
    assert combo.window
    found = dict(right, **{kernel: lambda *a, sliding_window, **b: right[kernel](
        *a, sliding_window=sliding_window + 1, **b)})
    assert prepare_kernel("tiny", kernel, combo)()["ok"]
    monkeypatch.setattr(gpu_correctness, "kernels", lambda size: (name, found))
    assert not prepare_kernel("tiny", kernel, combo)()["ok"]


# -- how it goes on


def sections_of(monkeypatch: pytest.MonkeyPatch, cases: dict[str, Callable[[], Any]], **rules: Any) -> None:
    rules = dict(budget_s=60.0, stall_s=30.0) | rules
    monkeypatch.setattr(gpu_check, "SECTIONS", dict(only=Section(lambda size: cases, **rules)))


def test_serve_after_a_fault_goes_on_with_the_next_case(monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    def fault() -> Fields:
        raise ValueError("no such layout")

    sections_of(monkeypatch, dict(skipped=fault, wrong=fault, right=lambda: dict(ok=True)))
    assert serve("default", 1) == 0
    _, wrong, right = map(json.loads, capsys.readouterr().out.splitlines())
    assert wrong == dict(ok=False, error="ValueError: no such layout") and right == dict(ok=True)


def test_serve_prepared_cases_are_called_again(monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    sections_of(monkeypatch, {str(i): lambda i=i: lambda: dict(number=i) for i in range(3)}, num_threads=2,
                is_timed=True)
    assert serve("default", 0) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]] == [dict(number=i) for i in range(3)]


def test_serve_on_a_broken_device_ends_after_the_fault(monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    def fault() -> Fields:
        raise RuntimeError("illegal address")

    sections_of(monkeypatch, dict(wrong=fault, right=lambda: dict(ok=True)))
    monkeypatch.setattr(gpu_check, "is_device_usable", lambda: False)
    assert serve("default", 0) == 3
    assert len(capsys.readouterr().out.splitlines()) == 2


class FakeWorker:
    """A worker whose lines come from a script; "hang" gives none, and None is its end.

    Args:
      script: what `next` does in turn, by the number of the first case.
      started: takes these numbers.
    """

    def __init__(self, script: dict[int, list[Any]], started: list[int], first: int) -> None:
        self._lines = iter(script[first])
        started.append(first)

    def next(self, timeout_s: float) -> Fields | None:
        line = next(self._lines)
        if line == "hang":
            raise queue.Empty
        return line

    def stop(self) -> int:
        return -9


def watched(monkeypatch: pytest.MonkeyPatch, script: dict[int, list[Any]], **rules: Any
            ) -> tuple[list[int], list[Fields], Fields]:
    """Numbers of the cases that workers began with, what became of three cases, and the device."""
    sections_of(monkeypatch, dict.fromkeys("abc", lambda: {}), **rules)
    started: list[int] = []
    monkeypatch.setattr(gpu_check, "Worker", lambda size, first: FakeWorker(script, started, first))
    found: list[Fields] = []
    device = watch("default", 60.0, lambda section, case, fields, seconds: found.append(dict(case=case, **fields)))
    return started, found, device


def test_watch_process_that_dies_is_recorded_and_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    started, found, device = watched(monkeypatch, {0: [dict(device="X"), dict(ok=True), None], 2: [dict(ok=True)]})
    assert started == [0, 2] and device == dict(device="X")
    assert found == [dict(case="a", ok=True), dict(case="b", ok=False, error="the process ended with code -9"),
                     dict(case="c", ok=True)]


def test_watch_case_that_hangs_is_stopped_and_the_next_one_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = ["hang"] * 1_000_000
    started, found, _ = watched(monkeypatch, {0: [dict(ok=True), *hang], 2: [dict(ok=True)]}, stall_s=0.1)
    assert started == [0, 2]
    assert [line["ok"] for line in found] == [True, False, True] and "no result in 0.1 s" in found[1]["error"]


def test_watch_section_over_its_budget_leaves_out_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    started, found, _ = watched(monkeypatch, {0: [dict(ok=True), *["hang"] * 1_000_000]}, budget_s=0.1)
    assert started == [0]
    assert found == [dict(case="a", ok=True), *(dict(case=case, not_run="only's 0.1 s had passed") for case in "bc")]


# -- tune


def test_tune_on_cpu_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--pairs", "64x16"])
    assert "expected a GPU or TPU; --interpret" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tune.main(["--interpret"])
    assert "give --out FILE" in capsys.readouterr().err


def test_tune_pair_of_another_form_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--interpret", "--pairs", "64"])
    assert "'64': expected head_dim x page size" in capsys.readouterr().err


def test_tune_interpreted_writes_what_the_kernels_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tune, "MAX_SCORE", float("inf"))     # whichever is fastest: the times of an interpreter
    path = tmp_path / "pallas_tpu.cpu.json"
    assert tune.main(["--interpret", "--pairs", "64x16", "--kernels", "decode", "--out", str(path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    best, candidates = result["tuned"][0]["blocks"], result["tuned"][0]["candidates"]
    assert result["benchmark"] == "tune" and {line["kv_tokens"] for line in candidates} == {16, 32}
    assert all(line["is_right"] for line in candidates)
    monkeypatch.setattr(blocks, "TUNED", tmp_path)
    blocks._entries.cache_clear()
    assert blocks.tuned_blocks("pallas_tpu", "decode", "cpu", head_dim=64, page_size=16) == DecodeBlocks(**best)
    blocks._entries.cache_clear()


class FakeLoop:
    """Args:
      took: seconds of a call.
      out: its result.
    """

    def __init__(self, took: float, out: float) -> None:
        self.took, self.out = took, out

    def measure(self, *arrays: Any) -> tuple[float, Any]:
        return self.took, jnp.full(2, self.out)


def fake_tuner(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Any], float], wrong: Any = None) -> tune.Tuner:
    tuner = tune.Tuner("mosaic_gpu", is_interpreted=False)
    monkeypatch.setattr(tuner, "_arguments", lambda *a: ((), lambda: ()))
    monkeypatch.setattr(tuner, "_loops", lambda kernel, head_dim, cases, chosen: [
        FakeLoop(1.0 if chosen is None else seconds(chosen), 1.0 if chosen == wrong is not None else 0.0)
        for _ in cases])
    return tuner


def test_tune_takes_the_fastest_right_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(chosen: ExtendBlocks) -> float:
        return 0.5 + abs(chosen.q_tokens - 128) / 1e3 + abs(chosen.kv_tokens - 128) / 1e3 - chosen.num_stages / 1e3

    best, records = fake_tuner(monkeypatch, seconds).tune("extend", 128, 16)
    assert best == ExtendBlocks(128, 128, 4) and len(records) == 7
    wrong = fake_tuner(monkeypatch, seconds, wrong=ExtendBlocks(128, 128, 4))
    assert wrong.tune("extend", 128, 16)[0] == ExtendBlocks(128, 128, 3)


def test_tune_gain_within_noise_leaves_the_file_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake_tuner(monkeypatch, lambda chosen: 0.98).tune("decode", 128, 16)[0] is None


def test_tune_entry_replaces_only_its_own(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    content = tune.with_entry(path, "decode", 128, 16, DecodeBlocks(64, 2, 4))
    path.write_text(json.dumps(content), encoding="utf-8")
    content = tune.with_entry(path, "decode", 64, 16, DecodeBlocks(128, 3, 1))
    path.write_text(json.dumps(content), encoding="utf-8")
    content = tune.with_entry(path, "decode", 128, 16, DecodeBlocks(64, 3, 1))
    assert [(row["head_dim"], row["blocks"]["num_stages"]) for row in content["decode"]] == [(64, 3), (128, 3)]
