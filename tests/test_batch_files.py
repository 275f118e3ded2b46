"""Lines of a batch file: what is accepted, what is refused and why; the lock, torn lines and the order of results."""
from __future__ import annotations

import json
import os

import pytest

from jradix import request_file, result_file
from jradix.batch_line import LineError, parse_request_line
from jradix.errors import BatchFileError
from jradix.request_file import RequestFile
from jradix.result_file import LineIdentity, ResultFile, check_output_path
from jradix.sampling_params import SamplingParams

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def chat_line(custom_id: str | None = "a", **body: object) -> bytes:
    entry = {"method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, **body}}
    return json.dumps(entry if custom_id is None else {"custom_id": custom_id, **entry}).encode()


def completion_line(custom_id: str = "a", **body: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions",
                       "body": {"prompt": "hi", **body}}).encode()


def refused(raw: bytes, line: int = 1) -> LineError:
    with pytest.raises(LineError) as caught:
        parse_request_line(raw, line)
    return caught.value


# -- one line

def test_chat_line_openai_form_gives_messages():
    request = parse_request_line(chat_line("a", model="gpt-x", max_completion_tokens=5, temperature=0, stop="x"), 1)
    assert (request.custom_id, request.messages, request.prompt) == ("a", CHAT["messages"], None)
    assert request.model == "gpt-x"
    assert request.params == SamplingParams(max_tokens=5, temperature=0, stop="x")


def test_completion_line_openai_form_gives_prompt():
    assert parse_request_line(completion_line(prompt=[1, 2]), 1).prompt == [1, 2]


@pytest.mark.parametrize("entry", [{"prompt": "x"}, {"prompt": [3]}, CHAT])
def test_plain_line_without_custom_id_is_named_after_its_line(entry):
    assert parse_request_line(json.dumps(entry).encode(), 7).custom_id == "line-7"


def test_unset_and_null_fields_are_left_to_the_model():
    """P09: a batch line fills in nothing that `LLM.generate` would not."""
    raw = chat_line(top_p=None, stop=None, tools=None, n=None, logprobs=None)
    assert parse_request_line(raw, 1).params == SamplingParams()


def test_defaults_fill_only_what_the_line_leaves_out():
    defaults = {"max_tokens": 9, "temperature": 0.5}
    params = parse_request_line(chat_line(temperature=1), 1, defaults).params
    assert params == SamplingParams(max_tokens=9, temperature=1)
    assert parse_request_line(chat_line(max_completion_tokens=3), 1, defaults).params.max_tokens == 3


def test_every_sampling_field_reaches_the_params():
    fields = dict(max_tokens=4, min_tokens=1, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, n=2, seed=5, stop=["x"],
                  stop_token_ids=[7], presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5,
                  prompt_logprobs=2, ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True)
    params = parse_request_line(completion_line(**fields, logit_bias={"12": -3}, logprobs=2), 1).params
    assert params == SamplingParams(**fields, logit_bias={12: -3.0}, logprobs=2)


@pytest.mark.parametrize("body, expected", [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4),
                                            ({"logprobs": False}, None), ({}, None)])
def test_chat_logprobs_are_counted_by_top_logprobs(body, expected):
    assert parse_request_line(chat_line(**body), 1).params.logprobs == expected


