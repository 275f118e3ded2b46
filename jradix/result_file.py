"""The result file of a batch job: appending, resuming, and putting the lines in order. It never reads a request.

Result lines are ASCII: {"id", "custom_id", "response", "error"}. The id is `batch_req_<line>_<digest>`, the digest
taken over the line's bytes, the model and the job's defaults: it tells a result of this job from any other. Results are
appended as they finish, each by one write, and ordered by input line when the job is complete. A line that failed has a
result too, its error record, and is not tried again; so has the later of two lines with one custom_id.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jradix.errors import BatchFileError
from jradix.request_file import RequestFile

SYNC_S = 5.0             # seconds of results a power cut may cost; a killed process costs none
_RESULT_HEAD = b'{"id": "batch_req_'
_RESULT_ID = re.compile(re.escape(_RESULT_HEAD) + rb'([1-9][0-9]{0,17})_([0-9a-f]{16})", ')


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
