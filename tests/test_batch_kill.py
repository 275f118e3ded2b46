"""The batch command on a real engine: killed at random moments and resumed, it ends like one that never stopped."""
from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from toy_models import make_checkpoint
from toy_tokenizers import make_chat_tokenizer

NUM_LINES = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_chat_tokenizer()
    make_checkpoint(folder, vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    tokenizer.save(folder)
    return folder


def write_lines(path: Path) -> None:
    """Mixed lines: greedy and seeded, chat and completions, log-probabilities, shared prefixes, a few bad ones."""
    rng = random.Random(0)
    lines = []
    for i in range(NUM_LINES):
        body: dict = dict(max_tokens=rng.randint(4, 40), temperature=rng.choice([0, 0, 0.8]), seed=i)
        if rng.random() < 0.2:
            body.update(top_p=0.9, presence_penalty=0.5)
        shared = "abcdefgh " * rng.randint(1, 6)
        if i % 3 == 0:
            entry = {"custom_id": f"chat-{i}", "method": "POST", "url": "/v1/chat/completions",
                     "body": {**body, "logprobs": True, "messages": [{"role": "user", "content": f"{shared}{i}"}]}}
        elif i % 3 == 1:
            entry = {"custom_id": f"text-{i}", "method": "POST", "url": "/v1/completions",
                     "body": {**body, "prompt": f"{shared}{i}", "logprobs": 1}}
        else:
            entry = {"prompt": f"{shared}{i}", **body}
        if i in (17, 101):
            entry = {"custom_id": f"bad-{i}", "method": "POST", "url": "/v1/completions",
                     "body": {"prompt": "x", "tools": []}}
        lines.append(json.dumps(entry))
    path.write_text("\n".join(lines) + "\n")


def command(model: Path, source: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "jradix", "run", str(source), "-o", str(out), "--model", str(model), "--dtype",
            "float32", "--max-num-seqs", "4", "--prefill-chunk-tokens", "32", "--kv-cache-bytes", "1MiB",
            "--no-progress"]


def environment() -> dict[str, str]:
    root = Path(__file__).parent.parent
    return {**os.environ, "PYTHONPATH": str(root)}


def comparable(record: dict) -> dict:
    """A result without what may differ between runs: times, cached tokens; log-probabilities apart."""
    record = json.loads(json.dumps(record))
    body = (record.get("response") or {}).get("body") or {}
    body.pop("created", None)
    body.get("usage", {}).pop("prompt_tokens_details", None)
    for choice in body.get("choices", []):
        choice.pop("logprobs", None)
    return record


def logprobs_of(record: dict) -> list[float]:
    found = []
    for choice in ((record.get("response") or {}).get("body") or {}).get("choices", []):
        logprobs = choice.get("logprobs") or {}
        found += logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or []]
    return found


def test_job_killed_three_times_ends_like_one_never_killed(model: Path, tmp_path: Path) -> None:
    """K01 on the real engine: every line once, in input order, with the same tokens."""
    source, whole, killed = tmp_path / "in.jsonl", tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    write_lines(source)
    done = subprocess.run(command(model, source, whole), env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr    # two lines are error records
    rng = random.Random(1)
    kept = 0
    for _ in range(3):
        job = subprocess.Popen(command(model, source, killed), env=environment(), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
        target = kept + rng.randint(5, 40)
        deadline = time.monotonic() + 120
        while job.poll() is None and time.monotonic() < deadline:
            if killed.exists() and killed.read_bytes().count(b"\n") >= target:
                break
            time.sleep(0.005)
        assert job.poll() is None, "the job ended before it could be killed"
        job.send_signal(signal.SIGKILL)
        job.wait()
        kept = killed.read_bytes().count(b"\n")
        assert kept < NUM_LINES
    resumed = subprocess.run(command(model, source, killed), env=environment(), capture_output=True, text=True,
                             timeout=300)
    assert resumed.returncode == 1, resumed.stderr
    expected = [json.loads(line) for line in whole.read_text().splitlines()]
    found = [json.loads(line) for line in killed.read_text().splitlines()]
    assert [comparable(r) for r in found] == [comparable(r) for r in expected]
    assert len({r["id"] for r in found}) == len(found) == NUM_LINES
    for ours, theirs in zip(found, expected):
        np.testing.assert_allclose(logprobs_of(ours), logprobs_of(theirs), atol=1e-4)
    again = subprocess.run(command(model, source, killed), env=environment(), capture_output=True, text=True,
                           timeout=300)
    assert again.returncode == 1 and "200 resumed" in again.stderr, again.stderr
