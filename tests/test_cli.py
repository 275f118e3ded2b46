"""The command line: options, exit codes, messages, and what is not imported."""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jradix.cli import main, parse_size
from jradix.errors import CheckpointError
from tests.fake_llm import FakeLLM

ROOT = Path(__file__).resolve().parent.parent


class CliLLM(FakeLLM):
    """Records the arguments the command hands over."""
    arguments: dict = {}

    def __init__(self, model: str, **options: object) -> None:
        if model == "missing":
            raise CheckpointError("missing: no such model")
        super().__init__()
        CliLLM.arguments = {"model": model, **options}
        if model == "interrupted":
            self.before_result = self.interrupt

    def interrupt(self, num_yielded: int) -> None:
        if num_yielded == 1:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def fake_llm_module(monkeypatch):
    module = types.ModuleType("jradix.llm")
    module.LLM = CliLLM
    monkeypatch.setitem(sys.modules, "jradix.llm", module)
    module = types.ModuleType("jradix.loading")
    module.convert = lambda model, out, dtype="auto": CliLLM.arguments.update(convert=(model, out, dtype))
    monkeypatch.setitem(sys.modules, "jradix.loading", module)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_good_lines_returns_0_and_prints_the_summary(folder, capsys):
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "--model", "m"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "2 items: 2 answered, 0 errors" in err and "results: out.jsonl" in err
    assert CliLLM.arguments == {"model": "m", "seed": 0}
    assert len((folder / "out.jsonl").read_text().splitlines()) == 2


def test_run_with_error_records_returns_1(folder, capsys):
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n?\n')
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "--model", "m"]) == 1
    assert "error: line 2: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, message", [
    (["none.jsonl", "-o", "out.jsonl", "--model", "m"], "none.jsonl: No such file"),
    (["in.jsonl", "-o", "in.jsonl", "--model", "m"], "same file"),
    (["in.jsonl", "-o", "none/out.jsonl", "--model", "m"], "create it first"),
    (["in.jsonl", "-o", "out.jsonl", "--model", "missing"], "no such model"),
    (["in.jsonl", "-o", "out.jsonl", "--model", "m", "--report", "out.jsonl"], "same file")])
def test_job_that_cannot_run_returns_2_with_one_message(folder, capsys, arguments, message):
    assert main(["run", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jradix: error: ") and message in err and "Traceback" not in err
    assert not (folder / "out.jsonl").exists()


def test_strict_with_a_malformed_line_returns_2(folder, capsys):
    """K03: strict mode refuses before compute."""
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n?\n')
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "--model", "m", "--strict"]) == 2
    assert "line 2: not JSON" in capsys.readouterr().err


def test_interrupt_returns_130_and_says_how_to_resume(folder, capsys):
    """K01: what is finished stays, and the message says that the same command resumes."""
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "--model", "interrupted"]) == 130
    assert "kept in out.jsonl; the same command resumes" in capsys.readouterr().err
    assert len((folder / "out.jsonl").read_text().splitlines()) == 1
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "--model", "m"]) == 0
    assert "1 resumed" in capsys.readouterr().err


def test_options_reach_the_llm(folder):
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "--model", "m", "--dtype", "float32", "--kv-cache-bytes",
                 "1.5GiB", "--page-size", "8", "--max-model-len", "512", "--max-num-seqs", "4",
                 "--prefill-chunk-tokens", "64", "--no-prefix-caching", "--seed", "7", "--device", "cpu",
                 "--tokenizer", "t", "--revision", "r", "--memory-fraction", "0.5", "--decode-steps", "2",
                 "--deterministic", "--no-progress"]) == 0
    assert CliLLM.arguments == dict(
        model="m", dtype="float32", kv_cache_bytes=3 << 29, page_size=8, max_model_len=512, max_num_seqs=4,
        prefill_chunk_tokens=64, enable_prefix_caching=False, seed=7, device="cpu", tokenizer="t", revision="r",
        memory_fraction=0.5, decode_steps=2, deterministic=True, progress=False)