def test_tools_of_a_chat_line_are_read_and_shown_to_the_template():
    """Null counts as not given here too; completions have no tools."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    request = parse_request_line(chat_line(tools=[tool], tool_choice="required", parallel_tool_calls=False), 1)
    assert request.template_kwargs == {"tools": [tool]}
    assert (request.tools.mode, request.tools.is_parallel) == ("required", False)
    assert parse_request_line(chat_line(tool_choice="none"), 1).tools is None
    for body in ({"tools": [tool]}, {"tool_choice": "auto"}):
        assert refused(completion_line(**body)).code == "unsupported_field"


@pytest.mark.parametrize("name", ["user", "metadata", "store"])
def test_fields_that_change_nothing_are_ignored(name):
    assert parse_request_line(chat_line(**{name: "x"}), 1).params == SamplingParams()


@pytest.mark.parametrize("body, named", [
    ({"best_of": 2}, "best_of"), ({"temprature": 0}, "temprature"), ({"stream": True}, "stream"),
    ({"echo": True}, "echo"), ({"prompt": "x"}, "prompt"), ({"stream_options": {}}, "stream_options")])
def test_unsupported_field_is_refused_by_name(body, named):
    error = refused(chat_line(**body))
    assert error.code == "unsupported_field" and named in str(error) and error.custom_id == "a"


def test_stream_and_echo_false_are_fine():
    assert parse_request_line(completion_line(stream=False, echo=False), 1).prompt == "hi"


@pytest.mark.parametrize("raw, named", [
    (chat_line(max_tokens=1, max_completion_tokens=2), "differ"), (chat_line(top_logprobs=2), "logprobs=true"),
    (chat_line(logprobs=3), "logprobs=3"), (completion_line(logprobs=True), "logprobs=True"),
    (chat_line(messages=[]), "messages"), (chat_line(messages=["x"]), "messages"),
    (completion_line(prompt=["a", "b"]), "prompt"), (completion_line(prompt=[]), "prompt"),
    (completion_line(prompt=[True]), "prompt"), (completion_line(prompt=[-1]), "prompt"),
    (chat_line(model=3), "model"), (chat_line(stop=5), "stop"), (chat_line(stop={"a": 1}), "stop"),
    (chat_line(stop=""), "stop"), (chat_line(stop_token_ids=5), "stop_token_ids"),
    (chat_line(logit_bias=[1]), "logit_bias"), (chat_line(n=0), "n=0"),
    (chat_line(temperature=-1), "temperature"), (chat_line(temperature=10**400), "too large"),
    (chat_line(tools=[]), "tools=[]"), (chat_line(tools=[{"type": "function"}]), "tools[0]"),
    (chat_line(tool_choice="auto"), "without tools"), (chat_line(parallel_tool_calls=1), "parallel_tool_calls"),
    (chat_line(logit_bias={"3": 10**400}), "too large"), (chat_line(chat_template_kwargs=3), "chat_template_kwargs")])
def test_bad_value_is_refused_by_name(raw, named):
    error = refused(raw)
    assert error.code == "invalid_request" and named in str(error)


@pytest.mark.parametrize("raw, code", [
    (b"{", "invalid_json"), (b"\xff\xfe{}", "invalid_json"), (b'{"prompt": "\xff"}', "invalid_json"),
    (b'{"prompt": "\\ud800"}', "invalid_json"), (b'{"prompt": "x", "temperature": NaN}', "invalid_json"),
    (b"[" * 200_000, "invalid_json"), (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "invalid_json"),
    (b"[]", "invalid_line"), (b"3", "invalid_line"), (b"{}", "invalid_line"),
    (b'{"prompt": "x", "messages": []}', "invalid_line"), (b'{"custom_id": 3, "prompt": "x"}', "invalid_custom_id"),
    (b'{"custom_id": "", "prompt": "x"}', "invalid_custom_id"), (chat_line(None), "missing_custom_id"),
    (chat_line().replace(b"POST", b"GET"), "invalid_line"),
    (chat_line().replace(b"/v1/chat", b"/v2/chat"), "unknown_url"),
    (b'{"custom_id": "a", "method": "POST"}', "unknown_url"),
    (b'{"custom_id": "a", "method": "POST", "url": ["/v1/completions"], "body": {}}', "unknown_url"),
    (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": "x"}', "invalid_line"),
    (chat_line().replace(b'"method"', b'"priority": 1, "method"'), "unsupported_field")])
def test_malformed_line_is_refused_with_its_code(raw, code):
    assert refused(raw).code == code


def test_surrogate_pair_and_line_separator_are_text():
    assert parse_request_line(b'{"prompt": "\\ud83d\\ude00\xe2\x80\xa8x"}', 1).prompt == "\U0001f600\u2028x"


# -- the input

def scanned(tmp_path, content: bytes) -> RequestFile:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(content)
    requests = RequestFile(path)
    requests.scan()
    return requests


def test_scan_bom_crlf_blank_and_no_last_newline_are_read(tmp_path):
    """K03: byte order mark, CRLF, blank lines and a missing last newline are no errors; blank lines are counted."""
    with scanned(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n{"prompt": "b"}') as requests:
        assert (requests.num_lines, requests.num_blank, requests.num_items, requests.num_malformed) == (4, 2, 2, 0)
        assert list(requests.lines()) == [1, 4]
        assert [requests.request(line, requests.read(line)).prompt for line in (1, 4)] == ["a", "b"]


def test_scan_empty_file_has_no_lines(tmp_path):
    with scanned(tmp_path, b"") as requests:
        assert requests.num_lines == requests.num_items == 0 and list(requests.lines()) == []


def test_scan_repeated_custom_id_is_refused_naming_the_first_line(tmp_path):
    """K05: the later lines are refused, whatever their bodies; a malformed line's id counts too."""
    lines = [chat_line("a"), chat_line("a", n=2), chat_line("b"), chat_line("c", n=0), chat_line("c"),
             b'{"prompt": "x"}', chat_line("line-6"), chat_line("a")]
    with scanned(tmp_path, b"\n".join(lines)) as requests:
        assert [line for line, _ in requests.malformed] == [2, 4, 5, 7, 8] and requests.num_malformed == 5
        for line, first in ((2, 1), (5, 4), (7, 6), (8, 1)):
            with pytest.raises(LineError, match=f"already used by line {first}:") as caught:
                requests.request(line, requests.read(line))
            assert caught.value.code == "duplicate_custom_id"
        assert requests.request(3, requests.read(3)).custom_id == "b"


