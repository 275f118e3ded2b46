"""The process that compiles grammars for a `CompilePool`, and its parent's end: `python -m jradix.grammar.worker`.

Frames (eight bytes of length, then a pickle) come in on stdin: first a `Setup`, then one `Task` at a time; each task is
answered on stdout with the grammar or its GrammarError. The process ends as soon as stdin is closed, whatever it does.
It is a plain program, so that the user's script is not run again, and imports neither jax nor transformers.
"""
from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from io import FileIO
from typing import IO, NamedTuple

from jradix.errors import GrammarError
from jradix.grammar.compiler import Grammar, compile_grammar
from jradix.grammar.table_store import TableStore
from jradix.grammar.vocabulary import Vocabulary

LENGTH_BYTES = 8
# Compiling uses neither BLAS nor parallel encoding; their threads would only make the start slower.
WORKER_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
                      "TOKENIZERS_PARALLELISM": "false"}
logger = logging.getLogger("jradix.grammar")


class Setup(NamedTuple):
    """What a worker is told once.

    vocabulary: without its `encode`. tokenizer_json: of the tokenizer that encodes for it, None without one.
    store: where finished grammars are kept.
    """
    vocabulary: Vocabulary
    tokenizer_json: str | None
    store: TableStore | None


class Task(NamedTuple):
    """One grammar to compile: pickled arguments of `compile_grammar`, and its key in the store (None: not kept)."""
    sources: bytes
    store_key: str | None


class WorkerProcess:
    """The parent's end of a worker. One thread at a time asks it; any thread may end it.

    Args:
      setup: a pickled `Setup`.

    Raises:
      OSError: the process cannot be started.
    """

    def __init__(self, setup: bytes) -> None:
        # -P and the parent's own path: the worker finds the same packages, whatever lies in the working folder.
        path = os.pathsep.join(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))
        self._setup: bytes | None = setup
        self.process = subprocess.Popen([sys.executable, "-P", "-m", "jradix.grammar.worker"], bufsize=0,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env={**os.environ, **WORKER_ENVIRONMENT, "PYTHONPATH": path})

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def ask(self, task: bytes) -> bytearray | None:
        """The answer to a task; None where the process has died."""
        try:
            if self._setup is not None:
                write_frame(self.process.stdin, self._setup)
                self._setup = None
            write_frame(self.process.stdin, task)
        except BrokenPipeError:
            return None
        return read_frame(self.process.stdout)

    def end(self, *, patience_s: float = 0.0, close_pipes: bool = True) -> str:
        """Kills the process if it does not end within `patience_s`, and leaves no trace of it. Returns what ended it.

        Pipes are left open where another thread reads from them.
        """
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        code = self.process.wait()
        if close_pipes:
            self.process.stdin.close()
            self.process.stdout.close()
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def write_frame(stream: IO[bytes], payload: bytes) -> None:
    """Writes one frame to an unbuffered stream."""
    for part in (len(payload).to_bytes(LENGTH_BYTES, "little"), payload):
        view = memoryview(part)
        while view:
            view = view[stream.write(view):]


def read_frame(stream: IO[bytes]) -> bytearray | None:
    """The payload of the next frame of an unbuffered stream; None where the stream ends before its end."""
    length = _read(stream, LENGTH_BYTES)
    return None if length is None else _read(stream, int.from_bytes(length, "little"))


def main() -> None:
    """Serves tasks until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is meant for the parent, which ends its workers
    tasks = FileIO(os.dup(0))
    answers = FileIO(os.dup(1), "w")
    os.dup2(2, 1)                                       # what libraries print must not get between the frames
    frames: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(tasks, frames), daemon=True).start()
    setup: Setup = pickle.loads(frames.get())
    vocabulary = setup.vocabulary
    if setup.tokenizer_json is not None:
        vocabulary.encode = _encoder(setup.tokenizer_json)
    while True:
        _serve(pickle.loads(frames.get()), vocabulary, setup.store, answers)


def _serve(task: Task, vocabulary: Vocabulary, store: TableStore | None, answers: IO[bytes]) -> None:
    answer: Grammar | GrammarError
    try:
        answer = compile_grammar(vocabulary=vocabulary, **pickle.loads(task.sources))
    except GrammarError as error:
        answer = error.with_traceback(None)             # the frames hold what took the memory
    try:
        write_frame(answers, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
    except BrokenPipeError:
        sys.exit()                                      # the parent is gone
    if store is not None and task.store_key is not None and isinstance(answer, Grammar):
        try:
            store.save(task.store_key, answer)
        except OSError as error:
            logger.warning("%s: a compiled grammar could not be kept: %s", store.folder, error)


def _read(stream: IO[bytes], num_bytes: int) -> bytearray | None:
    content = bytearray(num_bytes)
    view, num_read = memoryview(content), 0
    while num_read < num_bytes:
        more = stream.readinto(view[num_read:])
        if not more:
            return None
        num_read += more
    return content


def _receive(stream: IO[bytes], frames: queue.SimpleQueue[bytearray]) -> None:
    """Hands frames on; ends the process with the stream, also in the middle of a compilation."""
    while (frame := read_frame(stream)) is not None:
        frames.put(frame)
    os._exit(0)


def _encoder(tokenizer_json: str) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer
    backend = Tokenizer.from_str(tokenizer_json)
    return lambda text: backend.encode(text, add_special_tokens=False).ids


if __name__ == "__main__":
    main()
