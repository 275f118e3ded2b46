"""Compiles grammars in processes of their own while the engine goes on; the processes are in `worker.py`.

A grammar found in the store needs no process. Each job has a thread while it lasts, which talks to one worker; workers
are started when they are first needed and stay, idle, until the pool is closed.
"""
from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import reprlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from jradix.errors import EngineError, GrammarError, GrammarTooLarge
from jradix.grammar.compiler import SOURCES, Grammar, read_schema
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.table_store import TableStore, table_key
from jradix.grammar.vocabulary import Vocabulary
from jradix.grammar.worker import Setup, Task, WorkerProcess
from jradix.tokenizer import Tokenizer

DEATH_S = 5.0       # from the end of a worker's output to its own end, which tells the cause


class CompilePool:
    """Compiles the grammars of one vocabulary in the background.

    It may be used from several threads. Its processes end with `close`, with the pool itself, at the end of the
    interpreter, and also when the interpreter is killed.

    Args:
      vocabulary: whose token tables are made. Its `encode` is None or comes from a `Tokenizer`.
      num_workers: processes at most.
      store: compiled grammars on disk, looked up first and added to.

    Raises:
      ValueError: `num_workers` below 1, or an `encode` that another process cannot have.
    """

    def __init__(self, vocabulary: Vocabulary, *, num_workers: int, store: TableStore | None = None) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers!r}: expected an integer >= 1")
        self._crew = _Crew(vocabulary, num_workers, store)
        self._end = weakref.finalize(self, self._crew.end)      # threads hold the crew, never the pool

    def submit(self, key: str, sources: Mapping[str, Any]) -> None:
        """Has a grammar compiled. A key whose result was not taken yet is not submitted twice.

        Args:
          key: equal for equal sources.
          sources: arguments of `compile_grammar` without `tokenizer` and `vocabulary`; they may be changed afterwards.

        Raises:
          EngineError: the pool is closed.
        """
        self._crew.submit(key, sources)

    def take_finished(self) -> list[tuple[str, Grammar | GrammarError]]:
        """Key and result of what has finished since the last call; never waits.

        The result is what `compile_grammar` returns or raises in this process, or a GrammarError that says how the
        compiling process died.
        """
        return self._crew.take_finished()

    def wait(self, timeout_s: float) -> bool:
        """Waits until there is something to take; False when the time is up first, at once if nothing is pending."""
        return self._crew.wait(timeout_s)

    @property
    def num_pending(self) -> int:
        """Grammars submitted whose result was not taken yet."""
        return len(self._crew.pending)

    @property
    def num_compiled(self) -> int:
        """Grammars that a worker has compiled; those found in the store and errors are left out."""
        return self._crew.num_compiled

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that were started and not seen to end."""
        return self._crew.worker_pids()

    def close(self) -> None:
        """Ends the workers at once; results that were not taken are lost. Closing again does nothing."""
        self._end()
        self._crew.join()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Job(NamedTuple):
    """sources: pickled, so that the caller's may change; their pickle crosses as it is. name: for messages."""
    key: str
    name: str
    sources: bytes
    limits: GrammarLimits | None