def test_defaults_and_seed_are_part_of_the_jobs_identity(folder, capsys):
    command = ["run", "in.jsonl", "-o", "out.jsonl", "--model", "m"]
    assert main([*command, "--max-tokens", "3", "--temperature", "0"]) == 0
    tokens = [json.loads(line)["response"]["body"]["usage"]["completion_tokens"] for line in open("out.jsonl")]
    assert tokens == [3, 3]
    assert main([*command, "--max-tokens", "4", "--temperature", "0"]) == 2
    assert main([*command, "--max-tokens", "3", "--temperature", "0", "--seed", "1"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--max-tokens", "3", "--temperature", "0", "--page-size", "8"]) == 0
    assert main([*command, "--max-tokens", "4", "--overwrite"]) == 0


@pytest.mark.parametrize("options, expected", [([], 256), (["--max-num-seqs", "3"], 12), (["--max-inflight", "5"], 5)])
def test_max_inflight_follows_max_num_seqs(folder, monkeypatch, options, expected):
    seen = []
    generate_iter = FakeLLM.generate_iter
    monkeypatch.setattr(CliLLM, "generate_iter", lambda self, requests, *, max_inflight=None, order_window=1: (
        seen.append(max_inflight), generate_iter(self, requests, max_inflight=max_inflight))[1])
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "--model", "m", *options]) == 0
    assert seen == [expected]


def test_print_answers_and_report(folder, capsys):
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "--model", "m", "--print-answers", "--report", "r.json"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["line-1", "line-2"]
    assert json.loads((folder / "r.json").read_text())["answered"] == 2


def test_reader_of_the_answers_that_leaves_costs_no_traceback(folder):
    script = ("import sys, types\nfrom tests.fake_llm import FakeLLM\n"
              "module = types.ModuleType('jradix.llm')\n"
              "module.LLM = lambda model, **options: FakeLLM()\nsys.modules['jradix.llm'] = module\n"
              "from jradix.cli import main\n"
              "sys.exit(main(['run', 'in.jsonl', '-o', 'out.jsonl', '--model', 'm', '--print-answers']))")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=writer,
                          stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert len((folder / "out.jsonl").read_text().splitlines()) == 2


def test_convert_hands_over_its_arguments():
    assert main(["convert", "m", "out"]) == 0 and CliLLM.arguments["convert"] == ("m", "out", "auto")
    assert main(["convert", "m", "out", "--dtype", "bfloat16"]) == 0 and CliLLM.arguments["convert"][2] == "bfloat16"


@pytest.mark.parametrize("text, size", [("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5gib", 3 << 29), ("10 MB", 10**7),
                                        ("4k", 4000), ("123", 123), ("7B", 7)])
def test_parse_size_reads_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2XB", "0", "1e3", "nan", "0.1"])
def test_parse_size_refuses_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="2GiB"):
        parse_size(text)


@pytest.mark.parametrize("options", [["--page-size", "0"], ["--kv-cache-bytes", "x"], ["--temperature", "-1"],
                                     ["--max-tokens", "-1"], ["--memory-fraction", "2"], ["--max-inflight", "x"]])
def test_bad_option_exits_with_2_before_anything_else(folder, capsys, options):
    with pytest.raises(SystemExit) as caught:
        main(["run", "in.jsonl", "-o", "out.jsonl", "--model", "m", *options])
    assert caught.value.code == 2 and options[0] in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    script = ("import sys\nfrom jradix.cli import main\ntry:\n    main(['run', '--help'])\nexcept SystemExit: pass\n"
              "print(sorted({'jax', 'numpy', 'flax', 'rich', 'torch'} & set(sys.modules)), file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=60)
    assert "requests.jsonl" in done.stdout and done.stderr.strip() == "[]"


def test_example_file_is_what_its_script_writes_and_every_line_is_good(tmp_path):
    script = ROOT / "examples" / "make_agents.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "agents.jsonl")], check=True, timeout=60)
    path, written = str(tmp_path / "agents.jsonl"), (tmp_path / "agents.jsonl").read_bytes()
    assert written == (ROOT / "examples" / "agents.jsonl").read_bytes() and written.count(b"\n") >= 40
    assert main(["run", path, "-o", str(tmp_path / "out.jsonl"), "--model", "m", "--strict"]) == 0


def test_example_turns_of_an_agent_extend_one_another():
    conversations: dict[str, list] = {}
    for line in (ROOT / "examples" / "agents.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "messages" in entry.get("body", {}):
            conversations.setdefault(entry["custom_id"].rsplit("-", 1)[0], []).append(entry["body"]["messages"])
    assert len(conversations) == 4 and len({turns[0][0]["content"] for turns in conversations.values()}) == 1
    for turns in conversations.values():
        assert len(turns) >= 6
        assert all(later[:len(earlier)] == earlier for earlier, later in zip(turns, turns[1:]))
