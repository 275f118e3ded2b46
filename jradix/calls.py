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

    A visitor holds it for a call or a part of one, a worker for many steps: it lets others in between them.
    Invariant: only the first in line is inside, and only who is inside touches the engine.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._line: dict[int, threading.Event] = {}      # thread -> set when it is the first
        self._inside_id: int | None = None
        self._num_workers = 0                            # that stay: inside, or giving way

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps all other threads out; waits for those that came before, a worker at most until its step ends."""
        if self._inside_id == threading.get_ident():
            yield
            return
        try:
            self._come_in()
            yield
        finally:
            self._go_out()

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
        """True while somebody waits for the one inside."""
        return len(self._line) > 1

    def give_way(self) -> None:
        """Between two steps of a worker: lets those in who wait, and comes back after them."""
        self._go_out()
        self._come_in()

    def leave(self) -> None:
        """Ends the stay of a worker."""
        self._num_workers -= 1
        self._go_out()

    def _come_in(self) -> None:
        me, is_first = threading.get_ident(), threading.Event()
        with self._changing:
            self._line.pop(me, None)      # a place that an interrupt left behind
            self._line[me] = is_first
            self._call_first()
        is_first.wait()
        self._inside_id = me

    def _go_out(self) -> None:
        """Leaves the line: from inside, or from a wait that was interrupted."""
        me = threading.get_ident()
        if self._inside_id == me:
            self._inside_id = None
        with self._changing:
            self._line.pop(me, None)
            self._call_first()

    def _call_first(self) -> None:
        if self._line:
            next(iter(self._line.values())).set()


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
