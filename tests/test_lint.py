"""`jradix lint`: what a batch file shares, which variable parts keep it from sharing more, exit codes, bounds."""
from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.workloads import Request, minimum_computed_tokens
from jradix import lint
from jradix.batch_line import parse_request_line
from jradix.cli import main
from jradix.errors import BatchFileError, CheckpointError, TokenizerError
from jradix.lint import LintReport, lint_file
from jradix.variable_parts import SHARED_TOKENS, Sharing, _Place, _Prompts, find_variable_parts, kind_of
from tests import smollm
from tests.toy_tokenizers import make_chat_tokenizer

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randrange(2, 8))) for _ in range(count))


RULES = words(1, 100)


def lint_prompts(folder: Path, prompts: Sequence[object], **options: object) -> LintReport:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return lint_file(path, **options)


# -- figures


def test_reuse_of_token_prompts_is_that_of_an_exact_trie(tmp_path):
    rng = random.Random(0)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(1, 20))] for _ in range(60)]
    computed = minimum_computed_tokens([(Request(p, 1), [0]) for p in sorted(prompts)])
    report = lint_prompts(tmp_path, prompts)
    assert (report.computed_tokens, report.prompt_tokens) == (computed, sum(map(len, prompts)))
    assert report.reuse == pytest.approx(1 - computed / report.prompt_tokens)


def test_whole_page_reuse_rounds_each_hit_down(tmp_path):
    head = list(range(10))
    report = lint_prompts(tmp_path, [[*head, 50], [*head, 60], [*head, 70], head], page_size=4)
    assert report.prompt_tokens == 43 and report.longest_prompt_pages == 3
    assert report.computed_tokens == 10 + 1 + 1 + 1         # the prompt that is known from end to end costs a token
    assert report.whole_page_reuse == pytest.approx(3 * 8 / 43)
    with pytest.raises(ValueError, match="page_size=0"):
        lint_file(tmp_path / "in.jsonl", page_size=0)


def test_prompts_share_within_their_namespace_only(tmp_path):
    lines = [{"cache_namespace": space, "prompt": [1] * 10 + [n]} for n, space in enumerate(["a", "a", "b", "b", "b"])]
    lines += [{"cache": False, "prompt": [1] * 10}, {"prompt_logprobs": 0, "prompt": [1] * 10}]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = lint_file(path)
    assert (report.prompts, report.uncached, report.prompt_tokens) == (7, 2, 75)
    assert report.computed_tokens == (11 + 1) + (11 + 1 + 1) + 10 + 10
    assert [(p.num_prompts, p.line) for p in report.shared_prefixes] == [(3, 3), (2, 1)]


def test_shared_prefixes_name_prompts_tokens_and_first_line(tmp_path):
    head = [1] * 20
    tails = [[2, 2, 2, 3], [2, 2, 2, 4], [5], [6]]
    report = lint_prompts(tmp_path, [[9], *(head + tail for tail in tails)])
    assert [(p.num_prompts, p.num_tokens, p.num_saved_tokens, p.line) for p in report.shared_prefixes] == [
        (4, 20, 60, 2), (2, 23, 3, 2)]


def test_approximation_loses_no_character_and_keeps_messages_apart(tmp_path):
    text = "Straße_1 über  12,5 €\n\n\t日本語 -- a'b  "
    tokens = lint._ApproximateTokens()
    raw = json.dumps({"prompt": text}).encode()
    assert tokens.text(tokens.encode(parse_request_line(raw, 1))) == text
    chats = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
             [{"role": "system", "content": "ab"}]]
    ids = [tokens.encode(parse_request_line(json.dumps({"messages": chat}).encode(), 1)) for chat in chats]
    assert len({tuple(i) for i in ids}) == 3


def test_model_gives_its_tokens_and_chat_template(tmp_path, monkeypatch):
    tokenizer = make_chat_tokenizer()
    monkeypatch.setattr(lint, "load_tokenizer", lambda model: tokenizer)
    messages = [{"role": "user", "content": "hello"}]
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "abc"}) + "\n"
                    + json.dumps({"prompt": [1, 999]}) + "\n")
    report = lint_file(path, model="toy")
    assert report.prompt_tokens == len(tokenizer.apply_chat_template(messages)) + 3 and not report.is_approximate
    assert report.first_malformed == [(3, "token id 999 is outside the vocabulary of 260")]