class _Crew:
    """The state that the pool and its threads share. A key is in `pending` from its submission until it is taken."""

    def __init__(self, vocabulary: Vocabulary, num_workers: int, store: TableStore | None) -> None:
        self.vocabulary, self.num_workers, self.store = vocabulary, num_workers, store
        self.tokenizer = _tokenizer_of(vocabulary.encode)
        self.owner_pid = os.getpid()
        self.num_compiled = 0
        self.is_closed = False
        self.pending: set[str] = set()
        self.waiting: deque[_Job] = deque()
        self.finished: list[tuple[str, Grammar | GrammarError]] = []
        self.threads: set[threading.Thread] = set()     # one for each job at work
        self.workers: set[WorkerProcess] = set()              # every process that runs
        self.idle: list[WorkerProcess] = []
        self.setup: bytes | None = None
        self.setup_lock = threading.Lock()
        self.changed = threading.Condition()            # guards all but `setup`; its lock may be taken twice

    def submit(self, key: str, sources: Mapping[str, Any]) -> None:
        if self._is_known(key):
            return
        job = _job_or_error(key, sources)
        with self.changed:
            if self._is_known(key):
                return
            self.pending.add(key)
            if isinstance(job, _Job):
                self.waiting.append(job)
                self._start_waiting()
            else:
                self.finished.append((key, job))
                self.changed.notify_all()

    def _is_known(self, key: str) -> bool:
        with self.changed:
            if self.is_closed:
                raise EngineError("the compile pool is closed; make a new one to compile grammars")
            return key in self.pending

    def take_finished(self) -> list[tuple[str, Grammar | GrammarError]]:
        with self.changed:
            taken, self.finished = self.finished, []
            self.pending.difference_update(key for key, _ in taken)
            return taken

    def wait(self, timeout_s: float) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.finished or not self.pending or self.is_closed, timeout_s)
            return bool(self.finished)

    def worker_pids(self) -> tuple[int, ...]:
        with self.changed:
            return tuple(sorted(worker.process.pid for worker in self.workers))

    def end(self) -> None:
        """Kills the workers. Runs in any thread, since a pool may be garbage; waits for no thread therefore."""
        if os.getpid() != self.owner_pid:
            return                          # a fork of the process that owns them
        with self.changed:
            self.is_closed = True
            busy, idle = self.workers.difference(self.idle), list(self.idle)
            for state in (self.workers, self.idle, self.waiting, self.pending, self.finished):
                state.clear()
            self.changed.notify_all()
        for worker in busy:
            worker.end(close_pipes=False)   # its thread is reading
        for worker in idle:
            worker.end()

    def join(self) -> None:
        """Waits for the threads, whose workers are gone."""
        if os.getpid() != self.owner_pid:
            return
        with self.changed:
            threads = list(self.threads)
        for thread in threads:
            thread.join()

    def _start_waiting(self) -> None:
        """Gives every job that may run a thread. Called with the lock held."""
        while self.waiting and len(self.threads) < self.num_workers:
            thread = threading.Thread(target=self._serve, args=(self.waiting.popleft(),), name="jradix-compile",
                                      daemon=True)
            self.threads.add(thread)
            thread.start()

    def _serve(self, job: _Job) -> None:
        """The thread of one job. Whatever happens, the job gets a result and the next one its turn."""
        result: Grammar | GrammarError = GrammarError(f"{job.name}: its thread in this process failed; the message is "
                                                      "on stderr")
        try:
            result = self._result(job)
        finally:
            with self.changed:
                self.threads.discard(threading.current_thread())
                if not self.is_closed:
                    self.finished.append((job.key, result))
                    self._start_waiting()
                self.changed.notify_all()

    def _result(self, job: _Job) -> Grammar | GrammarError:
        store_key = self._store_key(job)
        if store_key is not None:
            stored = self.store.load(store_key)
            if stored is not None:
                return self._sharing(stored)
        try:
            worker = self._worker()
        except OSError as error:
            return GrammarError(f"{job.name}: the compiler process did not start ({error}); expected "
                                f"{sys.executable!r} to run, and memory for it")
        if worker is None:
            return GrammarError(f"{job.name}: the compile pool was closed")
        answer = worker.ask(pickle.dumps(Task(job.sources, store_key)))
        with self.changed:
            is_of_use = answer is not None and not self.is_closed
            if is_of_use:
                self.idle.append(worker)
            else:
                self.workers.discard(worker)
        if not is_of_use:
            cause = worker.end(patience_s=0.0 if self.is_closed else DEATH_S)
            return GrammarError(f"{job.name}: the compiler process died ({cause}) with this grammar; look for its "
                                "message on stderr, and whether memory ran out")
        result = pickle.loads(answer)
        if not isinstance(result, Grammar):
            return result
        with self.changed:
            self.num_compiled += 1
        return self._sharing(result)

    def _worker(self) -> WorkerProcess | None:
        """An idle worker, else a new one; None when the pool is closed."""
        with self.changed:
            while self.idle:
                worker = self.idle.pop()
                if worker.is_running:
                    return worker
                self.workers.discard(worker)
                worker.end()
            if self.is_closed:
                return None
        with self.setup_lock:
            if self.setup is None:
                self.setup = self._make_setup()
        worker = WorkerProcess(self.setup)
        with self.changed:
            if not self.is_closed:
                self.workers.add(worker)
                return worker
        worker.end()
        return None

    def _make_setup(self) -> bytes:
        vocabulary = copy.copy(self.vocabulary)
        vocabulary.encode = None            # it would take transformers along; the worker makes its own
        text = None if self.tokenizer is None else self.tokenizer.fast.backend_tokenizer.to_str()
        return pickle.dumps(Setup(vocabulary, text, self.store), pickle.HIGHEST_PROTOCOL)

    def _store_key(self, job: _Job) -> str | None:
        if self.store is None:
            return None
        try:
            return table_key(pickle.loads(job.sources), self.vocabulary, job.limits)
        except (ValueError, TypeError, RecursionError):
            return None                     # no schema, or nothing JSON can say: the worker tells what is wrong

    def _sharing(self, grammar: Grammar) -> Grammar:
        """The same with the vocabulary's own bytes in place of a copy of them."""
        tables = grammar.tables
        if tables is None or tables.byte_tables is None:
            return grammar
        byte_tables = dataclasses.replace(tables.byte_tables, byte_starts=self.vocabulary.byte_starts,
                                          byte_data=self.vocabulary.byte_data)
        return dataclasses.replace(grammar, tables=dataclasses.replace(tables, byte_tables=byte_tables))


