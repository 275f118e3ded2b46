"""`@jradix.function`: a Python function that writes a text with a model, and the ways to run it."""
from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jradix.errors import EngineError, ProgramError
from jradix.program.driver import Driver
from jradix.program.state import State
from jradix.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jradix.llm import LLM

_RESERVED = ("llm", "params")
_LIVE_PER_ROW = 4          # programs that run at once, per row of a step


@dataclass(frozen=True, slots=True)
class ProgramDelta:
    """What `stream` yields.

    Attributes:
      text: new text.
      name: of the part that it belongs to; None for text that the program wrote, and for parts without a name.
      state: the program's state, on the last delta only.
    """
    text: str
    name: str | None = None
    state: State | None = None


class Function:
    """A program. Called with a state, it goes on writing there: that is how one program uses another."""

    def __init__(self, function: Callable[..., Any]):
        names = list(inspect.signature(function).parameters)
        if not names or set(names) & set(_RESERVED):
            raise ValueError(f"@jradix.function def {function.__name__}({', '.join(names)}): expected the state as "
                             f"first parameter, and none named {' or '.join(_RESERVED)}")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise ValueError(f"@jradix.function def {function.__name__}: a coroutine or generator; expected a plain "
                             "function, which waits where it reads a value")
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, s: State, *args: Any, **kwargs: Any) -> Any:
        """Goes on in the text of another program."""
        if not isinstance(s, State):
            raise ValueError(f"{self.__name__}({s!r:.60}, ...): expected a state; use {self.__name__}.run(..., llm=llm)")
        return self._function(s, *args, **kwargs)

    def run(self, *args: Any, llm: LLM, params: SamplingParams | None = None, **kwargs: Any) -> State:
        """Runs the program once.

        Args:
          args, kwargs: of the function, after the state.
          llm: the model.
          params: sampling parameters where a `gen` gives none.

        Returns:
          The state at its end; what the function returned is its `result`.

        Raises:
          ProgramError: from what the program raised; with the text so far.
        """
        for ended in Driver(llm, params).run([self._body(args, kwargs)], max_live=1):
            if ended is not None:
                return _checked(ended[1])
        raise AssertionError("the program neither ended nor failed")

    def run_batch(self, calls: Iterable[Any], *, llm: LLM, params: SamplingParams | None = None,
                  progress: bool | None = None, max_live: int | None = None) -> list[State]:
        """Runs the program for each call; all that is to be generated at a time shares the engine's steps.

        Args:
          calls: the arguments of each: a mapping by name, a tuple by place, anything else as the only one.
          llm, params: as in `run`.
          progress: a progress bar; None: the LLM's own setting.
          max_live: programs that run at once; None: 4 times max_num_seqs.

        Returns:
          The states in the order of the calls; `error` says why a program failed.

        Raises:
          EngineError: the device failed. It and KeyboardInterrupt carry `partial_results`: states of the programs that
            had ended, None for the others.
        """
        calls = list(calls)
        if max_live is None:
            max_live = _LIVE_PER_ROW * llm.config.max_num_seqs
        if max_live < 1:
            raise ValueError(f"max_live={max_live}: expected a positive number")
        results: list[State | None] = [None] * len(calls)
        num_ended = 0
        bodies = (self._body(*_arguments(call)) for call in calls)
        try:
            with llm.progress_bar(self.__name__, progress, len(calls)) as bar:
                for ended in Driver(llm, params).run(bodies, max_live):
                    if ended is not None:
                        results[ended[0]] = ended[1]
                        num_ended += 1
                        bar.update(num_ended, len(calls))
        except (KeyboardInterrupt, EngineError) as error:
            error.partial_results = results
            raise
        return results

    def stream(self, *args: Any, llm: LLM, params: SamplingParams | None = None, **kwargs: Any
               ) -> Iterator[ProgramDelta]:
        """Runs the program and yields its text as it appears, not that of its forks. Arguments and errors as `run`.

        Closing the iterator ends the program.
        """
        deltas: deque[tuple[State, ProgramDelta]] = deque()
        main: list[State] = []

        def body(s: State) -> Any:
            main.append(s)
            return self._function(s, *args, **kwargs)

        driver = Driver(llm, params, lambda state, name, text: deltas.append((state, ProgramDelta(text, name))))
        for ended in driver.run([body], max_live=1):
            while deltas:
                state, delta = deltas.popleft()
                if state is main[0]:
                    yield delta
            if ended is not None:
                yield ProgramDelta("", state=_checked(ended[1]))

    def _body(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[State], Any]:
        return lambda s: self._function(s, *args, **kwargs)


def function(function: Callable[..., Any]) -> Function:
    """Makes a program of a function whose first parameter is the text it writes:

        @jradix.function
        def answer(s, question):
            s.user(question)
            s.assistant(jradix.gen("answer", max_tokens=64))

        answer.run("Where is Ulm?", llm=llm)["answer"]
    """
    return Function(function)


def start(llm: LLM, params: SamplingParams | None = None) -> State:
    """A state outside of any program, for a notebook or a script: reading from it runs the engine.

    Args:
      llm: the model.
      params: sampling parameters where a `gen` gives none.
    """
    return State(Driver(llm, params))


def _arguments(call: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(call, Mapping):
        return (), call
    return (call if isinstance(call, tuple) else (call,)), {}


def _checked(state: State) -> State:
    if state.error is not None:
        raise ProgramError(state.error, state) from state.cause
    return state