@pytest.mark.parametrize("model, error", [("./missing", CheckpointError), ("missing.gguf", CheckpointError),
                                          (" ", CheckpointError), ("{folder}", TokenizerError)])
def test_model_without_a_tokenizer_raises(tmp_path, model, error):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(error):
        lint_prompts(tmp_path, ["a"], model=model.format(folder=tmp_path))


def test_folder_with_only_tokenizer_files_will_do(tmp_path):
    make_chat_tokenizer().save(tmp_path / "model")
    assert lint_prompts(tmp_path, ["abcd"], model=str(tmp_path / "model")).prompt_tokens == 4


# -- variable parts


@pytest.mark.parametrize("kind, variants", [
    ("date", [f"2024-05-{day:02}" for day in range(1, 11)]),
    ("date", [f"{day} March 2024" for day in range(3, 13)]),
    ("time", [f"{hour}:{50 - hour} PM" for hour in range(1, 11)]),
    ("timestamp", [f"2024-05-{day:02}T0{day % 10}:20:30Z" for day in range(5, 15)]),
    ("timestamp", [str(1_700_000_000 + 7919 * n) for n in range(10)]),
    ("uuid", [str(uuid.UUID(int=random.Random(n).getrandbits(128))) for n in range(10)]),
    ("id", [f"req-{n:04x}-b" for n in range(180, 2000, 190)]),
    ("number", [f"#{n}" for n in range(95, 105)]),
    ("text", ["Ann", "Bob Smith", "Carla", "the dog", "Eve", "Fay", "Gus Q.", "Ann Lee", "Ivo", "Jo"])])
def test_part_in_front_of_shared_text_is_found_with_its_kind(tmp_path, kind, variants):
    prompts = [f"This is for {variant} only. {RULES}\n{words(100 + n, 12)}" for n, variant in enumerate(variants)]
    report = lint_prompts(tmp_path, prompts)
    part, = report.variable_parts
    assert (part.kind, part.num_prompts, part.lines) == (kind, 10, (1, 2))
    # what two texts have in common at their end may count as shared
    assert all(text and text in variant for text, variant in zip(part.texts, variants))
    if kind != "text":
        assert part.texts == tuple(variants[:2])
    assert RULES.split()[0] in part.followed_by
    assert report.reuse < 0.1 and report.reuse_after_moving > 0.6
    assert part.num_lost_tokens == report.computed_tokens - report.computed_tokens_after_moving
    # no order of the same prompts could share more than the fixed text
    assert part.num_lost_tokens <= 9 * len(lint._PIECE.findall(f" only. {RULES}\n"))


def test_two_parts_far_from_each_other_are_both_found(tmp_path):
    middle = words(2, 60)
    prompts = [f"Date: 2024-05-{n + 1:02}\n{middle}\nRequest {n * 37 + 5}: {RULES} {words(100 + n, 8)}"
               for n in range(12)]
    report = lint_prompts(tmp_path, prompts)
    assert sorted(part.kind for part in report.variable_parts) == ["date", "number"]
    assert report.reuse_after_moving > 0.8 > 0.1 > report.reuse
    lost = sum(part.num_lost_tokens for part in report.variable_parts)
    assert lost == report.computed_tokens - report.computed_tokens_after_moving


def test_many_texts_behind_random_dates_are_all_found(tmp_path):
    """Neighbours in sorted order rarely share their text here."""
    rng = random.Random(3)
    texts = [words(1000 + n, 60) for n in range(40)]
    dates = [f"{rng.randrange(1, 29)} May 2024, {rng.randrange(10, 24)}:{rng.randrange(10, 60)}" for _ in range(200)]
    report = lint_prompts(tmp_path, [f"{date}\n{texts[n % 40]} {words(n, 5)}" for n, date in enumerate(dates)])
    moved = lint_prompts(tmp_path, [f"{texts[n % 40]}\n{date} {words(n, 5)}" for n, date in enumerate(dates)])
    assert report.reuse < 0.2 and moved.reuse > 0.6
    assert report.reuse_after_moving == pytest.approx(moved.reuse, abs=0.01)


