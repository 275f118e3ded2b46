"""Text of one running request: decodes token by token, finds stop texts, holds back what is not certain yet.

Not certain are the bytes of an unfinished character and an end that may begin a stop text. Ids that end a request are
the scheduler's matter, not this module's.
"""
from __future__ import annotations

from collections.abc import Sequence

from jradix.tokenizer import Tokenizer

WINDOW_IDS = 16
# Kept when the window moves: an unfinished character has at most 3 bytes, so it lies inside them.
CONTEXT_IDS = 4
REPLACEMENT = "\ufffd"
# A special token inside a stop text, as one character that decoded text never holds (a lone surrogate).
FIRST_MARK, LAST_MARK = 0xD800, 0xDFFF


class IncrementalDetokenizer:
    """Turns the ids of one request into text as they come.

    Invariant: the deltas so far, the text held back and the undecoded tail of ids together are the text of all ids up
    to the stop. Each id costs one decode of at most about `WINDOW_IDS` ids, however long the output is. Without stop
    texts nothing is decoded before `delta`, `text` or `finish` asks for it.
    """
    __slots__ = ("_tokenizer", "_skip", "_include_stop", "_min_tokens", "_stops", "_marks", "_ids", "_window",
                 "_num_read", "_num_emitted", "_pieces", "_num_delivered", "_held", "_stop", "_is_finished",
                 "num_tokens_used")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, stop: Sequence[str] = (),
                 include_stop: bool = False, min_tokens: int = 0) -> None:
        """Starts with no text.

        Args:
          tokenizer: decodes the ids.
          skip_special_tokens: leave special tokens out of the text. A stop text may spell one all the same.
          stop: non-empty texts that end the output.
          include_stop: keep the stop text (of special tokens in it, only with skip_special_tokens=False).
          min_tokens: a stop text completed before this many ids is passed over.

        Raises:
          ValueError: an empty stop text.
        """
        if isinstance(stop, str) or any(not text for text in stop):
            raise ValueError(f"stop={stop!r}: expected a sequence of non-empty strings")
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._num_read = 0  # ids[:num_read] went through the window
        self._window: list[int] = []
        self._num_emitted = 0  # characters of the window's text that left it
        self._pieces: list[str] = []  # text no stop text can reach any more
        self._num_delivered = 0  # pieces that a delta returned
        self._held = ""  # text that may begin a stop text
        self._stop: str | None = None
        self._is_finished = False
        self.num_tokens_used = 0
        self._marks: dict[int, str] = {}
        self._stops: list[tuple[str, str]] = [(text, text) for text in stop]
        if skip_special_tokens and stop:
            self._stops += self._stops_with_marks(stop)

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Takes newly sampled ids; returns the stop text that ended the output, or None.

        The text that is complete first ends it, whatever the tokens' borders; of those complete at the same character
        the longest. Ids after it are not used: `num_tokens_used` counts all that were, over all calls.

        Raises:
          ValueError: the output has ended already.
        """
        if self._stop is not None or self._is_finished:
            raise ValueError(f"push after the end of the output (stop={self._stop!r}); make a detokenizer per request")
        if not self._stops:
            self._ids.extend(token_ids)
            self.num_tokens_used = len(self._ids)
            return None
        for token_id in token_ids:
            self._ids.append(token_id)
            self.num_tokens_used = len(self._ids)
            self._read_pending()
            if self._stop is not None:
                return self._stop
        return None

    def delta(self) -> str:
        """Text that became certain since the last call: whole characters, no part of a stop text."""
        if not self._is_finished:
            self._read_pending()
        new = "".join(self._pieces[self._num_delivered:])
        self._num_delivered = len(self._pieces)
        return new

    def finish(self) -> str:
        """Ends the output; returns everything not delivered yet, what was held back included."""
        if not self._is_finished and self._stop is None:
            if self._num_read == 0 and not self._stops:
                self._pieces.append(self._tokenizer.decode(self._ids, skip_special_tokens=self._skip))
            else:
                self._read_pending()
                self._held += self._tokenizer.decode(self._window, skip_special_tokens=False)[self._num_emitted:]
                self._release(len(self._held))
        self._is_finished = True
        return self.delta()

    @property
    def text(self) -> str:
        """All text so far, up to the stop text; complete after a stop or `finish`."""
        if not self._is_finished:
            self._read_pending()
        return "".join(self._pieces) + self._visible(self._held)

    def _read_pending(self) -> None:
        """Decodes the ids that were not read yet and settles the characters they complete."""
        if self._num_read == len(self._ids) or self._stop is not None:
            return
        new = self._ids[self._num_read:]
        self._num_read = len(self._ids)
        special, limit = self._tokenizer.special_ids, self._tokenizer.vocab_size
        # Skipped and unknown ids have no bytes: left out, so that the window's last ids are the last bytes.
        self._window += [i for i in new if i < limit and not (self._skip and i in special)]
        decoded = self._tokenizer.decode(self._window, skip_special_tokens=False)
        # One U+FFFD at the end may be a character whose other bytes are still to come.
        end = max(len(decoded) - decoded.endswith(REPLACEMENT), self._num_emitted)
        settled, self._num_emitted = decoded[self._num_emitted:end], end
        for i in new if self._marks else ():
            settled += self._marks.get(i, "")
        if len(self._window) >= WINDOW_IDS:
            self._move_window(decoded)
        self._settle(settled)

    def _move_window(self, decoded: str) -> None:
        """Drops old ids where the text of the rest is unchanged, that is, not inside a character."""
        for cut in range(len(self._window) - CONTEXT_IDS, len(self._window) - 2 * CONTEXT_IDS, -1):
            rest = self._tokenizer.decode(self._window[cut:], skip_special_tokens=False)
            if rest and decoded.endswith(rest):
                self._num_emitted = len(rest) - (len(decoded) - self._num_emitted)
                del self._window[:cut]
                return

    def _settle(self, new: str) -> None:
        """Appends decoded text and looks for stop texts that end inside it."""
        if not new:
            return
        if not self._stops:
            self._pieces.append(new)
            return
        num_old = len(self._held)
        self._held += new
        if len(self._ids) >= self._min_tokens:
            found = [(at + len(text), -len(text), at, given) for text, given in self._stops
                     if (at := self._held.find(text, max(0, num_old + 1 - len(text)))) >= 0]
            if found:
                end, _, start, self._stop = min(found)
                self._held = self._held[:end if self._include_stop else start]
                self._release(len(self._held))
                return
        self._release(len(self._held) - max(_overlap(self._held, text) for text, _ in self._stops))

    def _release(self, num_characters: int) -> None:
        visible = self._visible(self._held[:num_characters])
        if visible:
            self._pieces.append(visible)
        self._held = self._held[num_characters:]

    def _visible(self, text: str) -> str:
        return text.translate(dict.fromkeys(map(ord, self._marks.values()))) if self._marks else text

    def _stops_with_marks(self, stop: Sequence[str]) -> list[tuple[str, str]]:
        """Spellings of the stop texts with a mark for each special token in them, and the text as given."""
        special = self._tokenizer.special_tokens
        spelled = sorted((t for t in special if any(t in text for text in stop)), key=len, reverse=True)
        self._marks = {special[t]: chr(FIRST_MARK + n) for n, t in enumerate(spelled[:LAST_MARK - FIRST_MARK])}
        stops = []
        for text in stop:
            marked = text
            for token in spelled[:len(self._marks)]:
                marked = marked.replace(token, self._marks[special[token]])
            if marked != text:
                stops.append((marked, text))
        return stops


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` and is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
