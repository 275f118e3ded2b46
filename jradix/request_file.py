"""The input file of a batch job: where its lines are and which of them can run. Nothing is run here."""
from __future__ import annotations

import array
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jradix.batch_line import BatchRequest, LineError, parse_request_line, shown
from jradix.errors import BatchFileError

MALFORMED_LISTED = 20
_BLANK, _GOOD, _MALFORMED = range(3)


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
    return f"custom_id={shown(custom_id)} is already used by line {first}: each line needs its own"
