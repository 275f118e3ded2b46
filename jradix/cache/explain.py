"""Why a prompt is cached as far as it is: how much is found, where it leaves what is known, why the rest is missing.

Reads the tree and changes nothing: no use is counted, no edge is split. What was evicted is known from the nodes that
the tree remembers without their KV; their number is bounded, so "never seen" means as far as the cache remembers.
"""
from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from os.path import commonprefix
from typing import NamedTuple

import numpy as np

from jradix.cache.node import Namespace, Node, Tier
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.radix_tree import RadixTree, common_prefix

Decode = Callable[[Sequence[int]], str]

NUM_SHOWN_TOKENS = 8       # shown of either side where two sequences part
NUM_CONTEXT_TOKENS = 6     # shown of what they share before it
NUM_LEAD_TOKENS = 24       # decoded before that and cut off again, so that no shown text begins inside a character
BROKEN = "\ufffd"          # what decoders put for bytes that make no whole character

NAMESPACE_WORDS = dict(model="model", weights_version="weights version", adapter="adapter", salt="cache_namespace")
# Apart for colour-blind eyes, and readable on light and dark ground.
DEVICE_COLOR, HOST_COLOR, EVICTED_COLOR = "#0072b2", "#d55e00", "#cc79a7"

_TOKEN_BYTES = 4