def test_scan_equal_hashes_of_different_ids_are_no_repetition(tmp_path, monkeypatch):
    """K05: a hash only points at candidates; the ids themselves decide."""
    class OneHash:
        def __init__(self, data: bytes, digest_size: int) -> None:
            self.size = digest_size

        def digest(self) -> bytes:
            return bytes(self.size)

    monkeypatch.setattr(request_file.hashlib, "blake2b", OneHash)
    with scanned(tmp_path, b"\n".join(chat_line(name) for name in "abcb")) as requests:
        assert [line for line, _ in requests.malformed] == [4]


def test_read_after_the_input_shrank_is_an_error(tmp_path):
    with scanned(tmp_path, b'{"prompt": "a"}\n{"prompt": "b"}\n') as requests:
        os.truncate(requests.path, 5)
        with pytest.raises(BatchFileError, match="became shorter"):
            requests.read(2)


@pytest.mark.parametrize("kind, named", [("missing", "No such file"), ("folder", "not a regular file"),
                                         ("pipe", "not a regular file")])
def test_input_that_is_no_file_is_refused(tmp_path, kind, named):
    path = tmp_path / "input"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(BatchFileError, match=named):
        RequestFile(path)


# -- the output

IDENTITY = LineIdentity("f00d", {})


@pytest.fixture
def requests(tmp_path):
    with scanned(tmp_path, b'{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "c"}\n') as requests:
        yield requests


def opened(requests: RequestFile, name: str = "out.jsonl", identity: LineIdentity = IDENTITY,
           overwrite: bool = False) -> ResultFile:
    results = ResultFile(requests.path.with_name(name), requests.path)
    try:
        if not overwrite:
            results.index(requests)
        results.verify(requests, identity)
        results.begin(requests.num_lines, overwrite=overwrite)
    except BatchFileError:
        results.close()
        raise
    return results


def append(results: ResultFile, requests: RequestFile, *lines: int) -> None:
    for line in lines:
        results.append(line, IDENTITY.digest(requests.read(line)), f"line-{line}", response={"body": "é" * line})


def lines_of(results: ResultFile) -> list[str]:
    return [json.loads(raw)["custom_id"] for raw in results.path.read_bytes().splitlines()]


