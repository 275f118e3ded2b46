"""Batch files: the request lines of a job, its result lines, and which of them are done. Nothing is run here.

Request lines, one JSON object each, in UTF-8:
  OpenAI's batch form   {"custom_id", "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body": {}}
  the plain form        {"prompt": text or token ids, ...} or {"messages": [...], ...}; custom_id optional (`line-<n>`)
Fields of the body (of the line itself in the plain form):
  model                 any text; the answer names the model that really ran
  as in SamplingParams  max_tokens (or max_completion_tokens) min_tokens temperature top_p top_k min_p n seed stop
                        stop_token_ids presence_penalty frequency_penalty repetition_penalty logit_bias prompt_logprobs
                        ignore_eos skip_special_tokens include_stop_str_in_output
  logprobs              chat: true or false, with top_logprobs; completions: how many
  chat_template_kwargs  chat only
  stream, echo          only false
  user, metadata, store ignored: they do not change the answer
Null counts as not given. Every other field makes the line an error record that names it.

Result lines are ASCII: {"id", "custom_id", "response", "error"}. The id is `batch_req_<line>_<digest>`, the digest
taken over the line's bytes, the model and the job's defaults: it tells a result of this job from any other. Results are
appended as they finish, each by one write, and ordered by input line when the job is complete. A line that failed has a
result too, its error record, and is not tried again; so has the later of two lines with one custom_id.
"""
from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jradix.errors import BatchFileError, RequestError
from jradix.sampling_params import SamplingParams

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
SYNC_S = 5.0             # seconds of results a power cut may cost; a killed process costs none
MALFORMED_LISTED = 20