def test_id_of_a_conversation_keeps_its_turns_together_when_moved(tmp_path):
    prompts = []
    for agent in range(5):
        text = f"Session {agent * 1111 + 1000}. {RULES}"
        for turn in range(4):
            text += "\n" + words(50 * agent + turn, 40)
            prompts.append(text)
    report = lint_prompts(tmp_path, prompts)
    part, = report.variable_parts
    saved = 4 * len(lint._PIECE.findall(RULES))
    assert part.kind == "number" and part.num_prompts == 20
    assert saved <= report.computed_tokens - report.computed_tokens_after_moving <= saved + 8


@pytest.mark.parametrize("prompts", [
    [f"{RULES} 2024-05-{day:02}\n{words(day, 30)}" for day in range(1, 11)],            # already behind
    [f"2024-05-{day:02}\n{words(day, 60)}" for day in range(1, 11)],                    # nothing shared behind it
    [f"2024-05-{day:02}\n{words(7, SHARED_TOKENS // 4)}" for day in range(1, 11)],      # too little shared
    [RULES] * 5, ["a"], []])
def test_nothing_to_move_finds_nothing(tmp_path, prompts):
    report = lint_prompts(tmp_path, prompts)
    assert report.variable_parts == [] and report.reuse_after_moving == report.reuse


def test_moving_keeps_the_tokens_of_each_prompt():
    rng = np.random.default_rng(0)
    shared = rng.integers(100, 200, 80)
    prompts = [np.concatenate([[1], [day], shared, rng.integers(0, 50, 9)]).astype(np.int32) for day in range(2, 9)]
    place = _Place(1, 0, 7, ends=dict.fromkeys(range(7), 2))
    rebuilt = _Prompts(prompts, {}).without([place]).rebuilt()
    for old, new in zip(prompts, rebuilt):
        assert new.dtype == np.int32
        np.testing.assert_array_equal(new, np.concatenate([old[:1], old[2:82], old[1:2], old[82:]]))


class Digits:
    """Tokens that are written as their numbers."""

    def token_text(self, token_id: int) -> str:
        return str(token_id)

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(map(str, token_ids))


@pytest.mark.parametrize("seed", range(5))
def test_moving_never_makes_random_prompts_share_less(seed):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 9, n).astype(np.int32) for n in (3, 5, 40, 60, 70)]
    prompts = [np.concatenate([texts[i] for i in rng.integers(0, 5, 6)]) for _ in range(30)]
    _, after = find_variable_parts(prompts, Digits())
    assert after.num_computed <= Sharing.of(prompts).num_computed
    assert after.num_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("left, right, kind", [
    ("2024-05-01", "2024-05-02", "date"), ("Mon, 4 Mar 2024", "Tue, 5 Mar 2024", "date"), ("Monday", "Friday", "date"),
    ("May 5th, 2024", "Jun 6th, 2024", "date"), ("31.12.2024", "1.1.2025", "date"),
    ("10:20", "11:20:30", "time"), ("2024-05-01 10:20", "2024-05-01 11:20 UTC", "timestamp"),
    ("2024-05-01. Number 7", "2024-05-02. Number 8", "date and number"), ("", "2024-05-02", "date"),
    ("a2024", "b17", "id"), ("Money 5", "Money 6", "number"), ("Mary", "Sunny", "text"), ("", "for Mary", "text"),
    ("on Monday we met", "on Friday they left", "text and date"), ("5 at 1715", "1 at 1716", "number"),
    ("1, at 10:20", "10, at 11:20", "number and time"), ("Mia, Monday", "Lee, Monday", "text")])
def test_kind_is_named_only_when_it_explains_the_difference(left, right, kind):
    assert kind_of(left, right) == kind == kind_of(right, left)


def test_characters_of_several_tokens_are_shown_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(lint, "load_tokenizer", lambda model: make_chat_tokenizer())
    report = lint_prompts(tmp_path, [f"会話 {n}月 — {RULES}" for n in range(3, 9)], model="toy")
    part, = report.variable_parts
    assert (part.kind, part.texts) == ("number", ("3", "4")) and part.followed_by.startswith("月 —")


# -- the example files


