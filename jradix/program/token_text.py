"""A program's text as tokens, each encoded once and outputs never again.

    runs: encoded, those of outputs as they were sampled | open text, encoded together with what follows it

Open text is encoded when a part is generated or chosen after it, as one text, so that its tokens are those of the same
text in one piece.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from itertools import groupby

import numpy as np

from jradix.outputs import CompletionOutput
from jradix.tokenizer import Tokenizer

Text = tuple[str, bool]      # text, and whether special tokens spelled in it are meant


class _Run:
    """Tokens that are shared by all copies and never change; encoded at the first look."""

    def __init__(self, make: Callable[[], Sequence[int]]):
        self._make = make

    @cached_property
    def ids(self) -> np.ndarray:
        return np.asarray(self._make(), np.int32)


class TokenText:
    """The tokens of a text.

    Args:
      tokenizer: of the model.
      end_ids: end tokens of the model; one that ended an output is not part of the text.

    Attributes:
      has_own_start: the text brings its special tokens for the start itself, as chat templates do.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]):
        self.has_own_start = False
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._runs: tuple[_Run, ...] = ()
        self._open: list[Text] = []

    def copy(self) -> TokenText:
        """A text of its own that goes on from here; costs nothing per token."""
        twin = TokenText(self._tokenizer, self._end_ids)
        twin.has_own_start, twin._runs, twin._open = self.has_own_start, self._runs, list(self._open)
        return twin

    def write(self, text: str, is_trusted: bool) -> None:
        """Adds to the open text."""
        self._open.append((text, is_trusted))

    def close(self) -> None:
        """Ends the open text: what follows is encoded apart from it."""
        if self._open:
            self._add_run(self._open)
            self._open = []

    def hold_back(self) -> None:
        """Leaves open only the last word, with which a text that follows may share a token."""
        parts = [("".join(text for text, _ in run), is_trusted)
                 for is_trusted, run in groupby(self._open, key=lambda part: part[1])]
        kept: list[Text] = []
        while parts:
            text, is_trusted = parts.pop()
            cut = _last_word(text)
            kept.insert(0, (text[cut:], is_trusted))
            if cut:
                self._add_run([*parts, (text[:cut], is_trusted)])
                break
        self._open = kept

    @property
    def ids(self) -> np.ndarray:
        """int32[n], all tokens."""
        open_ids = self._encode(self._open, not self._runs) if self._open else []
        return np.concatenate([self.closed_ids, np.asarray(open_ids, np.int32)])

    @property
    def closed_ids(self) -> np.ndarray:
        """int32[n], without the open text."""
        return np.concatenate([np.zeros(0, np.int32), *(run.ids for run in self._runs)])

    def endings(self, texts: Sequence[str], is_trusted: bool) -> tuple[list[int], list[list[int]]]:
        """Tokens of the open text, and those of the open text with each of the texts after it."""
        open_ids = self._encode(self._open, not self._runs) if self._open else []
        return open_ids, [self._encode([*self._open, (text, is_trusted)], not self._runs) for text in texts]

    def take_ending(self, ids: Sequence[int]) -> None:
        """Goes on with one of the `endings`."""
        self._open = []
        self.append_ids(ids)

    def append_ids(self, ids: Sequence[int]) -> None:
        """Goes on with tokens as they are; what is open is closed before."""
        self.close()
        self._runs += (_Run(lambda: ids),)

    def take_output(self, completion: CompletionOutput) -> None:
        """Goes on with an output: its tokens without the end token, or up to a stop text, which may begin in one."""
        ids = completion.token_ids
        if completion.finish_reason != "stop":
            self.append_ids(ids)
        elif not isinstance(completion.stop_reason, str):
            is_end = ids and (ids[-1] == completion.stop_reason or ids[-1] in self._end_ids)
            self.append_ids(ids[:-1] if is_end else ids)
        else:
            num = len(ids)
            while not completion.text.startswith(text := self._tokenizer.decode(ids[:num])):
                num -= 1
            self.append_ids(ids[:num])
            if len(text) < len(completion.text):
                self.write(completion.text[len(text):], False)

    def _add_run(self, parts: list[Text]) -> None:
        parts, is_first = list(parts), not self._runs
        self._runs += (_Run(lambda: self._encode(parts, is_first)),)

    def _encode(self, parts: Sequence[Text], is_first: bool) -> list[int]:
        return self._tokenizer.encode_parts(parts, add_special_tokens=is_first and not self.has_own_start,
                                            is_continuation=not is_first)


def _last_word(text: str) -> int:
    """Where the last word begins, with the white space around it."""
    words = text.rstrip()
    word = words.rsplit(None, 1)[-1] if words else ""
    return len(words[:len(words) - len(word)].rstrip())
