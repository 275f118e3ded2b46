"""A peer as seen by the parent: a process group that answers jobs, and is stopped while others have their turn.

Stopped (SIGSTOP) and not only idle: engines keep threads that spin between batches. A group of its own within the
session: an interrupt reaches the parent alone, which ends its peers; when the parent dies without that, the kernel
wakes the stopped ones, and all read the end of their stdin. Linux, standard library only.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.protocol import Answer, Job, write_line
from peers.usage import Usage, forget_peak, tree_usage

TAIL_LINES = 15
GRACE_S = 60.0      # for engines that stop processes and give shared memory back


class PeerFailed(RuntimeError):
    """A peer died or answered something else than it was asked for; the message has the end of its log."""


class PeerProcess:
    """Starts a peer and waits until it is ready.

    Nothing but its end has a time limit: a peer on a busy or halted machine is slow, not dead. One that dies is noticed
    at once.

    Args:
      name: for messages.
      command: program and arguments; speaks the protocol on stdin and stdout.
      environment: all its environment variables.
      log: file for what it prints.

    Attributes:
      versions, notes: what the peer said when it was ready.
      startup_s: seconds from its start until then.

    Raises:
      PeerFailed: it did not get ready.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.name = name
        self._log = log
        self._is_idle = False
        started = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                                             env=dict(environment), process_group=0)
        try:
            ready = self._read()["ready"]
        except BaseException:
            self.kill()
            raise
        self.startup_s = time.monotonic() - started
        self.versions: dict[str, str] = ready["versions"]
        self.notes: list[str] = ready["notes"]

    def generate(self, job: Job) -> Answer:
        """Has a job answered.

        Raises:
          PeerFailed: it died, or an output has another length than asked for.
        """
        self._write({"generate": job._asdict()})
        answer = Answer(**self._read())
        lengths = [len(output) for output in answer.outputs]
        fits = (len(lengths) == len(job.prompts) and
                all(n <= most if job.schema else n == most for n, most in zip(lengths, job.num_outputs)))
        if not fits:
            raise PeerFailed(f"{self.name}: {len(job.prompts)} prompts ask for {_short(job.num_outputs)} tokens"
                             f"{' at most' if job.schema else ''}, the outputs have {_short(lengths)}; its log is "
                             f"{self._log}")
        return answer

    def start(self, *, is_warmup: bool = False) -> None:
        """Begins a run: all cached text is forgotten."""
        self._write({"start": dict(is_warmup=is_warmup)})
        self._read()

    def usage(self) -> Usage:
        """CPU time and peak memory so far, its own processes included."""
        return tree_usage(self._process.pid)

    def forget_peak(self) -> None:
        """Makes peak memory count from now on."""
        forget_peak(self._process.pid)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Lets the peer run inside the block only."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        """Stops all its processes until its next turn."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends the peer, with its own clean-up where it is idle."""
        if self._process.returncode is None and self._is_idle:
            self._signal(signal.SIGCONT)
            self._close_stdin()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Ends all processes of the group at once; does nothing the second time."""
        if self._process.stdout.closed:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._close_stdin()

    def _close_stdin(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _write(self, message: dict[str, Any]) -> None:
        self._is_idle = False
        try:
            write_line(self._process.stdin, message)
        except BrokenPipeError:
            raise self._failure() from None

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._failure()
        self._is_idle = True
        return json.loads(line)

    def _failure(self) -> PeerFailed:
        code = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return PeerFailed(f"{self.name} ended with code {code}; the end of {self._log}:\n" + "\n".join(lines))


def _short(numbers: Sequence[int]) -> str:
    distinct = sorted(set(numbers))
    return ", ".join(map(str, distinct[:4])) + (", ..." if len(distinct) > 4 else "")