_SAMPLING_FIELDS = frozenset((
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "prompt_logprobs", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output"))
_IGNORED_FIELDS = frozenset(("user", "metadata", "store"))
_BLANK, _GOOD, _MALFORMED = range(3)
_RESULT_HEAD = b'{"id": "batch_req_'
_RESULT_ID = re.compile(re.escape(_RESULT_HEAD) + rb'([1-9][0-9]{0,17})_([0-9a-f]{16})", ')


class LineError(RequestError):
    """One line cannot become a request. `code` is for programs, `custom_id` is None where the line names none."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What one line asks for.

    Attributes:
      custom_id: the user's name of the line, or `line-<n>`.
      prompt: text or token ids; None for chat.
      messages: the conversation; None for completions.
      template_kwargs: variables for the chat template.
      params: fields the line leaves out are left to the model, as in `LLM.generate`.
      model: the model the line asks for, None where it names none.
    """
    custom_id: str
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] | None
    params: SamplingParams
    model: str | None


def parse_request_line(raw: bytes, line: int, defaults: Mapping[str, Any] | None = None) -> BatchRequest:
    """The request of one line.

    Args:
      raw: the line without its line ending.
      line: its number, from 1.
      defaults: sampling parameters for lines that give none.

    Raises:
      LineError: the line is malformed or asks for what is not supported.
    """
    entry = _load_object(raw)
    is_openai = any(name in entry for name in ("url", "method", "body"))
    custom_id = entry.get("custom_id")
    if custom_id is None:
        if is_openai:
            raise LineError("missing_custom_id", "custom_id is missing: give each line its own text")
        custom_id = f"line-{line}"
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("invalid_custom_id", f"custom_id={custom_id!r}: expected a non-empty text")
    try:
        if is_openai:
            body, is_chat = _openai_body(entry)
        else:
            body = {name: value for name, value in entry.items() if name != "custom_id" and value is not None}
            is_chat = "messages" in body
            if is_chat == ("prompt" in body):
                raise LineError("invalid_line", "expected `url` and `body`, or one of `prompt` and `messages`")
        return _parse_body(body, is_chat, custom_id, defaults or {})
    except LineError as error:
        error.custom_id = custom_id
        raise


def _load_object(raw: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if re.search(rb"\\u[dD]", raw):
            json.dumps(entry, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise LineError("invalid_json", "the text holds half of a surrogate pair (\\ud800 to \\udfff)") from None
    except UnicodeDecodeError as error:
        raise LineError("invalid_json", f"not UTF-8: byte {error.start + 1} is 0x{raw[error.start]:02x}") from None
    except RecursionError:
        raise LineError("invalid_json", "the JSON is nested too deeply") from None
    except ValueError as error:
        raise LineError("invalid_json", f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise LineError("invalid_line", f"expected a JSON object, got {_shown(entry)}")
    return entry


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _openai_body(entry: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    for name, value in entry.items():
        if name not in ("custom_id", "method", "url", "body") and value is not None:
            raise LineError("unsupported_field", f"field {name!r} is not one of custom_id, method, url and body")
    if entry.get("method") != "POST":
        raise LineError("invalid_line", f"method={_shown(entry.get('method'))}: expected 'POST'")
    url = entry.get("url")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise LineError("unknown_url", f"url={_shown(url)}: expected '{CHAT_URL}' or '{COMPLETION_URL}'")
    body = entry.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_line", f"body={_shown(body)}: expected a JSON object")
    return {name: value for name, value in body.items() if value is not None}, url == CHAT_URL


def _parse_body(body: dict[str, Any], is_chat: bool, custom_id: str, defaults: Mapping[str, Any]) -> BatchRequest:
    for name, why in (("stream", "a batch writes whole answers"), ("echo", "ask for prompt_logprobs instead")):
        if body.pop(name, False) is not False:
            raise LineError("unsupported_field", f"{name} is not supported: {why}; leave it out or set it to false")
    model = body.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise _bad_value("model", model, "a text")
    content = body.pop("messages" if is_chat else "prompt", None)
    if is_chat:
        if not isinstance(content, list) or not content or not all(isinstance(item, dict) for item in content):
            raise _bad_value("messages", content, "a non-empty list of objects")
    elif not isinstance(content, str) and not _is_token_list(content):
        raise _bad_value("prompt", content, "one text or one list of token ids (one prompt per line)")
    template_kwargs = body.pop("chat_template_kwargs", None) if is_chat else None
    if template_kwargs is not None and not isinstance(template_kwargs, dict):
        raise _bad_value("chat_template_kwargs", template_kwargs, "an object")

    given = dict(defaults)
    if (limit := body.pop("max_completion_tokens", None)) is not None:
        if body.setdefault("max_tokens", limit) != limit:
            raise LineError("invalid_request", f"max_tokens={_shown(body['max_tokens'])} and max_completion_tokens="
                                               f"{_shown(limit)} differ: give one of them")
    logprobs, top_logprobs = body.pop("logprobs", None), body.pop("top_logprobs", None) if is_chat else None
    if logprobs is not None or top_logprobs is not None:
        given["logprobs"] = _num_logprobs(logprobs, top_logprobs) if is_chat else logprobs
    for name, value in body.items():
        if name in _SAMPLING_FIELDS:
            given[name] = value
        elif name not in _IGNORED_FIELDS:
            raise LineError("unsupported_field", f"field {name!r} is not supported in a "
                                                 f"{'chat' if is_chat else 'completion'} line: remove it")
    if not isinstance(given.get("stop", ""), (str, list)):
        raise _bad_value("stop", given["stop"], "a text or a list of texts")
    if not isinstance(given.get("stop_token_ids", []), list):
        raise _bad_value("stop_token_ids", given["stop_token_ids"], "a list of token ids")
    try:
        params = SamplingParams(**given)
    except OverflowError:
        raise LineError("invalid_request", "a sampling parameter is too large for a floating-point number") from None
    except ValueError as error:
        raise LineError("invalid_request", str(error)) from None
    if is_chat:
        return BatchRequest(custom_id, None, content, template_kwargs, params, model)
    return BatchRequest(custom_id, content, None, None, params, model)


def _num_logprobs(logprobs: object, top_logprobs: object) -> Any:
    if logprobs is not None and not isinstance(logprobs, bool):
        raise _bad_value("logprobs", logprobs, "true or false in a chat line, with top_logprobs saying how many")
    if top_logprobs is not None and not logprobs:
        raise LineError("invalid_request", f"top_logprobs={_shown(top_logprobs)} needs logprobs=true")
    return (0 if top_logprobs is None else top_logprobs) if logprobs else None


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def _bad_value(name: str, value: object, expected: str) -> LineError:
    return LineError("invalid_request", f"{name}={_shown(value)}: expected {expected}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class RequestFile:
    """The input file: read once to find the lines, then line by line as they are needed.

    Keeps a few integers per line whatever the lines hold, so a million lines of any length cost about 20 MB.

    Attributes:
      num_lines, num_blank, num_malformed: counts of the first pass; malformed lines include repeated custom_ids.
      malformed: (line, reason) of the first of them.

    Raises:
      BatchFileError: the file cannot be read or is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str], defaults: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.defaults = dict(defaults or {})
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)     # non-blocking: a pipe must not hang here
        except OSError as error:
            raise BatchFileError(f"input {self.path}: {error.strerror}; expected a file of request lines") from error
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise BatchFileError(f"input {self.path} is not a regular file; expected a file of request lines (it is "
                                 "read twice)")
        self.num_lines = self.num_blank = self.num_malformed = 0
        self.malformed: list[tuple[int, str]] = []

    def __enter__(self) -> RequestFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def scan(self) -> None:
        """First pass: counts the lines, checks each, finds repeated custom_ids."""
        offsets, kinds = array.array("q", [0]), bytearray([_BLANK])
        hashes, hashed_lines = array.array("Q"), array.array("q")
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for line, raw in enumerate(file, 1):
                offsets.append(offsets[-1] + len(raw))
                raw = _content(raw, line)
                custom_id = None
                if not raw:
                    kinds.append(_BLANK)
                    continue
                try:
                    custom_id = parse_request_line(raw, line, self.defaults).custom_id
                    kinds.append(_GOOD)
                except LineError as error:
                    custom_id = error.custom_id
                    kinds.append(_MALFORMED)
                    self._note_malformed(line, str(error))
                if custom_id is not None:
                    digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                    hashes.append(int.from_bytes(digest, "little"))
                    hashed_lines.append(line)
        self.num_lines = len(offsets) - 1
        self._offsets = np.frombuffer(offsets, np.int64)
        self._kinds = np.frombuffer(kinds, np.uint8)
        self.num_blank = int(np.count_nonzero(self._kinds[1:] == _BLANK))
        self._first_line = np.zeros(self.num_lines + 1, np.int64)     # of the same custom_id; 0: this one is the first
        self._find_repeated(np.array(hashes, np.uint64), np.array(hashed_lines, np.int64))
        self.malformed.sort()

    @property
    def num_items(self) -> int:
        """Lines that get a result."""
        return self.num_lines - self.num_blank

    def lines(self) -> Iterator[int]:
        """Numbers of the lines that are not blank, in order."""
        return (line for line in range(1, self.num_lines + 1) if self._kinds[line] != _BLANK)

    def is_item(self, line: int) -> bool:
        return 1 <= line <= self.num_lines and self._kinds[line] != _BLANK

    def read(self, line: int) -> bytes:
        """The bytes of a line, without byte order mark and line ending."""
        start, end = int(self._offsets[line - 1]), int(self._offsets[line])
        raw = os.pread(self._fd, end - start, start)
        if len(raw) != end - start:
            raise BatchFileError(f"input {self.path} became shorter while the job ran: restore it and run again")
        return _content(raw, line)

    def request(self, line: int, raw: bytes) -> BatchRequest:
        """The request of a line.

        Raises:
          LineError: the line is malformed, or an earlier one has its custom_id.
        """
        request = parse_request_line(raw, line, self.defaults)
        if first := int(self._first_line[line]):
            raise LineError("duplicate_custom_id", _repeated(request.custom_id, first), request.custom_id)
        return request

    def _find_repeated(self, hashes: np.ndarray, lines: np.ndarray) -> None:
        """Equal hashes only suggest equal ids: those lines are read again and compared, one hash at a time."""
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        edges = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True]))) if len(ordered) else []
        for group in np.flatnonzero(np.diff(edges) > 1):
            first: dict[str, int] = {}
            for line in lines[order[edges[group]:edges[group + 1]]].tolist():
                try:
                    custom_id = parse_request_line(self.read(line), line, self.defaults).custom_id
                except LineError as error:
                    custom_id = error.custom_id
                if first.setdefault(custom_id, line) != line:
                    self._first_line[line] = first[custom_id]
                    if self._kinds[line] == _GOOD:
                        self._note_malformed(line, _repeated(custom_id, first[custom_id]))

    def _note_malformed(self, line: int, reason: str) -> None:
        self.num_malformed += 1
        if len(self.malformed) < MALFORMED_LISTED:
            self.malformed.append((line, reason))


def _content(raw: bytes, line: int) -> bytes:
    if line == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    raw = raw.rstrip(b"\r\n")
    return raw if raw.strip() else b""


def _repeated(custom_id: str, first: int) -> str:
    return f"custom_id={_shown(custom_id)} is already used by line {first}: each line needs its own"


class LineIdentity:
    """Names the results of a job so that no other job's result is taken for one of them.

    Args:
      fingerprint: names the model's weights, tokenizer and dtype.
      settings: everything else that changes an answer and is not in the line itself.
    """

    def __init__(self, fingerprint: str, settings: Mapping[str, Any]) -> None:
        text = json.dumps({"format": 1, "model": fingerprint, "settings": dict(settings)}, sort_keys=True)
        self._key = hashlib.blake2b(text.encode(), digest_size=32).digest()

    def digest(self, raw: bytes) -> int:
        """64 bits over the line and the job."""
        return int.from_bytes(hashlib.blake2b(raw, digest_size=8, key=self._key).digest(), "big")


class ResultFile:
    """The output file, locked while it is open.

    Every complete line is one result; `_starts[line]` is where the result of an input line begins, -1 while there is
    none. Nothing in the file is changed before `begin`.

    Args:
      path: where the results go; created when missing.
      input_path: the input, which the output must not be.

    Raises:
      BatchFileError: the path cannot be written, is the input, or another run holds it.
    """

    def __init__(self, path: str | os.PathLike[str], input_path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))        # the rename at the end must not replace a link by a file
        check_output_path(path, "output", input_path)
        self._is_new = not self.path.exists()
        self._fd = self._open_locked()
        self._size = 0                    # bytes of complete results
        self._synced_at = time.monotonic()
        self.num_done = self.num_failed = 0
        self._allocate(0)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock; a file this run created and wrote nothing to is removed."""
        if self._fd < 0:
            return
        if self._is_new and not os.fstat(self._fd).st_size:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        os.close(self._fd)
        self._fd = -1

    def index(self, requests: RequestFile) -> None:
        """Finds the results the file already holds.

        Raises:
          BatchFileError: it holds something else than results for these lines.
        """
        self._allocate(requests.num_lines)
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n") and _is_torn(raw):
                    break                 # `begin` cuts it off
                match = _RESULT_ID.match(raw)
                line = int(match[1]) if match else 0
                if not requests.is_item(line) or not raw.endswith(b"\n"):
                    raise self._foreign(f"its line {number} is no result for a line of {requests.path}")
                if self._starts[line] >= 0:
                    raise self._foreign(f"its line {number} is a second result for input line {line}")
                try:
                    failed = json.loads(raw)["error"] is not None
                except (ValueError, KeyError, RecursionError):
                    raise self._foreign(f"its line {number} is damaged") from None
                self._digests[line] = int(match[2], 16)
                self._record(line, len(raw), failed)

    def verify(self, requests: RequestFile, identity: LineIdentity) -> None:
        """Checks that the results found belong to this input, this model and these defaults.

        Raises:
          BatchFileError: one does not.
        """
        for line in np.flatnonzero(self._starts >= 0).tolist():
            if int(self._digests[line]) != identity.digest(requests.read(line)):
                raise self._foreign(f"its result for line {line} was made from another line, model or default")

    def begin(self, num_lines: int, *, overwrite: bool) -> None:
        """Cuts off a torn last line, or everything; from here on results may be appended."""
        if overwrite:
            self._size = self.num_done = self.num_failed = 0
            self._allocate(num_lines)
        if os.fstat(self._fd).st_size != self._size:
            with self._keeping_results():
                os.ftruncate(self._fd, self._size)

    def has(self, line: int) -> bool:
        return self._starts[line] >= 0

    def append(self, line: int, digest: int, custom_id: str | None, *, response: dict[str, Any] | None = None,
               error: dict[str, Any] | None = None) -> None:
        """Adds the result of one line; once this returns, killing the process does not lose it.

        Raises:
          BatchFileError: it could not be written; the file holds the results before it.
        """
        assert self._starts[line] < 0, f"line {line} has a result already"
        record = {"id": f"batch_req_{line}_{digest:016x}", "custom_id": custom_id, "response": response, "error": error}
        data = json.dumps(record).encode("ascii") + b"\n"
        with self._keeping_results():
            _write_all(self._fd, data)
            if time.monotonic() - self._synced_at > SYNC_S:
                os.fsync(self._fd)
                self._synced_at = time.monotonic()
        self._record(line, len(data), error is not None)

    def finish(self) -> None:
        """Puts the results into the order of the input; a file already in order stays untouched.

        Raises:
          BatchFileError: the ordered copy could not be written; the results are kept in the order they finished.
        """
        self._is_new = False
        with self._keeping_results():
            os.fsync(self._fd)
        lines = np.flatnonzero(self._starts >= 0)
        if np.all(np.diff(self._starts[lines]) > 0):
            return
        temporary = self.path.with_name(f".{self.path.name}.ordering")
        try:
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)     # the new file is ours before it gets the name
                os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
                with os.fdopen(os.dup(fd), "wb", buffering=1 << 20) as copy:
                    for line in lines.tolist():
                        copy.write(self.read(line))
                os.fsync(fd)
                os.replace(temporary, self.path)
            except BaseException:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            raise BatchFileError(f"output {self.path}: all {self.num_done} results are kept, but ordering them failed: "
                                 f"{error.strerror}. Run the same command again to order them") from error
        os.close(self._fd)
        self._fd = fd
        self._starts[lines] = np.cumsum(self._lengths[lines]) - self._lengths[lines]

    def read(self, line: int) -> bytes:
        """The result of an input line, with its line ending."""
        return os.pread(self._fd, int(self._lengths[line]), int(self._starts[line]))

    def _allocate(self, num_lines: int) -> None:
        self._starts = np.full(num_lines + 1, -1, np.int64)
        self._lengths = np.zeros(num_lines + 1, np.int64)
        self._digests = np.zeros(num_lines + 1, np.uint64)     # of the results found, until they are verified

    def _record(self, line: int, length: int, failed: bool) -> None:
        self._starts[line], self._lengths[line] = self._size, length
        self._size += length
        self.num_done += 1
        self.num_failed += failed

    def _open_locked(self) -> int:
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            except OSError as error:
                raise BatchFileError(f"output {self.path}: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ours, named = os.fstat(fd), os.stat(self.path)
                if (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino):
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise BatchFileError(f"output {self.path} is being written by another run: wait for it, or choose "
                                     "another file") from None
            except FileNotFoundError:
                pass
            except OSError as error:
                os.close(fd)
                raise BatchFileError(f"output {self.path} cannot be locked: {error.strerror}; choose a file on a local "
                                     "disk") from error
            os.close(fd)                  # another run renamed its ordered file over this one meanwhile: look again

    @contextlib.contextmanager
    def _keeping_results(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise BatchFileError(f"output {self.path}: {error.strerror}. {self.num_done} results are kept; once that "
                                 "is put right, run the same command again to resume") from error

    def _foreign(self, why: str) -> BatchFileError:
        return BatchFileError(f"output {self.path} belongs to another job: {why}. Use --overwrite to replace it, or "
                              "choose another file")


def check_output_path(path: str | os.PathLike[str], what: str, *inputs: str | os.PathLike[str]) -> None:
    """Refuses a path that cannot become a regular file, or that is one of `inputs` under any name.

    Raises:
      BatchFileError: says which and why.
    """
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir():
        raise BatchFileError(f"{what} {path}: the folder {real.parent} does not exist; create it first")
    if real.is_dir():
        raise BatchFileError(f"{what} {path} is a folder; expected a file")
    if real.exists() and not real.is_file():
        raise BatchFileError(f"{what} {path} is not a regular file")
    if not os.access(real.parent, os.W_OK):
        raise BatchFileError(f"{what} {path}: the folder {real.parent} cannot be written")
    for other in inputs:
        if real == Path(os.path.realpath(other)) or (real.exists() and os.path.exists(other) and real.samefile(other)):
            raise BatchFileError(f"{what} {path} and {other} are the same file; choose another {what}")


def _is_torn(raw: bytes) -> bool:
    """True for the beginning of a result, left by a kill, and for zeros, left by a power cut."""
    return _RESULT_HEAD.startswith(raw[:len(_RESULT_HEAD)]) or not raw.strip(b"\0")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]
