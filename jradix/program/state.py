"""The text that a program writes, `s`: what it appended, what the model added, and what is still to come.

Appending never waits. What follows a part that is being generated stands in a queue; reading a value, the text or the
messages waits until they are there:

    done, in `TokenText` | the part that is being generated | queue of texts and parts
"""
from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jradix.errors import ProgramError
from jradix.outputs import CompletionOutput, RequestOutput
from jradix.program.forks import Forks
from jradix.program.parts import Gen, Select
from jradix.program.selection import Selection
from jradix.program.slot import Slot
from jradix.program.token_text import Text, TokenText

if TYPE_CHECKING:
    from jradix.llm import LLM
    from jradix.program.driver import Driver


class State:
    """A program's text. `s += part` appends text, `gen(...)` or `select(...)`.

    Attributes:
      result: what the program returned.
      error: why the program failed; None while it has not.
      cause: the exception behind `error`, where the program's own code raised it.
      family: states of the same program, forks included, in which something is being generated.
    """

    def __init__(self, driver: Driver, family: set[State] | None = None):
        self.result: Any = None
        self.error: str | None = None
        self.cause: Exception | None = None
        self.family: set[State] = set() if family is None else family
        self._driver = driver
        self._tokens = TokenText(driver.llm.tokenizer, driver.llm.end_token_ids)
        self._queue: deque[Slot | Text] = deque()
        self._running: Slot | None = None
        self._written: list[str | Slot] = []
        self._slots: dict[str, Slot] = {}
        self._gathered: dict[str, list[Any]] = {}
        self._roles: tuple[str, ...] = ()
        self._blocks: list[tuple[int, int]] = []     # of each role: its parts in _written
        self._in_block = False
        self._is_block_inherited = False             # it was opened before the fork that made this state
        self._needs_closing = False                  # the last block's closing text is not written yet

    # -- writing

    def __iadd__(self, part: str | Gen | Select) -> State:
        """Appends text, a part to generate or a choice."""
        if not isinstance(part, (str, Gen, Select)):
            raise ValueError(f"s += {part!r:.80}: expected a text, gen(...) or select(...)")
        self._check_alive()
        if not self._in_block:
            self._close_block()
        self._append(part, is_trusted=not self._in_block)
        return self

    def system(self, *parts: str | Gen | Select) -> Any:
        """A system message, as `user`."""
        return self._message("system", parts)

    def user(self, *parts: str | Gen | Select) -> Any:
        """A user message in the model's chat template: `s.user("text")`, or `with s.user(): s += ...`.

        Special tokens spelled in a message stay text.

        Raises:
          RequestError: the template refuses this role here.
          TokenizerError: the model has no chat template.
        """
        return self._message("user", parts)

    def assistant(self, *parts: str | Gen | Select) -> Any:
        """A message of the assistant, as `user`; `s.assistant(gen("answer"))` lets the model write it."""
        return self._message("assistant", parts)

    def fork(self, n: int = 1) -> Forks:
        """`n` states that go on from here, each by itself. The text so far is computed once, and no page is copied.

        Waits for what is being generated.
        """
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"fork({n!r}): expected a positive number")
        self._settle()
        self._tokens.hold_back()
        return Forks(self, [self._twin() for _ in range(n)])

    def append_token_ids(self, ids: Sequence[int]) -> None:
        """Appends tokens as they are. Waits for what is being generated."""
        self._check_alive()
        if not self._in_block:
            self._close_block()
        self._settle()
        ids = [int(i) for i in ids]
        self._written.append(self.llm.tokenizer.decode(ids, skip_special_tokens=False))
        self._tokens.append_ids(ids)

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Calls a function with each item, all at once: one that waits for a part of its text lets the others go on.

        Returns:
          What it returned, in order. Raises what it raised first, once all have ended.
        """
        return self._driver.map([functools.partial(function, item) for item in items])

    def gather(self, forks: Forks) -> None:
        """`forks.join()`."""
        for fork in forks:
            fork.text()
        new = [name for fork in forks for name, slot in fork._slots.items() if self._slots.get(name) is not slot]
        for name in dict.fromkeys(new):
            self._gathered[name] = [fork[name] if name in fork else None for fork in forks]

    def copy(self) -> State:
        """A state of its own that goes on from here."""
        return self.fork(1)[0]

    # -- reading

    def __getitem__(self, name: str) -> Any:
        """The value of a part, waited for: a text, or what its `dtype` or `json_schema` says.

        Raises:
          KeyError: no part of this name.
          ProgramError: it could not be generated, or its output is no whole text of its grammar.
        """
        if name in self._gathered:
            return self._gathered[name]
        slot = self._slot(name)
        if slot.problem is not None:
            raise ProgramError(f"s[{name!r}]: {slot.problem}", self)
        return slot.value

    def __contains__(self, name: str) -> bool:
        return name in self._slots or name in self._gathered

    def text(self) -> str:
        """All text so far, waited for, with the template's own."""
        self._settle()
        return self.text_so_far

    @property
    def text_so_far(self) -> str:
        """What is there already."""
        closing = self._driver.frame.closing(self._roles) if self._needs_closing else ""
        return "".join(part if isinstance(part, str) else part.text for part in self._written) + closing

    def messages(self) -> list[dict[str, str]]:
        """The messages so far, waited for, as `LLM.chat` takes them."""
        self._settle()
        texts = [part if isinstance(part, str) else part.text for part in self._written]
        self._measure_block()
        return [{"role": role, "content": "".join(texts[start:end])}
                for role, (start, end) in zip(self._roles, self._blocks)]

    def output(self, name: str) -> CompletionOutput:
        """The whole output of a `gen`: token ids, reason of its end, log-probabilities."""
        slot = self._slot(name)
        if slot.completion is None:
            raise ValueError(f"output({name!r}): {slot.problem or 'this is a select'}; expected the name of a gen")
        return slot.completion

    def logprobs(self, name: str) -> Any:
        """Of a `select`, each choice's log-probability; of a `gen` with `logprobs`, as `CompletionOutput.logprobs`."""
        slot = self._slot(name)
        if slot.choice_logprobs is not None:
            return dict(slot.choice_logprobs)
        found = self.output(name).logprobs
        if found is None:
            raise ValueError(f"logprobs({name!r}): not asked for; write gen({name!r}, logprobs=0, ...)")
        return found

    def scores(self, name: str) -> dict[str, float]:
        """Of a `select`, the score of each choice by its method."""
        slot = self._slot(name)
        if slot.scores is None:
            raise ValueError(f"scores({name!r}): {slot.problem or 'this is a gen'}; expected the name of a select")
        return dict(slot.scores)

    def token_ids(self) -> list[int]:
        """Tokens of the text so far, waited for."""
        self._settle()
        return self._tokens.ids.tolist()

    @property
    def llm(self) -> LLM:
        """The model that writes."""
        return self._driver.llm

    @contextmanager
    def pinned(self) -> Iterator[State]:
        """Keeps the KV of the text so far in the cache while the block runs. Raises PinError beyond the budget."""
        self._settle()
        self._tokens.hold_back()
        with self._driver.pinned(self._tokens.closed_ids):
            yield self

    # -- blocks

    def _message(self, role: str, parts: tuple[str | Gen | Select, ...]) -> Any:
        self._check_alive()
        if self._is_block_inherited:
            self._end_block()
        if self._in_block:
            raise ValueError(f"s.{role}() inside a message by {self._roles[-1]!r}: close that one first")
        is_generated = role == "assistant" and (not parts or not all(isinstance(part, str) for part in parts))
        if not parts:
            return self._block(role, is_generated)
        with self._block(role, is_generated):
            for part in parts:
                self += part            # noqa: PLW2901
        return self

    @contextmanager
    def _block(self, role: str, is_generated: bool) -> Iterator[State]:
        frame = self._driver.frame
        opening = frame.opening(self._roles, role, is_generated=is_generated)
        if self._roles and not self._needs_closing:
            opening = opening.removeprefix(frame.closing(self._roles))
        if not self._written:
            self._tokens.has_own_start = True
        self._needs_closing = False
        self._append(opening, is_trusted=True)
        start = len(self._written)
        self._roles += (role,)
        self._blocks.append((start, start))
        self._in_block = True
        try:
            yield self
        finally:
            self._end_block()

    def _end_block(self) -> None:
        self._measure_block()
        self._in_block = self._is_block_inherited = False
        self._needs_closing = True

    def _measure_block(self) -> None:
        if self._in_block:
            self._blocks[-1] = self._blocks[-1][0], len(self._written)

    def _close_block(self) -> None:
        if self._needs_closing:
            self._needs_closing = False
            self._append(self._driver.frame.closing(self._roles), is_trusted=True)

    # -- parts, in their order

    def _append(self, part: str | Gen | Select, *, is_trusted: bool) -> None:
        if isinstance(part, str):
            if not part:
                return
            self._written.append(part)
            self._queue.append((part, is_trusted))
        else:
            slot = Slot(part, is_trusted)
            self._written.append(slot)
            self._queue.append(slot)
            if part.name is not None:
                self._slots[part.name] = slot
                self._gathered.pop(part.name, None)
        self._advance()

    def _advance(self) -> None:
        """Takes the queue up to the next part that has to be waited for, and starts that."""
        while self._queue and self._running is None and self.error is None:
            part = self._queue.popleft()
            if not isinstance(part, Slot):
                self._tokens.write(*part)
                self._driver.show(self, None, part[0])
                continue
            self._running = part
            self.family.add(self)
            try:
                if isinstance(part.part, Gen):
                    self._start_gen(part)
                else:
                    self._start_select(part)
            except ValueError as error:              # RequestError among them
                self.fail(f"{part.title}: {error}")

    def _start_gen(self, slot: Slot) -> None:
        self._tokens.close()
        params = slot.part.params(self._driver.params)
        self._driver.submit(self, self._tokens.ids, params, lambda output: self._take_output(slot, output))

    def _take_output(self, slot: Slot, output: RequestOutput) -> None:
        if self._running is not slot:
            return
        completion = output.outputs[0] if output.outputs else None
        if completion is not None and len(completion.text) > len(slot.text):
            new, slot.text = completion.text[len(slot.text):], completion.text
            self._driver.show(self, slot.part.name, new)
        if not output.finished:
            return
        if output.error is not None:
            self.fail(f"{slot.title}: {output.error}")
            return
        slot.completion = completion
        if completion.finish_reason == "abort":
            self.fail(f"{slot.title}: aborted after {len(completion.token_ids)} tokens")
            return
        self._tokens.take_output(completion)
        try:
            slot.value = slot.part.value(completion)
        except ValueError as error:
            slot.problem = str(error)
        self._finish(slot)

    def _start_select(self, slot: Slot) -> None:
        self._tokens.hold_back()
        before, endings = self._tokens.endings(slot.part.choices, slot.is_trusted)
        alone, start_id = [], None
        if slot.part.method == "unconditional":
            tokenizer = self.llm.tokenizer
            alone = [tokenizer.encode(choice, add_special_tokens=False) for choice in slot.part.choices]
            start_id = next((i for i in (tokenizer.bos_token_id, *tokenizer.eos_token_ids) if i is not None), None)
        self._driver.select(self, Selection(slot.part, self._tokens.closed_ids, before, endings, alone, start_id), slot)

    def is_waiting_for(self, slot: Slot) -> bool:
        """True while this part is being generated or chosen."""
        return self._running is slot

    def take_choice(self, slot: Slot, selection: Selection) -> None:
        """Goes on with the choice that a finished selection made."""
        if self._running is not slot:
            return
        index = selection.best
        slot.value = slot.text = slot.part.choices[index]
        slot.scores = dict(zip(slot.part.choices, selection.scores))
        slot.choice_logprobs = dict(zip(slot.part.choices, selection.sums))
        self._driver.show(self, slot.part.name, slot.text)
        self._tokens.take_ending(selection.endings[index])
        self._finish(slot)

    def _finish(self, slot: Slot) -> None:
        slot.is_done = True
        self._running = None
        self._advance()
        self._note()

    def fail(self, reason: str) -> None:
        """Ends the state: what it waits for never comes."""
        self.error = self.error or reason
        for slot in (self._running, *self._queue):
            if isinstance(slot, Slot):
                slot.is_done, slot.problem = True, reason
        self._running = None
        self._queue.clear()
        self._note()

    def _note(self) -> None:
        if self._running is None:
            self.family.discard(self)
        self._driver.note(self)

    @property
    def is_idle(self) -> bool:
        """Nothing is being generated and nothing waits."""
        return self._running is None

    # -- waiting

    def _settle(self) -> None:
        self._driver.wait(self, lambda: self.is_idle)
        self._check_alive()

    def _slot(self, name: str) -> Slot:
        if name not in self._slots:
            where = "it was gathered from forks" if name in self._gathered else f"there are {sorted(self._slots)}"
            raise KeyError(f"no part named {name!r}: {where}")
        slot = self._slots[name]
        self._driver.wait(self, lambda: slot.is_done)
        return slot

    def _check_alive(self) -> None:
        if self.error is not None:
            raise ProgramError(self.error, self) from self.cause

    def _twin(self) -> State:
        twin = State(self._driver, self.family)
        twin._tokens = self._tokens.copy()
        twin._written, twin._slots = list(self._written), dict(self._slots)
        twin._gathered = dict(self._gathered)
        twin._roles, twin._blocks = self._roles, list(self._blocks)
        twin._in_block = twin._is_block_inherited = self._in_block
        twin._needs_closing = self._needs_closing
        return twin