def test_example_of_agents_shares_most_and_needs_no_change():
    report = lint_file(EXAMPLES / "agents.jsonl")
    assert report.prompts == 44 and report.reuse > 0.85 and report.variable_parts == []
    assert report.shared_prefixes[0].num_prompts == 28 and report.shared_prefixes[1].num_prompts == 16


def test_example_with_timestamps_shares_nothing_until_they_are_moved():
    report = lint_file(EXAMPLES / "prompts_with_timestamps.jsonl")
    assert report.prompts >= 12 and report.reuse < 0.05 and report.reuse_after_moving > 0.8
    assert [part.kind for part in report.variable_parts] == ["timestamp", "uuid"]


@pytest.mark.skipif(not smollm.is_installed(), reason="the demo model's package is not installed")
def test_example_with_timestamps_in_tokens_of_the_demo_model():
    report = lint_file(EXAMPLES / "prompts_with_timestamps.jsonl", model="demo")
    assert report.reuse < 0.05 and report.reuse_after_moving > 0.8
    assert [part.texts[0] for part in report.variable_parts] == ["2024-03-06 08:01:17",
                                                                 "e3e70682-c209-4cac-a29f-6fbed82c07cd"]


def test_example_with_timestamps_is_what_its_script_writes(tmp_path):
    path = tmp_path / "out.jsonl"
    subprocess.run([sys.executable, "-B", str(EXAMPLES / "make_timestamps.py"), str(path)], check=True, timeout=60)
    assert path.read_bytes() == (EXAMPLES / "prompts_with_timestamps.jsonl").read_bytes()


# -- the command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text(f'{{"prompt": "{RULES} a"}}\n?\n\n{{"prompt": "{RULES} b"}}\n{{"prompt": ""}}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_lint_lists_malformed_lines_and_returns_0(folder, capsys):
    assert main(["lint", "in.jsonl"]) == 0
    out, err = capsys.readouterr()
    assert "2 prompts, 2 malformed and 1 blank lines" in out and "line 2: not JSON" in out and err == ""
    assert "approximate (no --model given" in out and "line 5: the prompt is empty" in out


def test_lint_json_is_one_object_with_the_same_figures(folder, capsys):
    assert main(["lint", "in.jsonl", "--json", "--page-size", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    report = lint_file("in.jsonl", page_size=8)
    assert found["reuse"] == report.reuse and found["page_size"] == 8 and found["is_approximate"] is True
    assert found["first_malformed"][0][0] == 2 and found["shared_prefixes"][0]["num_prompts"] == 2


@pytest.mark.parametrize("fraction, code", [("0.2", 0), ("0.49", 0), ("0.6", 1), ("1", 1)])
def test_lint_fail_under_decides_the_exit_code(folder, capsys, fraction, code):
    assert main(["lint", "in.jsonl", "--fail-under", fraction]) == code
    assert ("below --fail-under" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize("arguments, message", [(["none.jsonl"], "No such file"),
                                                (["in.jsonl", "--model", "./none"], "no such file or folder")])
def test_lint_that_cannot_run_returns_2(folder, capsys, arguments, message):
    assert main(["lint", *arguments, "--fail-under", "0.1"]) == 2
    assert message in capsys.readouterr().err


def test_lint_of_a_folder_raises_a_batch_file_error(tmp_path):
    with pytest.raises(BatchFileError, match="not a regular file"):
        lint_file(tmp_path)


def test_lint_of_a_file_without_prompts_reports_zero_and_fails_any_limit(folder, capsys):
    (folder / "in.jsonl").write_text("")
    assert main(["lint", "in.jsonl"]) == 0 and "0 prompts" in capsys.readouterr().out
    assert main(["lint", "in.jsonl", "--fail-under", "0.01"]) == 1


def test_lint_stops_reading_at_the_bound_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(lint, "MAX_PROMPT_TOKENS", 10)
    report = lint_prompts(tmp_path, [[1] * 6, [2] * 6, [3] * 6, [4]])
    assert (report.prompts, report.left_out) == (2, 2) and "2 lines at the end were left out" in str(report)


def test_lint_loads_no_jax(folder):
    script = "import sys\nfrom jradix.cli import main\nmain(['lint', 'in.jsonl'])\nprint('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