def test_finish_orders_results_by_input_line(requests):
    with opened(requests) as results:
        append(results, requests, 4, 1, 3)
        assert lines_of(results) == ["line-4", "line-1", "line-3"]
        results.path.chmod(0o640)
        results.finish()
        assert lines_of(results) == ["line-1", "line-3", "line-4"]
        assert json.loads(results.read(4))["response"] == {"body": "éééé"}
        assert results.path.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in requests.path.parent.iterdir()) == ["out.jsonl", "requests.jsonl"]


def test_finish_after_a_kill_while_ordering_uses_the_name_again(requests):
    left_over = requests.path.with_name(".out.jsonl.ordering")
    left_over.write_bytes(b"half a copy that is longer than the whole file will be" * 99)
    with opened(requests) as results:
        append(results, requests, 3, 1)
        results.finish()
        assert lines_of(results) == ["line-1", "line-3"] and not left_over.exists()


def test_finish_in_order_leaves_the_file_alone(requests):
    with opened(requests) as results:
        append(results, requests, 1, 3, 4)
        inode = results.path.stat().st_ino
        results.finish()
        assert results.path.stat().st_ino == inode


def test_finish_through_a_link_keeps_the_link(requests):
    link = requests.path.with_name("link.jsonl")
    link.symlink_to("target.jsonl")
    with opened(requests, "link.jsonl") as results:
        append(results, requests, 3, 1)
        results.finish()
    assert link.is_symlink() and len(link.with_name("target.jsonl").read_bytes().splitlines()) == 2


def test_resume_at_every_cut_keeps_exactly_the_complete_lines(requests):
    """K01: wherever a kill tears the file, complete lines stay and the torn one is cut off."""
    with opened(requests) as results:
        append(results, requests, 4, 1, 3)
        whole = results.path.read_bytes()
    for cut in range(len(whole)):
        results.path.write_bytes(whole[:cut])
        with opened(requests) as again:
            num_complete = whole[:cut].count(b"\n")
            assert again.num_done == num_complete
            assert [line for line in (4, 1, 3) if again.has(line)] == [4, 1, 3][:num_complete]
            append(again, requests, *[4, 1, 3][num_complete:])
            assert again.path.read_bytes() == whole


def test_resume_cuts_zeros_a_power_cut_left(requests):
    with opened(requests) as results:
        append(results, requests, 1)
        whole = results.path.read_bytes()
    results.path.write_bytes(whole + bytes(100))
    with opened(requests) as again:
        assert again.num_done == 1 and again.path.read_bytes() == whole


def test_error_records_are_kept_and_counted(requests):
    with opened(requests) as results:
        results.append(1, IDENTITY.digest(requests.read(1)), None, error={"code": "x", "message": "y", "line": 1})
    with opened(requests) as again:
        assert (again.num_done, again.num_failed) == (1, 1)


@pytest.mark.parametrize("content, why", [
    (b"my notes", "line 1 is no result"), (b"my notes\n", "line 1 is no result"),
    (b'{"id": "x"}\n', "line 1 is no result"),
    (b'{"id": "batch_req_2_0123456789abcdef", "error": null}\n', "line 1 is no result"),     # the blank line
    (b'{"id": "batch_req_9_0123456789abcdef", "error": null}\n', "line 1 is no result"),
    (b'{"id": "batch_req_1_0123456789abcdef", "error": nul\n', "line 1 is damaged"),
    (b'{"id": "batch_req_1_0123456789abcdef", "error": null}\n' * 2, "second result for input line 1"),
    (b'{"id": "batch_req_1_0123456789abcdef", "error": null}\n', "another line, model or default")])
def test_foreign_output_is_refused_and_untouched(requests, content, why):
    path = requests.path.with_name("out.jsonl")
    path.write_bytes(content)
    with pytest.raises(BatchFileError, match=f"{why}.*--overwrite"):
        opened(requests)
    assert path.read_bytes() == content


@pytest.mark.parametrize("identity", [LineIdentity("beef", {}), LineIdentity("f00d", {"seed": 1})])
def test_results_of_another_model_or_setting_are_refused(requests, identity):
    with opened(requests) as results:
        append(results, requests, 1)
    with pytest.raises(BatchFileError, match="another job"):
        opened(requests, identity=identity)


