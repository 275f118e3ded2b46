"""Runs many programs over one engine: each is a greenlet that sleeps while its parts are generated.

    program runs until it reads what is not there yet -> engine steps -> an output ends -> its state goes on with its
    queue, and programs that wait for just that run again

Programs take turns on one thread. All parts that are open, of all programs and forks, are in the engine at once and
share its steps.
"""
from __future__ import annotations

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from jradix.errors import PinError, ProgramError
from jradix.outputs import RequestOutput
from jradix.program.chat_frame import ChatFrame
from jradix.program.selection import Selection
from jradix.program.slot import Slot
from jradix.program.state import State
from jradix.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jradix.llm import LLM

_SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)
Body = Callable[[State], Any]


class Driver:
    """The programs of one call.

    Args:
      llm: the engine that serves them.
      params: sampling parameters where a `gen` gives none.
      on_text: called with (state, name or None, text) as text appears.
    """

    def __init__(self, llm: LLM, params: SamplingParams | None = None,
                 on_text: Callable[[State, str | None, str], None] | None = None):
        self.llm = llm
        self.params = params
        self.frame = ChatFrame(llm.tokenizer)
        self._on_text = on_text
        self._hub: greenlet | None = None
        self._programs: set[greenlet] = set()
        self._ready: deque[greenlet] = deque()
        self._waiters: dict[State, list[tuple[Callable[[], bool], greenlet]]] = {}
        self._open: dict[State, set[str]] = {}       # states with requests in the engine, and these
        self._pins: Counter[bytes] = Counter()       # who holds each pinned prefix
        self._is_closing = False

    # -- what states ask for

    def submit(self, state: State, tokens: np.ndarray, params: SamplingParams, take: Callable[[RequestOutput], None]
               ) -> None:
        """Queues a part. Raises RequestError."""
        name = self.llm.submit(tokens, params, take, is_streamed=self._on_text is not None)
        self._open.setdefault(state, set()).add(name)

    def select(self, state: State, selection: Selection, slot: Slot) -> None:
        """Queues the scoring of a choice. Raises RequestError."""
        def take(index: int, output: RequestOutput) -> None:
            if not state.is_waiting_for(slot):
                return
            if output.error is not None or output.outputs[0].finish_reason == "abort":
                state.fail(f"{slot.title}: {output.error or 'aborted'}")
            elif selection.take(index, output):
                state.take_choice(slot, selection)

        for index, (tokens, first) in enumerate(selection.requests):
            name = self.llm.submit(tokens, _SCORED, lambda output, i=index: take(i, output), first_logit=first - 1)
            self._open.setdefault(state, set()).add(name)

    def note(self, state: State) -> None:
        """A part of the state has ended: programs that waited for it go on."""
        if state.is_idle and (names := self._open.pop(state, None)) and state.error is not None:
            self.llm.withdraw(names)
        waiting = self._waiters.pop(state, [])
        for is_met, program in waiting:
            if is_met():
                self._ready.append(program)
            else:
                self._waiters.setdefault(state, []).append((is_met, program))

    @contextlib.contextmanager
    def pinned(self, tokens: np.ndarray) -> Iterator[None]:
        """Keeps a prefix in the cache; states of the same text may do so at the same time. Raises PinError."""
        key, prefix = tokens.tobytes(), tokens.tolist()
        if prefix and not self._pins[key]:
            self.llm.cache.pin(prefix, owner=self)
        self._pins[key] += 1
        try:
            yield
        finally:
            self._pins[key] -= 1
            if prefix and not self._pins[key]:
                with contextlib.suppress(PinError):     # taken away meanwhile by `cache.clear(unpin=True)`
                    self.llm.cache.unpin(prefix, owner=self)

    def show(self, state: State, name: str | None, text: str) -> None:
        """New text of a state."""
        if self._on_text is not None:
            self._on_text(state, name, text)

    def wait(self, state: State, is_met: Callable[[], bool]) -> None:
        """Returns when the condition on a state holds; other programs run meanwhile."""
        program = getcurrent()
        if program not in self._programs:
            with self.llm.turn.held():
                while not is_met():
                    self._pump()
            return
        while not is_met():
            if self._is_closing:
                raise GreenletExit
            self._waiters.setdefault(state, []).append((is_met, program))
            self._hub.switch()

    # -- the programs

    def run(self, bodies: Iterable[Body], max_live: int) -> Iterator[tuple[int, State] | None]:
        """Runs programs, at most `max_live` at a time.

        Yields (index, state) as each ends, failed ones too, and None after every step of the engine. Closing the
        iterator ends what still runs.
        """
        pending = enumerate(bodies)
        ended: deque[tuple[int, State]] = deque()
        has_more = True
        try:
            while has_more or self._programs:
                with self.llm.turn.held():
                    while has_more and len(self._programs) < max_live:
                        index, body = next(pending, (-1, None))
                        has_more = body is not None
                        if has_more:
                            self._begin(lambda index=index, body=body: ended.append((index, self._run_body(body))))
                            self._resume_ready()
                    self._resume_ready()
                    if self._programs:
                        self._pump()
                while ended:
                    yield ended.popleft()
                yield None
        finally:
            with self.llm.turn.held():
                self._end_all()

    def _end_all(self) -> None:
        """Ends what still runs, in the engine and as programs."""
        self._is_closing = True
        for names in list(self._open.values()):
            self.llm.withdraw(names)
        for program in list(self._programs):
            program.parent = getcurrent()
            program.throw()
        for held in (self._programs, self._ready, self._waiters, self._open):
            held.clear()
        self._is_closing = False

    def map(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of tasks that run at once, each as a program of its own; inside a program or outside of any.

        Raises what the first that failed raised, once all have ended.
        """
        results: list[Any] = [None] * len(tasks)
        errors: dict[int, Exception] = {}
        caller = getcurrent() if getcurrent() in self._programs else None
        num_left = len(tasks)

        def run(index: int, task: Callable[[], Any]) -> None:
            nonlocal num_left
            try:
                results[index] = task()
            except Exception as error:      # of the user's code; raised again below
                errors[index] = error
            num_left -= 1
            if num_left == 0 and caller is not None:
                self._ready.append(caller)

        for index, task in enumerate(tasks):
            self._begin(functools.partial(run, index, task))
        if caller is None:
            with self.llm.turn.held():
                try:
                    self._resume_ready()
                    while num_left:
                        self._pump()
                        self._resume_ready()
                except BaseException:
                    self._end_all()
                    raise
        while num_left:
            self._hub.switch()
        if errors:
            raise errors[min(errors)]
        return results

    def _begin(self, task: Callable[[], None]) -> None:
        """A program that runs at the next opportunity."""
        def live() -> None:
            try:
                task()
            finally:
                self._programs.discard(getcurrent())

        program = greenlet(live)
        self._programs.add(program)
        self._ready.append(program)

    def _resume_ready(self) -> None:
        """Runs every program that can go on, each until it waits or ends."""
        while self._ready:
            program = self._ready.popleft()
            self._hub = program.parent = getcurrent()
            program.switch()

    def _pump(self) -> None:
        assert self._open, "programs wait, and nothing of theirs is in the engine"
        self.llm.pump()

    def _run_body(self, body: Body) -> State:
        """The life of one program."""
        state = State(self)
        try:
            state.result = body(state)
            while state.family:
                member = next(iter(state.family))
                self.wait(member, lambda: member.is_idle)
            state.text()
        except Exception as error:      # whatever a user's program may raise is its own record
            state.cause = error
            reason = str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
            for member in [state, *state.family]:
                member.fail(reason)
        return state
