"""AsyncLLM: the calls of an LLM for code that runs in an event loop.

    coroutine -- call --> worker thread: take every call to where it waits, make one engine step for all, again
              <-- result, or what a stream gained since it was last asked --

The worker lives while there is work. It adds nothing to what a call does: that is the generator behind the same call of
`LLM` (`jradix.calls`), so results are the same.
"""
from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from jradix.calls import Steps, steps_of
from jradix.errors import EngineError
from jradix.llm import LLM, Messages, Prompt
from jradix.outputs import RequestOutput, ScoreOutput, StreamDelta
from jradix.sampling_params import SamplingParams

R = TypeVar("R")


class AsyncLLM:
    """The calls of an LLM as coroutines; also an async context manager.

    Calls that run at the same time share the engine's steps, from any number of event loops, one after the other or
    at once. Cancelling a call, leaving a stream or a timeout aborts its requests at the end of the running step. A step
    that fails raises EngineError in every call that waits. The LLM itself may be used meanwhile, also inside the loop,
    which then waits: the steps of its calls take these along, and one that fails or is interrupted ends these with what
    they have (finish_reason "abort").

    Args:
      model: an LLM to share, or what `LLM` takes to load one.
      options: of the LLM to load.

    Attributes:
      llm: the LLM.

    Raises:
      ValueError: options beside an LLM. What `LLM` raises.
    """

    def __init__(self, model: LLM | str | Path, **options: Any):
        self._is_owner = not isinstance(model, LLM)
        if options and not self._is_owner:
            raise ValueError(f"options {', '.join(options)} are for an LLM to load, but one was given; "
                             "make it with them")
        self.llm = LLM(model, **options) if self._is_owner else model
        self._lock = threading.Lock()      # of what follows
        self._new: list[_Call] = []
        self._thread: threading.Thread | None = None     # the last worker
        self._ended: Future[None] = Future()             # of the last worker
        self._is_working = False                         # the last worker will look at `_new` again
        self._is_closed = False

    async def generate(self, prompts: Prompt | Sequence[Prompt],
                       params: SamplingParams | Sequence[SamplingParams] | None = None, *, on_error: str = "record",
                       progress: bool = False) -> list[RequestOutput]:
        """As `LLM.generate`."""
        return await self._result(steps_of(LLM.generate, self.llm, prompts, params, on_error=on_error,
                                           progress=progress))

    async def chat(self, messages: Messages | Sequence[Messages],
                   params: SamplingParams | Sequence[SamplingParams] | None = None, *, progress: bool = False,
                   **options: Any) -> list[RequestOutput]:
        """As `LLM.chat`, with all its options."""
        return await self._result(steps_of(LLM.chat, self.llm, messages, params, progress=progress, **options))

    async def score(self, prompts: Prompt | Sequence[Prompt], completions: Prompt | Sequence[Prompt], *,
                    progress: bool = False) -> list[ScoreOutput]:
        """As `LLM.score`."""
        return await self._result(steps_of(LLM.score, self.llm, prompts, completions, progress=progress))

    async def stream(self, prompts: Prompt | Sequence[Prompt],
                     params: SamplingParams | Sequence[SamplingParams] | None = None) -> AsyncIterator[StreamDelta]:
        """As `LLM.stream`, but what a sample gains while nobody asks becomes one delta.

        After `break` the requests are aborted once the loop finalises the iterator; `contextlib.aclosing` does it at
        once.
        """
        call = self._start(steps_of(LLM.stream, self.llm, prompts, params))
        try:
            while True:
                call.news.clear()
                is_over = call.result.done()
                while (delta := call.take()) is not None:
                    yield delta
                if is_over:
                    call.result.result()      # raises what ended it
                    return
                await call.news.wait()
        finally:
            call.result.cancel()

    async def run(self, function: Callable[[LLM], R]) -> R:
        """Returns function(llm), called between two steps: for `llm.cache`, which no other thread may touch meanwhile,
        and for what takes long (`LLM.warmup`) or should not hold up the loop for a step (`LLM.stats`).
        """
        return await self._result(_without_steps(function, self.llm))

    async def aclose(self) -> None:
        """Ends all calls with EngineError, waits for the worker, and closes the LLM if it was loaded here.

        Further calls do nothing.
        """
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is not None:
            await asyncio.shield(asyncio.wrap_future(self._ended))
            thread.join()      # it has nothing left to do
        if self._is_owner:
            self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # -- in the event loop

    async def _result(self, steps: Steps[R]) -> R:
        return await asyncio.wrap_future(self._start(steps).result)

    def _start(self, steps: Steps[Any]) -> _Call:
        call = _Call(steps, asyncio.get_running_loop())
        with self._lock:
            if self._is_closed:
                raise EngineError("this AsyncLLM is closed; make a new one")
            if not self._is_working:
                ended: Future[None] = Future()
                thread = threading.Thread(target=self._work, args=(ended,), name="jradix-async")
                thread.start()
                self._thread, self._ended, self._is_working = thread, ended, True
            self._new.append(call)
        return call

    # -- in the worker

    def _work(self, ended: Future[None]) -> None:
        """Makes steps until no call is left."""
        turn = self.llm.turn
        calls: list[_Call] = []
        turn.enter()
        try:
            while calls := self._with_new(calls):
                if self._is_closed or not threading.main_thread().is_alive():     # the interpreter waits for us to end
                    _fail(calls, "closed while this call ran")
                for call in calls:
                    call.advance()
                calls = [call for call in calls if call.is_open]
                if calls:
                    try:
                        self.llm.pump()
                    except BaseException as error:      # whatever it is, those who wait must hear of it
                        _fail(calls, str(error) or repr(error), error)
                is_awaited = turn.is_awaited       # asked first: what a visitor cancelled before it came, it finds gone
                for call in calls:
                    call.drop_if_unwanted()
                calls = [call for call in calls if call.is_open]
                if is_awaited:
                    turn.give_way()
        finally:
            turn.leave()
            ended.set_result(None)

    def _with_new(self, calls: list[_Call]) -> list[_Call]:
        with self._lock:
            calls += [call for call in self._new if not call.result.cancelled()]
            self._new.clear()
            self._is_working = bool(calls)
        return calls