class MissReason(StrEnum):
    """Why the part of a prompt that is not cached is not."""
    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    OTHER_NAMESPACE = "other namespace"
    ROUNDED_DOWN = "rounded down"
    WHOLE_PROMPT_CACHED = "whole prompt cached"
    CACHING_OFF = "caching off"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which a prompt leaves every sequence that the cache knows.

    Attributes:
      position: index of that token in the prompt.
      our_tokens: the prompt's tokens from there on, the first few.
      their_tokens: those of the nearest known sequence; empty where it ends there.
      context: text that both share before it; None without a decoder, as are the next two.
      ours: text of `our_tokens` in whole characters, from the end of `context` on.
      theirs: text of `their_tokens`, likewise.
      is_evicted: the nearest known sequence is only remembered; its KV is gone.
      num_others: further known sequences that share all tokens before `position`.
    """
    position: int
    our_tokens: tuple[int, ...]
    their_tokens: tuple[int, ...]
    context: str | None
    ours: str | None
    theirs: str | None
    is_evicted: bool
    num_others: int

    def __str__(self) -> str:
        ours, theirs = _shown(self.ours, self.our_tokens), _shown(self.theirs, self.their_tokens)
        if ours == theirs:      # the same text, cut into other tokens
            ours, theirs = f"{ours} {list(self.our_tokens)}", f"{theirs} {list(self.their_tokens)}"
        after = f", after {_quoted(self.context)}," if self.context else ""
        start = f"At token {self.position:,}{after} the prompt goes on with {ours}"
        if not self.position:
            start = f"The prompt begins with {ours}"
        if not self.their_tokens:
            return f"{start}; {'what is known ends there' if self.position else 'nothing is known in its namespace'}."
        kind = "evicted" if self.is_evicted else "cached"
        others = f" (one of {self.num_others + 1:,} that share all before it)" if self.num_others else ""
        return f"{start}, the nearest {kind} sequence with {theirs}{others}."


@dataclass(frozen=True, slots=True)
class Eviction:
    """What was cached once.

    Attributes:
      num_tokens: tokens of the prompt, right after the cached ones, whose KV was evicted.
      age_s: how long ago the first of them went.
      policy: what took it: an eviction policy, or "user".
    """
    num_tokens: int
    age_s: float
    policy: str

    def __str__(self) -> str:
        who = "the user" if self.policy == "user" else f"the {self.policy} policy"
        return (f"The next {_count(self.num_tokens, 'token')} had been cached and {_were(self.num_tokens)} evicted "
                f"{duration(self.age_s)} ago by {who}.")


@dataclass(frozen=True, slots=True)
class OtherNamespace:
    """A longer match where KV may not be taken from.

    Attributes:
      namespace: the namespace with the longest match.
      num_tokens: tokens of the prompt cached there.
      differences: what makes it another namespace, in words.
    """
    namespace: Namespace
    num_tokens: int
    differences: str

    def __str__(self) -> str:
        return (f"{_count(self.num_tokens, 'token')} of this prompt {_are(self.num_tokens)} cached in another "
                f"namespace ({self.differences}); KV is never shared between namespaces.")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the cache has of a prompt now, and why not more. `str` says it in a few sentences.

    Attributes:
      num_tokens: length of the prompt.
      num_cached_tokens: tokens a request would find, host memory and the last, partial page included; at most
        `num_tokens - 1`, because the last token is always computed for its logits.
      num_host_tokens: those of them that are in host memory.
      reason: why the rest is missing; what accounts for most where several do.
      divergence: where the prompt leaves what the cache knows; None when it never does.
      eviction: what of it was evicted, None when nothing was.
      other_namespace: the longest match elsewhere, None when none is longer than here.
      num_unused_tokens: further tokens that are known, and never used because hits are rounded down.
      granularity: hits are multiples of this many tokens.
    """
    num_tokens: int
    num_cached_tokens: int
    num_host_tokens: int
    reason: MissReason
    divergence: Divergence | None = None
    eviction: Eviction | None = None
    other_namespace: OtherNamespace | None = None
    num_unused_tokens: int = 0
    granularity: int = 1

    @property
    def num_new_tokens(self) -> int:
        """Tokens neither cached nor remembered, the last one included."""
        known = self.num_cached_tokens + self.num_unused_tokens + (self.eviction.num_tokens if self.eviction else 0)
        return self.num_tokens - known

    def sentences(self) -> list[str]:
        share = f" ({self.num_cached_tokens / self.num_tokens:.0%})" if self.num_cached_tokens else ""
        host = f", {self.num_host_tokens:,} of them in host memory" if self.num_host_tokens else ""
        lines = [f"{self.num_cached_tokens:,} of {_count(self.num_tokens, 'prompt token')} "
                 f"{_are(self.num_cached_tokens)} cached{share}{host}."]
        if self.reason is MissReason.CACHING_OFF:
            return [*lines, "Prefix caching is off for this prompt, so nothing is looked up."]
        if self.reason is MissReason.WHOLE_PROMPT_CACHED:
            return [*lines, "That is the whole prompt: its last token is always computed, for its logits."]
        if self.num_unused_tokens:
            lines.append(f"The next {_count(self.num_unused_tokens, 'token')} {_are(self.num_unused_tokens)} known and "
                         f"not used: with deterministic=True hits are multiples of {self.granularity:,} tokens.")
        lines += [str(part) for part in (self.eviction, self.other_namespace) if part is not None]
        if self.num_new_tokens == self.num_tokens:
            lines.append("This beginning was never seen in this namespace, as far as the cache remembers.")
        elif self.num_new_tokens > 1:
            lines.append(f"The last {self.num_new_tokens:,} tokens were never seen after that, as far as the cache "
                         "remembers.")
        return lines if self.divergence is None else [*lines, str(self.divergence)]

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def _repr_html_(self) -> str:
        parts = (("cached on the device", self.num_cached_tokens - self.num_host_tokens, DEVICE_COLOR),
                 ("cached in host memory", self.num_host_tokens, HOST_COLOR),
                 ("evicted", self.eviction.num_tokens if self.eviction else 0, EVICTED_COLOR),
                 ("to be computed", self.num_new_tokens + self.num_unused_tokens, "rgba(128,128,128,.25)"))
        bar = "".join(f'<span title="{name}: {_count(n, "token")}" style="flex:{n};background:{color}"></span>'
                      for name, n, color in parts if n)
        text = "<br/>".join(html.escape(line) for line in self.sentences())
        return (f'<div style="max-width:48em;line-height:1.5"><div style="display:flex;height:10px;margin:4px 0 8px;'
                f'border-radius:3px;overflow:hidden">{bar}</div>{text}</div>')


