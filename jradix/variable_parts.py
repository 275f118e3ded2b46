"""Variable parts in front of shared text (a date, a request id), found by aligning prompts; and what moving them gains.

Two prompts that part early, differ in a short stretch and then agree again for long could share that agreement, were
the stretch behind it. Nothing here knows what a prompt says: kinds such as "date" only name what was found.

Cost: at most `MAX_PAIRS` alignments a round, whatever the number of prompts, and one pass over the prompts for what
they found; at most `MAX_ROUNDS` rounds. Memory: as much again as the prompts take.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jradix.sched.order import depth_first_order, shared_length, shared_lengths

SHARED_TOKENS = 32       # agreement that counts as shared text again
GAP_TOKENS = 96          # longest variable part
CONTEXT_TOKENS = 24      # looked at on each side for the rest of a date or id
MAX_PAIRS = 12_000
MAX_PLACES = 256
MAX_ROUNDS = 6

_MONTH = (r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|"
          r"Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b\.?")
_FULL_WEEKDAY = "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_WEEKDAY = rf"(?:{_FULL_WEEKDAY}|Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_DATE = (rf"(?:{_WEEKDAY},? )?(?:\d{{4}}[-/.]{_DAY}[-/.]{_DAY}|{_DAY}[-/.]{_DAY}[-/.](?:\d{{4}}|\d\d)|"
         rf"{_DAY}(?:st|nd|rd|th)? {_MONTH}(?:,? \d{{4}})?|{_MONTH} {_DAY}(?:st|nd|rd|th)?(?:,? \d{{4}})?)(?!\.?\d)")
_TIME = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?(?: ?(?:Z\b|UTC|GMT|CES?T|[+-]\d\d:?\d\d))?"
# the first that matches at a place counts, so the more specific ones stand first
KINDS = re.compile(
    r"(?P<uuid>\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b)"
    rf"|(?P<timestamp>(?<!\w){_DATE}(?:T|,? (?:at )?){_TIME}|\b1\d{{9}}(?:\d{{3}})?(?:\.\d+)?\b)"
    rf"|(?P<date>(?<!\w){_DATE}|\b{_FULL_WEEKDAY}\b)|(?P<time>(?<![\d:]){_TIME})"
    r"|(?P<id>(?<![\w-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]+)|(?P<number>#?(?<!\d)\d+(?:[.,]\d+)*)")


class TokenTexts(Protocol):
    """Tokens as text."""

    def token_text(self, token_id: int) -> str: ...

    def text(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class VariablePart:
    """One place where prompts vary in front of text they share.

    Attributes:
      kind: timestamp, date, time, uuid, id, number, text (any other), or several of them joined by "and".
      num_prompts: prompts that have such a part there.
      num_lost_tokens: prompt tokens that would be reused, were the part behind the shared text.
      examples: two prompts (by index) and what stands there; the text may be empty.
      followed_by: how the shared text begins.
    """
    kind: str
    num_prompts: int
    num_lost_tokens: int
    examples: tuple[tuple[int, str], tuple[int, str]]
    followed_by: str


@dataclass(frozen=True, slots=True)
class Sharing:
    """What each prompt shares with those before it when they run in depth-first order.

    Attributes:
      order: indices of the prompts.
      shared: int64[n], by place in that order.
      num_tokens: of all prompts.
      num_computed: tokens that even an unlimited cache has to compute. A prompt that is known from end to end still
        costs its last token, whose logits are needed.
    """
    order: list[int]
    shared: np.ndarray
    num_tokens: int
    num_computed: int

    @classmethod
    def of(cls, prompts: Sequence[np.ndarray]) -> Sharing:
        order = depth_first_order(prompts)
        shared = shared_lengths(prompts, order)
        lengths = np.array([len(prompts[i]) for i in order], np.int64)
        return cls(order, shared, int(lengths.sum()), int(np.maximum(lengths - shared, np.minimum(lengths, 1)).sum()))

    def by_prompt(self) -> np.ndarray:
        found = np.zeros_like(self.shared)
        found[self.order] = self.shared
        return found


@dataclass(slots=True)
class _Place:
    """Where a part begins, in which prompts, and the text that may follow it (its first tokens as bytes)."""
    start: int
    first: int          # the prompts order[first:stop] agree up to `start`
    stop: int
    followers: set[bytes] = field(default_factory=set)
    num_pairs: int = 0
    ends: dict[int, int] = field(default_factory=dict)      # prompt -> where its part ends


@dataclass(slots=True)
class _Prompts:
    """Prompts without their variable parts, and the parts of each, joined."""
    kept: list[np.ndarray]
    parts: dict[int, np.ndarray]

    def without(self, places: Sequence[_Place]) -> _Prompts:
        kept, parts = list(self.kept), dict(self.parts)
        for place in places:
            for i, end in place.ends.items():
                tokens = kept[i]
                if end > place.start:
                    part = tokens[place.start:end]
                    kept[i] = np.concatenate([tokens[:place.start], tokens[end:]])
                    parts[i] = np.concatenate([parts[i], part]) if i in parts else part
        return _Prompts(kept, parts)

    def rebuilt(self) -> list[np.ndarray]:
        """The prompts with their parts at the end of what they share with prompts that have other parts."""
        sharing = Sharing.of(self.kept)
        order, shared = sharing.order, sharing.shared.tolist()
        keys = [self.parts[i].tobytes() if i in self.parts else b"" for i in order]
        before, after = [0] * len(order), [0] * len(order)
        for k in range(1, len(order)):
            before[k] = min(before[k - 1], shared[k]) if keys[k - 1] == keys[k] else shared[k]
        for k in range(len(order) - 2, -1, -1):
            after[k] = min(after[k + 1], shared[k + 1]) if keys[k + 1] == keys[k] else shared[k + 1]
        found = list(self.kept)
        for k, i in enumerate(order):
            if i in self.parts:
                end = max(before[k], after[k])
                found[i] = np.concatenate([found[i][:end], self.parts[i], found[i][end:]])
        return found


def find_variable_parts(prompts: Sequence[np.ndarray], texts: TokenTexts
                        ) -> tuple[list[VariablePart], Sharing]:
    """Variable parts in front of shared text, the most costly first, and the sharing after all of them moved behind it.

    Args:
      prompts: int32 token ids.
      texts: what the tokens say.
    """
    now = _Prompts(list(prompts), {})
    sharing = Sharing.of(now.kept)
    found: list[VariablePart] = []
    refused: set[bytes] = set()       # prefixes whose place gained nothing; their prompts may gain at another
    for _ in range(MAX_ROUNDS):
        places = _places(now.kept, Sharing.of(now.kept) if now.parts else sharing, texts, refused)
        if not places:
            break
        gained = Sharing.of(now.without(places).rebuilt()).by_prompt() - sharing.by_prompt()
        worth = []
        for place in places:
            gain = int(gained[list(place.ends)].sum())
            if gain >= SHARED_TOKENS:
                worth.append(place)
                found.append(_described(now.kept, place, gain, texts))
            else:
                refused.add(_prefix(now.kept, place))
        if worth:
            now = now.without(worth)
            sharing = Sharing.of(now.rebuilt())
    return sorted(found, key=lambda part: -part.num_lost_tokens), sharing


def _places(prompts: list[np.ndarray], sharing: Sharing, texts: TokenTexts, refused: set[bytes]
            ) -> list[_Place]:
    """Places at which at least two prompts have different parts; no prompt is in two of them."""
    position = {i: k for k, i in enumerate(sharing.order)}
    bounds: dict[int, np.ndarray] = {}
    places: dict[tuple[int, int], _Place] = {}
    for left, right in _pairs(prompts, sharing):
        aligned = _aligned(prompts[left], prompts[right], texts)
        if aligned is None:
            continue
        start, end = aligned
        if start not in bounds:
            bounds[start] = np.append(np.flatnonzero(sharing.shared < start) if start else 0, len(sharing.order))
        group = int(np.searchsorted(bounds[start], position[left], "right"))
        first, stop = int(bounds[start][group - 1]), int(bounds[start][group])
        place = places.setdefault((start, first), _Place(start, first, stop))
        place.followers.add(prompts[left][end:end + SHARED_TOKENS].tobytes())
        place.num_pairs += 1
    most_seen = sorted(places.values(), key=lambda place: -place.num_pairs)[:MAX_PLACES]
    taken: set[int] = set()
    found = []
    for place in sorted(most_seen, key=lambda place: (place.start, place.first)):
        if prompts[sharing.order[place.first]][:place.start].tobytes() in refused:
            continue
        _fill(place, prompts, sharing.order, taken)
        if len({prompts[i][place.start:end].tobytes() for i, end in place.ends.items()}) > 1:
            taken.update(place.ends)
            found.append(place)
    return found


def _prefix(prompts: list[np.ndarray], place: _Place) -> bytes:
    return prompts[next(iter(place.ends))][:place.start].tobytes()


def _fill(place: _Place, prompts: list[np.ndarray], order: list[int], taken: set[int]) -> None:
    first_tokens = {int(np.frombuffer(follower, np.int32, 1)[0]) for follower in place.followers}
    for i in order[place.first:place.stop]:
        if i in taken:
            continue
        tokens = prompts[i]
        nearby = tokens[place.start:place.start + GAP_TOKENS + CONTEXT_TOKENS].tolist()
        # the last one: where some parts end alike, alignments of those found the shared text too early
        for k in range(len(nearby) - 1, -1, -1):
            if nearby[k] in first_tokens:
                end = place.start + k
                if tokens[end:end + SHARED_TOKENS].tobytes() in place.followers:
                    place.ends[i] = end
                    break


def _pairs(prompts: list[np.ndarray], sharing: Sharing) -> list[tuple[int, int]]:
    """Prompts to align: neighbours in depth-first order, and those that look alike soon after they part from others.

    Neighbours alone are not enough: behind dates that are all different, a neighbour has any of the shared texts. So
    each prompt is also named by the smallest hashes among the windows of its tokens from where it parts, and prompts
    of one name are paired.
    """
    step = -(-3 * len(sharing.order) // MAX_PAIRS)
    pairs = [(sharing.order[k - 1], sharing.order[k]) for k in range(1, len(sharing.order), max(step, 1))]
    weights = np.random.default_rng(0).integers(0, 2**63, SHARED_TOKENS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    names: tuple[list[tuple[int, int]], ...] = ([], [])
    for k in range(0, len(sharing.order), max(step, 1)):
        i, start = sharing.order[k], int(sharing.shared[k])
        nearby = prompts[i][start:start + 2 * GAP_TOKENS + SHARED_TOKENS].astype(np.uint64)
        if len(nearby) >= SHARED_TOKENS:
            hashes = np.lib.stride_tricks.sliding_window_view(nearby, SHARED_TOKENS) @ weights
            names[0].append((int(hashes.min()), i))
            names[1].append((int((hashes * weights[0]).min()), i))
    for named in names:
        named.sort()
        pairs += [(a, b) for (name, a), (other, b) in zip(named, named[1:]) if name == other]
    return list(dict.fromkeys((min(pair), max(pair)) for pair in pairs))


def _aligned(left: np.ndarray, right: np.ndarray, texts: TokenTexts) -> tuple[int, int] | None:
    """(start, end in `left`) of the stretch in which two prompts differ before they agree for long; None: none."""
    start = shared_length(left, right)
    rest, other = (p[start:start + GAP_TOKENS + SHARED_TOKENS].astype(np.int32).tobytes() for p in (left, right))
    width = 4 * SHARED_TOKENS
    windows: dict[bytes, int] = {}
    for i in range(0, len(rest) - width + 1, 4):
        windows.setdefault(rest[i:i + width], i // 4)
    best: tuple[int, int, int] | None = None
    for j in range(max((len(other) - width) // 4 + 1, 0)):
        if best is not None and j >= best[0]:
            break
        i = windows.get(other[4 * j:4 * j + width])
        if i is not None and (best is None or i + j < best[0]):
            best = i + j, i, j
    if best is None:
        return None
    ends = start + best[1], start + best[2]
    widened = [_widened(p, start, end, texts) for p, end in zip((left, right), ends)]
    begin, extra = min(w[0] for w in widened), max(w[1] for w in widened)
    if shared_length(left[ends[0] + SHARED_TOKENS:], right[ends[1] + SHARED_TOKENS:]) < extra:
        return None
    return begin, ends[0] + extra


def _widened(tokens: np.ndarray, start: int, end: int, texts: TokenTexts) -> tuple[int, int]:
    """The start and the number of tokens after `end` that make the stretch hold whole words, dates and ids."""
    low = max(start - CONTEXT_TOKENS, 0)
    pieces = [texts.token_text(token) for token in tokens[low:end + CONTEXT_TOKENS].tolist()]
    edges = np.cumsum([0, *map(len, pieces)])
    text = "".join(pieces)
    first, last = inner = int(edges[start - low]), int(edges[end - low])
    for match in KINDS.finditer(text):
        touches = match.start() <= inner[1] and match.end() >= inner[0] if start == end else (
            match.start() < inner[1] and match.end() > inner[0])
        if touches:
            first, last = min(first, match.start()), max(last, match.end())
    while 0 < first < len(text) and text[first - 1].isalnum() and text[first].isalnum():
        first -= 1
    while 0 < last < len(text) and text[last - 1].isalnum() and text[last].isalnum():
        last += 1
    begin = low + int(np.searchsorted(edges, first, "right")) - 1
    return min(begin, start), max(low + int(np.searchsorted(edges, last, "left")) - end, 0)


def _described(prompts: list[np.ndarray], place: _Place, gain: int, texts: TokenTexts) -> VariablePart:
    parts = {i: prompts[i][place.start:place.ends[i]] for i in sorted(place.ends)}
    first = min(i for i, part in parts.items() if len(part))
    other = min(i for i, part in parts.items() if not np.array_equal(part, parts[first]))
    shown = (first, texts.text(parts[first].tolist())), (other, texts.text(parts[other].tolist()))
    end = place.ends[first]
    return VariablePart(kind_of(shown[0][1], shown[1][1]), sum(len(part) > 0 for part in parts.values()), gain, shown,
                        texts.text(prompts[first][end:end + SHARED_TOKENS].tolist()))


def kind_of(left: str, right: str) -> str:
    """What makes two texts differ: kinds of dates, ids and the like, and "text" where those do not explain it all."""
    found = [{match[0]: match.lastgroup for match in KINDS.finditer(text)} for text in (left, right)]
    kinds = dict.fromkeys(kind for ours, others in (found, found[::-1]) for text, kind in ours.items()
                          if text not in others)
    rests = [KINDS.sub("", text).split() for text in (left, right)]
    if left.strip() and right.strip():
        is_explained = rests[0] == rests[1]
    else:        # a part that some prompts lack: the words around a date are not text of their own kind
        is_explained = not re.search(r"\w", " ".join(rests[0] + rests[1]))
    return " and ".join([*kinds] if kinds and is_explained else ["text", *kinds])
