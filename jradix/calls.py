"""How calls share one engine: each is a generator of steps, and one thread at a time may touch the engine.

The body of a call is a generator: it yields None where it waits for an engine step and anything else for its user; what
it returns is the call's result. `whole_call` and `iterated_call` run it in the caller's thread; `steps_of` hands the
generator to one who makes the steps for many calls, as `AsyncLLM` does.
"""
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from jradix.errors import EngineError

P = ParamSpec("P")
R = TypeVar("R")
Steps = Generator[Any, None, R]
END = object()


class Turn:
    """A re-entrant lock on an engine that threads get in the order of their coming.

    Invariant: who touches the engine is inside. A visitor waits at the door, and keeps the door until it leaves. A
    worker stays for many steps and passes the door only to come in: it cannot overtake a visitor.
    """

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._inside = threading.Lock()
        self._inside_id: int | None = None      # the thread inside
        self._num_workers = 0                   # that stay: inside, or giving way

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps all other threads out; waits for the one inside, a worker at most until the end of its step."""
        if self._inside_id == threading.get_ident():
            yield
            return
        with self._door, self._inside:
            try:
                self._inside_id = threading.get_ident()
                yield
            finally:
                self._inside_id = None

    @property
    def is_taken(self) -> bool:
        """True while another thread is inside, or a worker of another thread may come in at any moment."""
        inside_id = self._inside_id
        return inside_id != threading.get_ident() and (inside_id is not None or self._num_workers > 0)

    def enter(self) -> None:
        """Comes in as a worker, for many steps."""
        self._come_in()
        self._num_workers += 1

    @property
    def is_awaited(self) -> bool:
        """True while somebody waits to come in."""
        return self._door.locked()

    def give_way(self) -> None:
        """Between two steps of a worker: lets those in who wait, and comes back after them."""
        self._go_out()
        self._come_in()

    def leave(self) -> None:
        """Ends the stay of a worker."""
        self._num_workers -= 1
        self._go_out()

    def _come_in(self) -> None:
        with self._door:
            self._inside.acquire()
        self._inside_id = threading.get_ident()

    def _go_out(self) -> None:
        self._inside_id = None
        self._inside.release()


class Caller(Protocol):
    """What has calls: an LLM."""
    turn: Turn

    def pump(self) -> None:
        """Makes one engine step for all open calls."""


C = TypeVar("C", bound=Caller)


def steps_of(call: Callable[Concatenate[C, P], object], caller: C, *args: P.args, **kwargs: P.kwargs) -> Steps[Any]:
    """The generator behind a call, not started. Whoever runs it holds the turn."""
    return call.__wrapped__(caller, *args, **kwargs)


def whole_call(body: Callable[Concatenate[C, P], Steps[R]]) -> Callable[Concatenate[C, P], R]:
    """A method that runs a body to its end, with the engine to itself, and returns the result."""
    @functools.wraps(body)
    def run(caller: C, *args: P.args, **kwargs: P.kwargs) -> R:
        with caller.turn.held(), contextlib.closing(body(caller, *args, **kwargs)) as steps:
            try:
                while True:
                    next(steps)
                    caller.pump()
            except StopIteration as end:
                return end.value
            except (KeyboardInterrupt, EngineError) as error:
                steps.throw(error)      # comes back with what the call has so far
                raise
    return run


def iterated_call(body: Callable[Concatenate[C, P], Iterator[R | None]]) -> Callable[Concatenate[C, P], Iterator[R]]:
    """A method that yields what a body has for its user; between two of them other calls may have the engine."""
    @functools.wraps(body)
    def run(caller: C, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        return _iterate(caller, body(caller, *args, **kwargs))
    return run


def in_turn(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """A method that touches the engine and makes no steps."""
    @functools.wraps(method)
    def run(caller: C, *args: P.args, **kwargs: P.kwargs) -> R:
        with caller.turn.held():
            return method(caller, *args, **kwargs)
    return run


def _iterate(caller: Caller, steps: Steps[None]) -> Iterator[Any]:
    try:
        while True:
            with caller.turn.held():
                while (item := next(steps, END)) is None:
                    caller.pump()
            if item is END:
                return
            yield item
    finally:
        with caller.turn.held():
            steps.close()