def explain(cache: PrefixCache, tokens: Sequence[int] | np.ndarray, namespace: Namespace | None = Namespace(),
            decode: Decode | None = None) -> Explanation:
    """Says what a request with this prompt would find in the cache now, and why it would not find more.

    Cost: linear in the prompt times the number of namespaces, plus the sequences that part where the prompt does.

    Args:
      tokens: the prompt's token ids, int32[k], k >= 1.
      namespace: where it would look; None: the request shares nothing.
      decode: ids to text, special tokens included; None: ids are shown instead of text.

    Raises:
      ValueError: `tokens` is empty.
    """
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"tokens of shape {tokens.shape}: expected the ids of a prompt, at least one")
    if not cache.enabled or namespace is None:
        return Explanation(len(tokens), 0, 0, MissReason.CACHING_OFF)
    tree, longest = cache.tree, len(tokens) - 1
    num_cached = cache.num_matching_tokens(tokens, namespace)
    match = tree.match(tokens[:longest if cache.granularity == 1 else num_cached], namespace, touch=False)
    num_host = match.num_host_pages * tree.page_size
    num_partial = num_cached - match.num_tokens - num_host      # from a node, or from a running request with more
    if num_partial and match.partial is not None and match.partial.num_tokens == num_partial:
        num_host += num_partial if match.partial.node.tier is Tier.HOST else 0
    end, gone = _End(None, 0, 0), None
    if namespace in tree.roots:
        end, gone = _remembered(tree, tree.roots[namespace], tokens)
    if end.num_tokens < num_cached:
        end, gone = _End(None, 0, num_cached), None
    divergence = _divergence(end, tokens, tree.page_size, decode) if end.num_tokens < len(tokens) else None
    num_known = min(end.num_tokens, longest)
    num_usable = num_known - num_known % cache.granularity
    num_unused = num_known - max(num_usable, num_cached)
    eviction = None
    if gone is not None and num_usable > num_cached:
        eviction = Eviction(num_usable - num_cached, max(cache.clock() - gone.evicted_s, 0.0), gone.evicted_by)
    other = _other_namespace(tree, tokens[:longest], namespace, num_cached)
    reason = _reason(longest - num_cached, num_cached, num_unused, eviction, other, tree.page_size)
    return Explanation(len(tokens), num_cached, num_host, reason, divergence, eviction, other, num_unused,
                       cache.granularity)


