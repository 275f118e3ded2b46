"""The batch job on a fake LLM: every line gets one result, a killed job resumes, memory stays bounded."""
from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jradix import result_file, batch_job
from jradix.batch_job import answer_body, run_batch
from jradix.errors import BatchFileError, EngineError
from jradix.outputs import CompletionOutput, Logprob, RequestOutput
from jradix.sampling_params import SamplingParams
from tests.fake_llm import FakeLLM

ROOT = Path(__file__).resolve().parent.parent


def chat(custom_id: str, text: str, **body: object) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": text}], **body}}


def write_requests(folder: Path, entries: list) -> Path:
    path = folder / "in.jsonl"
    lines = [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in entries]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def run(folder: Path, llm: FakeLLM | None = None, **options: object) -> batch_job.BatchSummary:
    llm = llm or FakeLLM()
    return run_batch(folder / "in.jsonl", folder / "out.jsonl", lambda: llm, show_progress=False, **options)


def records(folder: Path) -> list[dict]:
    return [json.loads(raw) for raw in (folder / "out.jsonl").read_bytes().splitlines()]


def without_time(folder: Path) -> list[dict]:
    found = records(folder)
    for record in found:
        if record["response"]:
            del record["response"]["body"]["created"]
    return found


# -- answers

def test_run_writes_openai_results_in_input_order(tmp_path):
    write_requests(tmp_path, [chat("a", "hi", max_tokens=3), {"prompt": "x", "max_tokens": 2, "n": 2}])
    llm = FakeLLM()
    summary = run(tmp_path, llm)
    first, second = records(tmp_path)
    assert (first["custom_id"], second["custom_id"]) == ("a", "line-2") and first["error"] is second["error"] is None
    assert first["id"].startswith("batch_req_1_") and first["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "fake-model") and body["id"].startswith("chatcmpl-")
    choice, = body["choices"]
    text = choice["message"]["content"]
    assert choice["message"]["role"] == "assistant" and len(text) == 3
    assert choice["token_ids"] == list(text.encode()) and choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert body["usage"] == {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11,
                             "prompt_tokens_details": {"cached_tokens": 0}}
    body = second["response"]["body"]
    assert body["object"] == "text_completion" and [c["index"] for c in body["choices"]] == [0, 1]
    assert all(len(c["text"]) == 2 and "message" not in c for c in body["choices"])
    assert (summary.items, summary.answered, summary.errors, summary.computed) == (2, 2, 0, 2)
    assert summary.finish_reasons == {"length": 3}          # cut answers are reported as cut
    assert (summary.computed_prompt_tokens, summary.generated_tokens) == (9, 7) and llm.is_closed


def test_run_passes_unset_fields_as_none(tmp_path):
    """P09: the batch asks for exactly what `LLM.generate` would with the same fields, and a seed."""
    write_requests(tmp_path, [chat("a", "x"), chat("b", "y", temperature=1.0, seed=5)])
    llm = FakeLLM()
    run(tmp_path, llm)
    asked = [params for _, params in llm.asked]
    assert asked == [SamplingParams(seed=asked[0].seed), SamplingParams(temperature=1.0, seed=5)]


def test_lines_without_seed_get_one_of_their_own_that_does_not_change(tmp_path):
    write_requests(tmp_path, [{"prompt": "x"}, {"prompt": "x"}])
    seeds = []
    for _ in range(2):
        llm = FakeLLM()
        run(tmp_path, llm, overwrite=True)
        seeds.append([params.seed for _, params in llm.asked])
    assert seeds[0] == seeds[1] and None not in seeds[0] and seeds[0][0] != seeds[0][1]


def test_equal_bodies_with_different_ids_give_a_line_each(tmp_path):
    """K05: three equal bodies, three results; a repeated id is an error record that names the first line."""
    write_requests(tmp_path, [chat("a", "x", seed=1), chat("b", "x", seed=1), chat("c", "x", seed=1), chat("a", "y")])
    summary = run(tmp_path)
    found = records(tmp_path)
    assert [record["custom_id"] for record in found] == ["a", "b", "c", "a"]
    assert len({record["response"]["body"]["choices"][0]["message"]["content"] for record in found[:3]}) == 1
    assert found[3]["response"] is None and found[3]["error"]["code"] == "duplicate_custom_id"
    assert "line 1" in found[3]["error"]["message"] and found[3]["error"]["line"] == 4
    assert (summary.answered, summary.errors) == (3, 1) and summary.cached_prompt_tokens > 0


MALFORMED = [b"\xef\xbb\xbf" + json.dumps(chat("good-1", "x")).encode(), b"not json", b"[1]",
             {**chat("", "x"), "custom_id": None}, {**chat("d", "x"), "url": "/v1/x"}, chat("e", "x", stream=True), b"",
             json.dumps(chat("good-2", "y")).encode() + b"\r", chat("g", "x", tools=[1]), b'{"prompt": "\xff"}',
             {"prompt": ""}, {"messages": [{"role": "user", "content": 3}]}]


def test_malformed_lines_become_error_records_with_line_and_reason(tmp_path):
    """K03: good lines are answered, each bad one has a record with its line number, and the counts add up."""
    write_requests(tmp_path, MALFORMED)
    summary = run(tmp_path)
    found = records(tmp_path)
    good = [record["custom_id"] for record in found if record["error"] is None]
    errors = {record["error"]["line"]: record["error"]["code"] for record in found if record["error"]}
    assert good == ["good-1", "good-2"]
    assert errors == {2: "invalid_json", 3: "invalid_line", 4: "missing_custom_id", 5: "unknown_url",
                      6: "unsupported_field", 9: "invalid_request", 10: "invalid_json",
                      11: "request_failed", 12: "invalid_request"}
    assert all(record["response"] is None and record["error"]["message"] for record in found if record["error"])
    assert (summary.lines, summary.blank, summary.answered, summary.errors) == (12, 1, 2, 9)
    assert summary.lines == summary.blank + summary.items and summary.items == summary.answered + summary.errors
    assert len(summary.first_errors) == batch_job.ERRORS_SHOWN


def test_strict_refuses_before_the_model_is_loaded(tmp_path):
    """K03: the message lists the bad lines; nothing is computed or written."""
    write_requests(tmp_path, MALFORMED + [b"?"] * 30)

    def no_model() -> FakeLLM:
        raise AssertionError("the model was loaded")

    with pytest.raises(BatchFileError, match="37 of 41 lines are malformed") as caught:
        run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", no_model, strict=True)
    message = str(caught.value)
    assert "line 2: not JSON" in message and message.count("\n  line ") == 20 and "and 17 more" in message
    assert not (tmp_path / "out.jsonl").exists()


def test_summary_counts_other_models_and_control_tokens(tmp_path):
    write_requests(tmp_path, [chat("a", "x", model="gpt-x"), chat("b", "<|im_end|>", model="fake-model"),
                              chat("c", "z")])
    summary = run(tmp_path)
    assert (summary.other_model_lines, summary.control_token_lines) == (1, 1)
    assert "another model" in str(summary) and "control token" in str(summary)


def test_report_holds_the_summary(tmp_path):
    write_requests(tmp_path, [chat("a", "x"), b"?"])
    summary = run(tmp_path, report_path=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["answered"] == 1 and report["errors"] == 1 and report["model"] == "fake-model"
    assert report["requests_per_s"] == summary.requests_per_s


def test_progress_bar_is_drawn_on_a_terminal_only(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    write_requests(tmp_path, [chat("a", "x"), b"?"])
    drawn = {}
    for kind, wanted in ((Terminal, True), (Terminal, False), (io.StringIO, True)):
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", FakeLLM, overwrite=True, show_progress=wanted)
        drawn[kind.__name__, wanted] = stream.getvalue()
    assert "2/2" in drawn.pop(("Terminal", True)) and set(drawn.values()) == {""}


def test_answers_are_printed_in_input_order(tmp_path):
    write_requests(tmp_path, [chat("a", "x", max_tokens=3), b"?", {"prompt": "y", "n": 2, "max_tokens": 3}])
    out = io.StringIO()
    run(tmp_path, answers_to=out)
    labels = [line.split(":")[0] for line in out.getvalue().splitlines()]
    assert labels == ["a", "line 2", "line-3[0]", "line-3[1]"] and "error: not JSON" in out.getvalue()


# -- log-probabilities

def output_with_logprobs() -> RequestOutput:
    position = {65: Logprob(-2.0, 3, "é"), 1: Logprob(-0.5, 1, "\ufffd"), 2: Logprob(float("-inf"), None, None)}
    return RequestOutput("r", "p", [1, 2], [None, {2: Logprob(-1.0, 1, "b")}], True,
                         [CompletionOutput(0, "éé", [65, 65], "stop", 65, [position, position])])


def test_chat_logprobs_have_openais_shape():
    body = answer_body(output_with_logprobs(), "m", is_chat=True, num_logprobs=3, name="x")
    entry = body["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("é", -2.0, [0xc3, 0xa9])
    assert [(top["token"], top["logprob"], top["bytes"]) for top in entry["top_logprobs"]] == [
        ("\ufffd", -0.5, None), ("é", -2.0, [0xc3, 0xa9]), ("token_id:2", -9999.0, None)]
    assert body["choices"][0]["stop_reason"] == 65
    assert body["prompt_logprobs"] == [None, {"2": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}]


def test_completion_logprobs_have_openais_shape():
    body = answer_body(output_with_logprobs(), "m", is_chat=False, num_logprobs=1, name="x")
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["é", "é"], "token_logprobs": [-2.0, -2.0], "top_logprobs": [{"\ufffd": -0.5}] * 2,
        "text_offset": [0, 1]}


def test_logprobs_of_chosen_tokens_only_have_no_tops():
    def logprobs(is_chat: bool, num_logprobs: int | None) -> dict | None:
        body = answer_body(output_with_logprobs(), "m", is_chat=is_chat, num_logprobs=num_logprobs, name="x")
        return body["choices"][0]["logprobs"]

    assert logprobs(False, 0)["top_logprobs"] is None
    assert logprobs(True, 0)["content"][0]["top_logprobs"] == []
    assert logprobs(True, None) is None


def test_logprobs_reach_the_file_as_json(tmp_path):
    write_requests(tmp_path, [chat("a", "x", logprobs=True, top_logprobs=2), {"prompt": "xy", "prompt_logprobs": 0}])
    run(tmp_path)
    raw = (tmp_path / "out.jsonl").read_text()
    assert "Infinity" not in raw and "NaN" not in raw and raw.isascii()
    assert records(tmp_path)[1]["response"]["body"]["prompt_logprobs"][1]["121"]["logprob"] == -9999.0


# -- kill and resume

KILLED_JOB = """
import os, signal, sys
from jradix import result_file
from jradix.batch_job import run_batch
from tests.fake_llm import FakeLLM

folder, after, torn = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "torn"

def kill(num_yielded):
    if num_yielded == after:
        if torn:
            write = os.write
            def tear(fd, data):
                write(fd, data[:len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            result_file.os.write = tear
        else:
            os.kill(os.getpid(), signal.SIGKILL)

run_batch(folder + "/in.jsonl", folder + "/out.jsonl", lambda: FakeLLM(before_result=kill, shuffle_seed=3),
          max_inflight=6)
"""


@pytest.mark.parametrize("how", ["clean", "torn"])
def test_killed_job_resumes_without_computing_a_result_twice(tmp_path, how):
    """K01: SIGKILL after 7 of 20 results, also in the middle of a write; the second run computes 13, the third none."""
    write_requests(tmp_path, [chat(f"r{i}", f"text {i}") for i in range(20)])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", KILLED_JOB, str(tmp_path), "7", how], env=environment, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    content = (tmp_path / "out.jsonl").read_bytes()
    assert content.count(b"\n") == 7 and content.endswith(b"\n") == (how == "clean")
    kept = [json.loads(line)["custom_id"] for line in content.splitlines()[:7]]

    llm = FakeLLM()
    summary = run(tmp_path, llm)
    assert (summary.resumed, summary.computed, len(llm.asked)) == (7, 13, 13)
    asked = {bytes(prompt).decode().removeprefix("<user>") for prompt, _ in llm.asked}
    assert asked == {f"text {i}" for i in range(20) if f"r{i}" not in kept}
    assert [record["custom_id"] for record in records(tmp_path)] == [f"r{i}" for i in range(20)]

    before = (tmp_path / "out.jsonl").stat()
    again = run(tmp_path, llm := FakeLLM())
    after = (tmp_path / "out.jsonl").stat()
    assert (again.resumed, again.computed, llm.asked, llm.num_yielded) == (20, 0, [], 0)
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


def test_job_killed_at_any_write_ends_like_one_never_killed(tmp_path):
    """K01: whatever part of the output survived, in whatever order, the finished file is the same."""
    write_requests(tmp_path, MALFORMED + [chat(f"r{i}", f"text {i}", max_tokens=i) for i in range(8)])
    run(tmp_path)
    expected = without_time(tmp_path)
    whole = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    rng = random.Random(1)
    for _ in range(30):
        survivors = b"".join(rng.sample(whole, rng.randrange(len(whole) + 1)))
        torn = rng.choice([line for line in whole if line not in survivors.splitlines(keepends=True)] or [b""])
        (tmp_path / "out.jsonl").write_bytes(survivors + torn[:rng.randrange(len(torn) + 1) - 1])
        llm = FakeLLM(shuffle_seed=rng.randrange(100))
        summary = run(tmp_path, llm, max_inflight=rng.randrange(1, 9))
        assert summary.resumed + summary.computed == 19 and summary.resumed >= survivors.count(b"\n")
        assert without_time(tmp_path) == expected


def test_appended_input_lines_are_computed_on_the_next_run(tmp_path):
    entries = [chat(f"r{i}", f"text {i}") for i in range(4)]
    write_requests(tmp_path, entries[:2])
    run(tmp_path)
    write_requests(tmp_path, entries)
    assert run(tmp_path).computed == 2 and len(records(tmp_path)) == 4


@pytest.mark.parametrize("change", [dict(llm=FakeLLM(fingerprint="beef")), dict(defaults={"max_tokens": 3}),
                                    dict(settings={"seed": 1})])
def test_other_model_default_or_setting_is_refused_without_overwrite(tmp_path, change):
    write_requests(tmp_path, [chat("a", "x")])
    run(tmp_path)
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(BatchFileError, match="--overwrite"):
        run(tmp_path, **change)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert run(tmp_path, **change, overwrite=True).computed == 1


def test_interrupt_keeps_results_and_stops_the_engine(tmp_path):
    write_requests(tmp_path, [chat(f"r{i}", f"text {i}") for i in range(10)])

    def interrupt(num_yielded: int) -> None:
        if num_yielded == 4:
            raise KeyboardInterrupt

    llm = FakeLLM(before_result=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, llm, max_inflight=3)
    assert llm.is_closed and len(records(tmp_path)) == 4
    assert run(tmp_path).computed == 6


def test_full_disk_stops_the_job_and_aborts_what_runs(tmp_path, monkeypatch):
    write_requests(tmp_path, [chat(f"r{i}", f"text {i}") for i in range(10)])
    write, calls = os.write, []

    def full(fd: int, data: memoryview) -> int:
        calls.append(fd)
        if len(calls) > 4:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    llm = FakeLLM()
    with monkeypatch.context() as patch:
        patch.setattr(result_file.os, "write", full)
        with pytest.raises(BatchFileError, match="4 results are kept.*resume"):
            run(tmp_path, llm, max_inflight=3)
    assert llm.num_aborted == 2 and llm.is_closed and len(records(tmp_path)) == 4
    assert run(tmp_path).computed == 6


def test_failed_model_load_leaves_no_output(tmp_path):
    write_requests(tmp_path, [chat("a", "x")])

    def broken() -> FakeLLM:
        raise EngineError("no model")

    with pytest.raises(EngineError):
        run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", broken)
    assert not (tmp_path / "out.jsonl").exists()


def test_engine_that_stops_early_is_an_error(tmp_path):
    class Lazy(FakeLLM):
        def generate_iter(self, requests, *, max_inflight=None, order_window=1):
            yield next(super().generate_iter(requests, max_inflight=max_inflight))

    write_requests(tmp_path, [chat("a", "x"), chat("b", "y")])
    with pytest.raises(EngineError, match="1 of 2 results"):
        run(tmp_path, Lazy())


@pytest.mark.parametrize("options", [dict(max_inflight=0), dict(defaults={"max_token": 3}),
                                     dict(defaults={"temperature": -1})])
def test_bad_argument_is_refused_before_anything_is_opened(tmp_path, options):
    with pytest.raises(ValueError):
        run(tmp_path, **options)


@pytest.mark.parametrize("name", ["in.jsonl", "out.jsonl", "none/report.json"])
def test_report_path_that_would_harm_is_refused(tmp_path, name):
    write_requests(tmp_path, [chat("a", "x")])
    with pytest.raises(BatchFileError, match="report"):
        run(tmp_path, report_path=tmp_path / name)
    assert not (tmp_path / "out.jsonl").exists()


def test_llm_of_the_caller_can_stay_open(tmp_path):
    write_requests(tmp_path, [chat("a", "x")])
    llm = FakeLLM()
    run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", lambda: contextlib.nullcontext(llm))
    assert not llm.is_closed


# -- memory

def test_requests_are_pulled_as_they_are_needed(tmp_path):
    """K02: never more than max_inflight open, and no line is parsed for the job before it is needed."""
    write_requests(tmp_path, [chat(f"r{i}", f"text {i}") for i in range(50)])
    llm = FakeLLM()
    llm.before_result = lambda num_yielded: seen.append(len(llm.asked) - num_yielded)
    seen: list[int] = []
    run(tmp_path, llm, max_inflight=8)
    assert llm.max_inflight == llm.peak_open == max(seen) == 8


MEMORY_JOB = """
import resource, sys
from jradix.batch_job import run_batch
from tests.fake_llm import FakeLLM

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak_mb()
summary = run_batch(sys.argv[1] + "/in.jsonl", sys.argv[1] + "/out.jsonl", lambda: FakeLLM(lazy=True), max_inflight=64,
                    defaults={"max_tokens": 2}, show_progress=False)
print(summary.answered, peak_mb() - before)
"""


def peak_growth_mb(folder: Path, num_lines: int, line_bytes: int) -> float:
    text = "x" * line_bytes
    with open(folder / "in.jsonl", "w") as file:
        for i in range(num_lines):
            file.write(json.dumps({"custom_id": f"r{i}", "prompt": [i % 9 + 1], "user": text}) + "\n")
    done = subprocess.run([sys.executable, "-c", MEMORY_JOB, str(folder)], env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answered, growth = done.stdout.split()
    assert int(answered) == num_lines
    return float(growth)


def test_memory_of_many_lines_stays_small(tmp_path):
    """K02: 8,000 lines of 10 KB (80 MB) leave less than 12 MB behind."""
    assert peak_growth_mb(tmp_path, 8_000, 10_000) < 12


@pytest.mark.slow
def test_memory_of_200k_lines_of_10_kb_stays_below_200_mb(tmp_path):
    """K02: 2 GB of requests."""
    assert peak_growth_mb(tmp_path, 200_000, 10_000) < 200


def test_open_items_are_forgotten_when_they_are_written(tmp_path):
    """K02: finished requests leave no objects behind."""
    write_requests(tmp_path, [chat(f"r{i}", "x") for i in range(300)])
    counts: list[int] = []

    def count(num_yielded: int) -> None:
        if num_yielded % 100 == 50:
            counts.append(sum(isinstance(o, batch_job._OpenItem) for o in gc.get_objects()))

    run(tmp_path, FakeLLM(before_result=count, lazy=True), max_inflight=4)
    assert len(counts) == 3 and max(counts) <= 4


def test_answer_says_what_became_of_its_grammar() -> None:
    """X10: the line itself tells that its limit cut the text off."""
    whole = CompletionOutput(0, "[1]", [5], "stop", grammar="dfa", valid=True, parsed=[1], num_forced_tokens=1)
    cut = CompletionOutput(1, "[1", [5], "length", grammar="dfa", valid=False, error="cut off by max_tokens=1 ...")
    free = CompletionOutput(2, "so", [6], "stop")
    body = answer_body(RequestOutput("r", outputs=[whole, cut, free]), "m", is_chat=False, num_logprobs=None, name="n")
    first, second, third = body["choices"]
    assert (first["valid"], first["error"], first["num_forced_tokens"]) == (True, None, 1)
    assert second["valid"] is False and "max_tokens" in second["error"] and "grammar" not in third