class _Call:
    """A call under way: its steps in the worker, and what of them its event loop may have.

    Attributes:
      result: cancelled when nobody wants it any more.
      news: set in the loop when there is a delta to take, or the result.
      is_open: the steps have not ended; the worker's own.
    """

    def __init__(self, steps: Steps[Any], loop: asyncio.AbstractEventLoop):
        self.result: Future[Any] = Future()
        self.news = asyncio.Event()
        self.is_open = True
        self._steps = steps
        self._loop = loop
        self._lock = threading.Lock()
        self._deltas: dict[tuple[int, int], StreamDelta] = {}     # by prompt and sample, the last grown last

    def take(self) -> StreamDelta | None:
        """The delta that has waited longest."""
        with self._lock:
            return self._deltas.pop(next(iter(self._deltas))) if self._deltas else None

    def advance(self, failure: EngineError | None = None) -> None:
        """Runs the call to where it waits for a step, or with a failure to its end."""
        if not self.is_open:
            return
        try:
            delta = next(self._steps) if failure is None else self._steps.throw(failure)
            while delta is not None:
                self._put(delta)
                delta = next(self._steps)
            return
        except StopIteration as end:
            self._end(end.value)
        except BaseException as error:      # it belongs to the one who waits for the call
            self._end(error=error)

    def drop_if_unwanted(self) -> None:
        """Aborts the requests of a call that was cancelled, or whose loop is gone."""
        if self.is_open and (self.result.cancelled() or self._loop.is_closed()):
            self.is_open = False
            self._steps.close()

    def _put(self, delta: StreamDelta) -> None:
        key = delta.index, delta.sample
        with self._lock:
            is_first = not self._deltas
            earlier = self._deltas.pop(key, None)
            if earlier is not None:
                delta = StreamDelta(*key, earlier.text + delta.text, earlier.token_ids + delta.token_ids,
                                    delta.finish_reason, delta.output)
            self._deltas[key] = delta
        if is_first:
            self._notify()

    def _end(self, result: Any = None, error: BaseException | None = None) -> None:
        self.is_open = False
        if self._loop.is_closed() or not self.result.set_running_or_notify_cancel():
            return
        if error is None:
            self.result.set_result(result)
        else:
            self.result.set_exception(error)
        self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(RuntimeError):      # the loop was closed: nobody is left to hear of it
            self._loop.call_soon_threadsafe(self.news.set)


def _fail(calls: Iterable[_Call], message: str, cause: BaseException | None = None) -> None:
    """Ends calls with an error of their own: each adds its partial results to it."""
    for call in calls:
        failure = EngineError(message)
        failure.__cause__ = cause
        call.advance(failure)


def _without_steps(function: Callable[[LLM], R], llm: LLM) -> Steps[R]:
    return function(llm)
    yield      # makes it a call