def duration(seconds: float) -> str:
    """A time span to two digits or so: "0.3 s", "12 s", "5 min", "3 h", "2 d"."""
    if seconds < 1:
        return f"{seconds:.1f} s"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def visible(text: str) -> str:
    """`text` on one line: line ends, control and other unprintable characters as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def texts_after(decode: Decode, before: Sequence[int], *tails: Sequence[int]) -> tuple[str, list[str]]:
    """Text of token sequences that go on after the same `before`, in whole characters.

    A character of which only some bytes belong to `before` counts to the tails, on each side as it is completed there;
    one that a tail leaves unfinished is left out.

    Returns:
      The text of `before`, and the text of each tail after it.
    """
    start = decode(before).rstrip(BROKEN)
    whole = [decode([*before, *tail]).rstrip(BROKEN) for tail in tails]
    shared = commonprefix([start, *whole])
    return shared, [text[len(shared):] for text in whole]


class _End(NamedTuple):
    """A point of the tree: `num_edge_tokens` into the edge of `node`, `num_tokens` from the root."""
    node: Node | None
    num_edge_tokens: int
    num_tokens: int


def _walk(tree: RadixTree, end: _End, tokens: np.ndarray, *, gone: bool = False) -> list[_End]:
    """Follows `tokens` one by one from the end of an edge, through nodes with KV or evicted ones: all it passes."""
    ends = [end]
    while (closest := tree.closest(end.node, tokens[end.num_tokens:end.num_tokens + tree.page_size], gone=gone)):
        child, common = closest
        if common == tree.page_size:
            common = common_prefix(np.frombuffer(child.key, ">i4"), tokens[end.num_tokens:])
        if common == 0:
            break
        end = _End(child, common, end.num_tokens + common)
        ends.append(end)
        if not _is_whole_edge(end):
            break
    return ends


def _remembered(tree: RadixTree, root: Node, tokens: np.ndarray) -> tuple[_End, Node | None]:
    """The longest prefix of `tokens` that is cached or remembered: where it ends, and its first evicted node."""
    live = _walk(tree, _End(root, 0, 0), tokens)
    best, first_gone = live[-1], None
    for end in live:
        if _is_whole_edge(end):
            ends = _walk(tree, end, tokens, gone=True)
            if ends[-1].num_tokens > best.num_tokens:
                best, first_gone = ends[-1], ends[1].node
    return best, first_gone


def _is_whole_edge(end: _End) -> bool:
    return end.num_edge_tokens * _TOKEN_BYTES == len(end.node.key)


def _divergence(end: _End, tokens: np.ndarray, page_size: int, decode: Decode | None) -> Divergence:
    position = end.num_tokens
    ours = tuple(tokens[position:position + NUM_SHOWN_TOKENS].tolist())
    rivals, offset = _rivals(end, page_size) if end.node is not None else ([], 0)
    nearest = max(rivals, key=_recency, default=None)
    theirs = tuple(_onward(nearest, offset)) if nearest is not None else ()
    context = our_text = their_text = None
    if decode is not None:
        before = tokens[max(position - NUM_CONTEXT_TOKENS - NUM_LEAD_TOKENS, 0):position].tolist()
        shared, (our_text, their_text) = texts_after(decode, before, ours, theirs)
        lead = decode(before[:-NUM_CONTEXT_TOKENS]).rstrip(BROKEN) if len(before) > NUM_CONTEXT_TOKENS else ""
        context = shared[len(commonprefix([lead, shared])):]
    return Divergence(position, ours, theirs, context, our_text, their_text,
                      nearest is not None and nearest.tier is Tier.GONE, max(len(rivals) - 1, 0))


def _rivals(end: _End, page_size: int) -> tuple[list[Node], int]:
    """Nodes that go on after `end` and how many tokens of their edges lie before it."""
    node, offset = end.node, end.num_edge_tokens
    if node.parent is not None and offset < page_size:      # inside the first page, which siblings may share in part
        parent, prefix = node.parent, node.key[:offset * _TOKEN_BYTES]
    elif offset * _TOKEN_BYTES < len(node.key):
        return [node], offset
    else:
        parent, prefix, offset = node, b"", 0
    past = prefix + b"\xff" * (page_size * _TOKEN_BYTES)
    found = [parent.children[first] for first in parent.children.irange(prefix, past)] if parent.children else []
    found += [child for first, child in (parent.gone or {}).items() if first.startswith(prefix)]
    return [child for child in found if len(child.key) > offset * _TOKEN_BYTES], offset


def _onward(node: Node, offset: int) -> list[int]:
    """The next few tokens from `offset` tokens into the edge of `node`, where it branches along the latest use."""
    tokens: list[int] = []
    while True:
        key = node.key[offset * _TOKEN_BYTES:(offset + NUM_SHOWN_TOKENS - len(tokens)) * _TOKEN_BYTES]
        tokens += np.frombuffer(key, ">i4").tolist()
        below = node.children or node.gone
        if len(tokens) == NUM_SHOWN_TOKENS or not below:
            return tokens
        node, offset = max(below.values(), key=_recency), 0


def _recency(node: Node) -> tuple[bool, int]:
    return node.tier is not Tier.GONE, node.last_used


def _other_namespace(tree: RadixTree, tokens: np.ndarray, own: Namespace, num_cached: int) -> OtherNamespace | None:
    best, most = None, num_cached
    for namespace, root in tree.roots.items():
        if namespace != own:
            reached = _walk(tree, _End(root, 0, 0), tokens)[-1].num_tokens
            if reached > most:
                best, most = namespace, reached
    return None if best is None else OtherNamespace(best, most, _differences(best, own))


def _differences(other: Namespace, own: Namespace) -> str:
    return ", ".join(f"{NAMESPACE_WORDS[name]} {theirs!r} instead of {ours!r}"
                     for name, theirs, ours in zip(Namespace._fields, other, own) if theirs != ours)


def _reason(num_missing: int, num_cached: int, num_unused: int, eviction: Eviction | None,
            other: OtherNamespace | None, page_size: int) -> MissReason:
    if num_missing == 0:
        return MissReason.WHOLE_PROMPT_CACHED
    if num_unused > num_missing / 2:
        return MissReason.ROUNDED_DOWN
    num_evicted = eviction.num_tokens if eviction else 0
    num_elsewhere = other.num_tokens - num_cached if other else 0
    # Prompts share their first words by chance: less than a page counts only where it is most of what is missing.
    if max(num_evicted, num_elsewhere) < min(page_size, num_missing / 2):
        return MissReason.NEVER_SEEN
    return MissReason.EVICTED if num_evicted >= num_elsewhere else MissReason.OTHER_NAMESPACE


def _quoted(text: str) -> str:
    return f'"{visible(text)}"'


def _shown(text: str | None, tokens: tuple[int, ...]) -> str:
    return _quoted(text) if text else str(list(tokens))


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _were(n: int) -> str:
    return "was" if n == 1 else "were"