def _tokenizer_of(encode: Callable[[str], list[int]] | None) -> Tokenizer | None:
    """The tokenizer behind the `encode` of a vocabulary."""
    if encode is None:
        return None
    if isinstance(encode, partial) and encode.keywords == {"add_special_tokens": False} \
            and isinstance(encode.func, MethodType) and isinstance(encode.func.__self__, Tokenizer):
        return encode.func.__self__
    raise ValueError(f"the vocabulary encodes with {encode!r}, which another process cannot have; make it with "
                     "vocabulary_of(tokenizer), or without `encode`")


def _job_or_error(key: str, sources: Mapping[str, Any]) -> _Job | GrammarError:
    """The job, with a schema in place of a Python type that stands for one; or why another process cannot do it."""
    outside = [name for name in ("tokenizer", "vocabulary") if sources.get(name) is not None]
    if outside:
        return GrammarError(f"{outside[0]} given: a compile pool has a vocabulary of its own; leave it out")
    name, plain = _named(sources), dict(sources)
    try:
        if not isinstance(plain.get("json_schema"), (str, dict, bool, type(None))):
            plain["json_schema"] = read_schema(plain["json_schema"])
        return _Job(key, name, pickle.dumps(plain, pickle.HIGHEST_PROTOCOL), plain.get("limits"))
    except RecursionError:
        return GrammarTooLarge(f"{name} nests too deeply; flatten it")
    except GrammarError as error:
        return error
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        return GrammarError(f"{name} cannot be handed to the compiling process ({error}); expected plain values: "
                            "texts, numbers, lists and dicts")


def _named(sources: Mapping[str, Any]) -> str:
    """The grammar among `sources`, shortened, for messages."""
    shown = reprlib.Repr()
    shown.maxstring = 60
    return ", ".join(f"{name}={shown.repr(value)}" for name, value in sources.items()
                     if name in SOURCES and value is not None) or "nothing"
