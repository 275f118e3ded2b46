"""Forced tokens: where the next text is certain and its canonical tokenisation too, the one token that begins it.

Text is certain in a state with one byte to go on with; such states form stretches. What tokens spell a stretch depends
on the text before it and after it, so the stretch is encoded behind each of several texts that may precede it and
before what may follow, and only token borders found every time count. This rests on a property of BPE: where a
canonical tokenisation has a border, the tokens on either side are those of either side alone.

The mask of a state with a forced token allows that token alone, so that jumping over the stretch and sampling it give
the same tokens; no text is lost, since the token spells what must come anyway.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jradix.grammar.dfa import Dfa
from jradix.grammar.vocabulary import Vocabulary

WINDOW_BYTES = 4096     # of a stretch that are encoded at once; longer ones take several windows
MARGIN_BYTES = 256      # at the end of a window that is not the end of the stretch: its borders are not settled
TAIL_BYTES = 48         # that decide how the end of a stretch joins what follows
ALONE_BYTES = 64        # encoded from a state where no tokenisation has a border
CONTEXT_BYTES = 16      # of text before a stretch
MAX_CONTEXTS = 6
MAX_CONTINUATIONS = 8   # texts tried after a stretch, one per kind of character
MAX_CROSSINGS = 48      # tokens tried at one border before it counts as possible
NO_VOTE, CONFLICT = -1, -2
# One byte of each kind that a tokenizer's splitting rules tell apart
PROBES = tuple(b"a0. Z\"-_\n,s{") + (0xC3, 0xE4, 0xF0, 0x80)
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))


class Stretch(NamedTuple):
    """Text that must come next: `states[i]` is the state before text[i]; `end` the state after it.

    is_whole: False where the text was cut at the window. A character whose last bytes are free is left out at the end.
    """
    text: bytes
    states: list[int]
    end: int
    is_whole: bool


class Following(NamedTuple):
    """What may come after a stretch: short texts, and by position in it the tokens that run over its end."""
    texts: tuple[bytes, ...]
    over: tuple[tuple[int, tuple[bytes, ...]], ...]


def canonical_forced_tokens(dfa: Dfa, vocabulary: Vocabulary) -> np.ndarray:
    """int32[Q]: the token that every canonical continuation begins with, -1 where there is no such token.

    Cost: about 10 us for each tokenisation, a few dozen of them for each stretch.
    """
    if vocabulary.encode is None:
        return np.full(dfa.num_states, -1, np.int32)
    return _Forcing(dfa, vocabulary).run()


class _Forcing:
    """One search. `votes[q]` is the token that all borders seen at q so far begin with."""

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.next_state = np.asarray(dfa.next_state)
        self.byte_class = np.asarray(dfa.byte_class)
        self.members = [np.flatnonzero(self.byte_class == c).tolist() for c in range(dfa.num_classes)]
        # Bytes of each class to try: one of each kind
        self.samples = [[b for b in PROBES if self.byte_class[b] == c] or bytes_of[:1]
                        for c, bytes_of in enumerate(self.members)]
        self.accepting = np.asarray(dfa.accepting)
        alive = self.next_state >= 0
        self.is_last = self.accepting & ~alive.any(axis=1)
        class_sizes = np.array([len(bytes_of) for bytes_of in self.members])
        self.is_forced = (alive @ class_sizes == 1) & ~self.accepting
        step = alive.argmax(axis=1)
        self.forced_byte = np.array([bytes_of[0] if bytes_of else 0 for bytes_of in self.members])[step]
        self.forced_next = self.next_state[np.arange(len(step)), step]
        # The three as lists, which are quicker to walk along
        self.forced_way = self.is_forced.tolist(), self.forced_byte.tolist(), self.forced_next.tolist()
        sources, classes = np.nonzero(alive)
        targets = self.next_state[sources, classes]
        order = np.argsort(targets, kind="stable")
        self.in_sources, self.in_classes = sources[order], classes[order]
        self.in_starts = np.searchsorted(targets[order], np.arange(len(step) + 1))
        self.text_before: dict[int, bytes] = {}
        self.in_edges_of: dict[int, list[tuple[int, int]]] = {}
        self.votes = np.full(dfa.num_states, NO_VOTE, np.int64)
        self.encoded: dict[bytes, dict[int, int] | None] = {}
        self.tokens_over: dict[tuple[int, bytes], tuple[bytes, ...]] = {}
        self.continuations_of: dict[int, tuple[bytes, ...]] = {}
        self.borders_of: dict[tuple[bytes, bytes], dict[int, int] | None] = {}
        self.following_of: dict[tuple[int, bytes], tuple[int, Following]] = {}      # by end and text of a stretch
        self.numbered: dict[Following, tuple[int, Following]] = {}
        self.kept_of: dict[tuple[int, bytes], int] = {}
        # A tokenizer that puts a space before every text gets a line break to put it before.
        self.lead = "" if self._bytes_of(vocabulary.encode("a")) == b"a" else "\n"

    def run(self) -> np.ndarray:
        in_counts = np.diff(self.in_starts)
        from_stretch = np.zeros(len(self.is_forced), np.int64)
        np.add.at(from_stretch, self.forced_next[self.is_forced], 1)
        is_entry = self.is_forced & ((in_counts != 1) | (from_stretch != 1))
        is_entry[0] = self.is_forced[0]
        pending = np.flatnonzero(is_entry).tolist()
        seen = set(pending)
        alone: dict[int, int] = {}
        while pending:
            stretch = self._stretch(pending.pop())
            if not stretch.is_whole:
                further = stretch.states[WINDOW_BYTES - MARGIN_BYTES]
                if further not in seen:
                    seen.add(further)
                    pending.append(further)
            if stretch.text:
                self._vote(stretch, alone)
        forced = np.where(self.votes >= 0, self.votes, -1).astype(np.int32)
        for state, token in alone.items():
            if self.votes[state] == NO_VOTE:
                forced[state] = token
        return forced

    def _stretch(self, state: int) -> Stretch:
        text, states = bytearray(), []
        is_forced, forced_byte, forced_next = self.forced_way
        while is_forced[state] and len(text) < WINDOW_BYTES:
            states.append(state)
            text.append(forced_byte[state])
            state = forced_next[state]
        is_whole = not is_forced[state]
        if num_cut := _num_begun(text):
            state = states[-num_cut]
            del text[-num_cut:], states[-num_cut:]
        return Stretch(bytes(text), states, state, is_whole)

    def _vote(self, stretch: Stretch, alone: dict[int, int]) -> None:
        """Votes for the states of `stretch`; `alone` gets tokens for states where no tokenisation has a border."""
        seen: set[int] = set()
        settled = len(stretch.text)
        for context in self._contexts(stretch.states[0]):
            borders = self._borders(context, stretch.text)
            if borders is None:
                continue
            kept = self._num_settled(stretch, context, borders)
            settled = min(settled, kept)
            seen.update(borders)
            ends = sorted(borders)
            for at, end in zip(ends, ends[1:]):
                state = stretch.states[at]
                if end > kept or self.votes[state] not in (NO_VOTE, borders[at]):
                    self.votes[state] = CONFLICT
                else:
                    self.votes[state] = borders[at]
        for at, state in enumerate(stretch.states):
            if at in seen or state in alone or self.votes[state] != NO_VOTE:
                continue
            # Tokens the model chose against the canon: the next one leads back to a border of it.
            borders = self._borders(b"", stretch.text[at:at + ALONE_BYTES])
            if borders and 0 in borders and (end := at + sorted(borders)[1]) in seen and end <= settled:
                alone[state] = borders[0]

    def _num_settled(self, stretch: Stretch, context: bytes, borders: dict[int, int]) -> int:
        """Bytes of the stretch up to the last border that no continuation moves."""
        length = len(stretch.text)
        if self.is_last[stretch.end]:
            return length
        if not stretch.is_whole:
            limit = WINDOW_BYTES - MARGIN_BYTES
        else:
            number, following = self._following(stretch)
            key = (number, (context + stretch.text)[-TAIL_BYTES:])
            if key not in self.kept_of:
                self.kept_of[key] = length - self._last_common_border(stretch.text, context, borders, following)
            limit = length - self.kept_of[key]
        return max((end for end in borders if end <= limit), default=0)

    def _following(self, stretch: Stretch) -> tuple[int, Following]:
        """What may come after the stretch, as far as its tokens are concerned, and a number for it."""
        key = (stretch.end, stretch.text)
        if key not in self.following_of:
            over = []
            length = len(stretch.text)
            for at in range(length - 1, max(length - self.vocabulary.longest, -1), -1):
                tokens = self._running_over(stretch.end, stretch.text[at:])
                if tokens:
                    over.append((at, tokens))
            found = Following(self._continuations(stretch.end), tuple(over))
            self.following_of[key] = self.numbered.setdefault(found, (len(self.numbered), found))
        return self.following_of[key]

    def _last_common_border(self, text: bytes, context: bytes, base: dict[int, int], following: Following) -> int:
        # The end of the stretch may be the end of a token, or the end of the output: base stands for both.
        common = sorted(base)
        for after in following.texts:
            borders = self._borders(context, text + after)
            if borders is not None:
                common = _common_prefix(common, sorted(borders))
        for at, tokens in following.over:
            if not common or common[-1] == 0:
                break
            if (found := self._crossing(context, text, at, tokens)) is not None:
                common = _common_prefix(common, found)
        return common[-1] if common else 0

    def _crossing(self, context: bytes, text: bytes, at: int, tokens: tuple[bytes, ...]) -> list[int] | None:
        """Borders up to `at` if one of `tokens` can stand there, else None."""
        for num_tried, token in enumerate(tokens):
            borders = self._borders(context, text[:at] + token)
            if borders is None:
                # Part of a character: nothing to encode, so take it as possible.
                borders = self._borders(context, text[:at]) or {}
                return [end for end in sorted(borders) if end <= at]
            if at in borders or num_tried == MAX_CROSSINGS:
                return [end for end in sorted(borders) if end <= at]
        return None

    def _running_over(self, end_state: int, tail: bytes) -> tuple[bytes, ...]:
        """Tokens that begin with `tail`, the end of a stretch, and go on as `end_state` allows."""
        key = (end_state, tail)
        if key not in self.tokens_over:
            texts, after = self.vocabulary.longer_than(tail)
            alive = np.flatnonzero(self.next_state[end_state][self.byte_class[after]] >= 0) if texts else ()
            self.tokens_over[key] = tuple(texts[i] for i in alive
                                          if self._walk(end_state, texts[i][len(tail):]) >= 0)
        return self.tokens_over[key]

    def _borders(self, context: bytes, text: bytes) -> dict[int, int] | None:
        """Position in `text` of each token border, with the token that begins there (-1 at the end).

        Borders inside the context are left out. None: not whole characters, or the tokenizer changes the text.
        """
        key = context, text
        if key not in self.borders_of:
            whole = context + text
            if whole not in self.encoded:
                self.encoded[whole] = self._encode(whole)
            found = self.encoded[whole]
            self.borders_of[key] = None if found is None else {
                at - len(context): token for at, token in found.items() if at >= len(context)}
        return self.borders_of[key]

    def _encode(self, whole: bytes) -> dict[int, int] | None:
        try:
            text = whole.decode()
        except UnicodeDecodeError:
            return None
        ids = self.vocabulary.encode(self.lead + text)
        spelled = self._bytes_of(ids)
        if spelled is None or not spelled.endswith(whole):
            return None
        at = len(whole) - len(spelled)
        found = {}
        for token in ids:
            found[at] = token
            at += len(self.vocabulary.token_bytes[token])
        found[at] = -1
        return found

    def _bytes_of(self, ids: list[int]) -> bytes | None:
        texts = [self.vocabulary.token_bytes[i] if i < len(self.vocabulary.token_bytes) else None for i in ids]
        return None if None in texts else b"".join(texts)

    def _walk(self, state: int, data: bytes) -> int:
        for byte in data:
            state = int(self.next_state[state, self.byte_class[byte]])
            if state < 0:
                break
        return state

    def _continuations(self, state: int) -> tuple[bytes, ...]:
        """Short texts that may follow `state`, each a whole character of another kind."""
        if state in self.continuations_of:
            return self.continuations_of[state]
        found = []
        for byte in PROBES:
            target = int(self.next_state[state, self.byte_class[byte]])
            if target < 0 or byte == 0x80:
                continue
            text = bytearray([byte])
            for _ in range(0 if byte < 0x80 else 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3):
                choices = [b for b in range(0xBF, 0x7F, -1) if self.next_state[target, self.byte_class[b]] >= 0]
                if not choices:
                    break
                text.append(choices[len(choices) // 2])
                target = int(self.next_state[target, self.byte_class[text[-1]]])
            found.append(bytes(text))
        if not found:
            step = int((self.next_state[state] >= 0).argmax())
            found.append(bytes([self.members[step][0]]))
        self.continuations_of[state] = tuple(found[:MAX_CONTINUATIONS])
        return self.continuations_of[state]

    def _contexts(self, state: int) -> list[bytes]:
        """Texts that may precede `state`: the whole output so far where there is one, else several ends of it."""
        found, text, at = set(), b"", state
        while len(text) < CONTEXT_BYTES:
            edges = self._in_edges(at)
            if at == 0:
                found.add(text)
            if at == 0 or len(edges) > 1:
                num = min(len(edges), MAX_CONTEXTS)
                for source, byte in (edges[i * len(edges) // num] for i in range(num)):
                    found.add(self._text_before(source) + bytes([byte]) + text)
                break
            at, byte = edges[0]
            text = bytes([byte]) + text
        # What is left of a character whose beginning was cut off
        return sorted({text.lstrip(CONTINUATION_BYTES) for text in found or {text}})

    def _text_before(self, state: int) -> bytes:
        """One text that may precede `state`: from the start, or an end of it."""
        if state not in self.text_before:
            text, at = bytearray(), state
            while at != 0 and len(text) < CONTEXT_BYTES:
                edges = self._in_edges(at)
                at, byte = edges[7 * len(text) % len(edges)]
                text.append(byte)
            self.text_before[state] = bytes(reversed(text))
        return self.text_before[state]

    def _in_edges(self, state: int) -> list[tuple[int, int]]:
        """(state before, byte) of ways into `state`: one for each kind of byte, by byte."""
        if state not in self.in_edges_of:
            span = slice(self.in_starts[state], self.in_starts[state + 1])
            source_of: dict[int, int] = {}
            for source, step in zip(self.in_sources[span].tolist(), self.in_classes[span].tolist()):
                source_of.setdefault(step, source)
            edges = [(source, byte) for step, source in source_of.items() for byte in self.samples[step]]
            self.in_edges_of[state] = sorted(edges, key=lambda edge: edge[1])
        return self.in_edges_of[state]


def _common_prefix(left: list[int], right: list[int]) -> list[int]:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return left[:length]


def _num_begun(text: bytearray) -> int:
    """Bytes at the end of `text` that belong to a character without its end."""
    for num, byte in enumerate(reversed(text[-3:]), 1):
        if byte >= 0xC0:
            return num if num < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            break
    return 0