def test_overwrite_drops_what_is_there(requests):
    requests.path.with_name("out.jsonl").write_bytes(b"my notes")
    with opened(requests, overwrite=True) as results:
        append(results, requests, 1)
        assert lines_of(results) == ["line-1"]


def test_second_run_is_refused_while_the_first_holds_the_file(requests):
    """The lock survives the rename at the end of the first run."""
    with opened(requests) as results:
        append(results, requests, 3, 1)
        for _ in range(2):
            with pytest.raises(BatchFileError, match="out.jsonl is being written by another run"):
                opened(requests)
            results.finish()
    opened(requests).close()


def test_open_file_renamed_while_waiting_for_the_lock_is_opened_again(requests, monkeypatch):
    path = requests.path.with_name("out.jsonl")
    path.write_bytes(b"")
    flock, swaps = result_file.fcntl.flock, [path.with_name("new.jsonl")]

    def swap_then_lock(fd: int, operation: int) -> None:
        if swaps:
            swaps[0].write_bytes(b"")
            swaps.pop().rename(path)
        flock(fd, operation)

    monkeypatch.setattr(result_file.fcntl, "flock", swap_then_lock)
    with opened(requests) as results:
        append(results, requests, 1)
        assert path.read_bytes() != b""


@pytest.mark.parametrize("written", [0, 10])
def test_append_without_space_keeps_earlier_results(requests, monkeypatch, written):
    with opened(requests) as results:
        append(results, requests, 1)
        before, write, calls = results.path.read_bytes(), os.write, []

        def full(fd: int, data: memoryview) -> int:
            calls.append(fd)
            if len(calls) == 1 and written:
                return write(fd, data[:written])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(result_file.os, "write", full)
        with pytest.raises(BatchFileError, match="No space left.* 1 results are kept.*run the same command again"):
            append(results, requests, 3)
        assert results.path.read_bytes() == before and not results.has(3)


def test_finish_without_space_keeps_all_results(requests, monkeypatch):
    with opened(requests) as results:
        append(results, requests, 3, 1)
        before = results.path.read_bytes()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(result_file.os, "replace", full)
        with pytest.raises(BatchFileError, match="all 2 results are kept"):
            results.finish()
        assert results.path.read_bytes() == before
        assert not list(results.path.parent.glob(".*"))


def test_close_removes_only_an_empty_file_it_created(requests):
    opened(requests).close()
    path = requests.path.with_name("out.jsonl")
    assert not path.exists()
    path.touch()
    opened(requests).close()
    assert path.exists()


def test_output_that_is_the_input_is_refused(requests):
    folder = requests.path.parent
    (folder / "soft").symlink_to(requests.path)
    os.link(requests.path, folder / "hard")
    for name in ("requests.jsonl", "soft", "hard", "./x/../requests.jsonl"):
        with pytest.raises(BatchFileError, match="same file"):
            ResultFile(folder / name, requests.path)


@pytest.mark.parametrize("path, named", [("none/out", "create it first"), (".", "is a folder"),
                                         ("/dev/null", "regular file")])
def test_output_path_that_cannot_be_written_is_refused(tmp_path, path, named):
    with pytest.raises(BatchFileError, match=named):
        check_output_path(tmp_path / path, "output")


@pytest.mark.parametrize("form, schema", [
    ({"type": "text"}, None), ({"type": "json_object"}, {"type": "object"}),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}, {"type": "integer"})])
def test_response_format_becomes_a_schema(form: dict, schema: dict | None) -> None:
    line = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
    assert parse_request_line(json.dumps(line).encode(), 1).params.json_schema == schema


@pytest.mark.parametrize("form", [{"type": "xml"}, {"type": "json_schema"}, 3,
                                  {"type": "json_schema", "json_schema": {}}])
def test_response_format_of_another_kind_is_refused(form: object) -> None:
    line = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
    assert "response_format=" in str(refused(json.dumps(line).encode()))
